#include "core/session/region_requests.h"

#include <string>

#include "core/base/error.h"
#include "core/format/protocol.h"

namespace kv {
namespace {

using protocol::append;

std::vector<uint8_t> told(const std::vector<RegionChange>& changes) {
  constexpr Handle kNone{protocol::kNoRecord, 0};
  std::vector<uint8_t> out;
  for (const RegionChange& change : changes) {
    const Handle opened = change.opened.empty() ? kNone : change.opened[0];
    const Handle ended = change.ended.empty() ? kNone : change.ended[0];
    append(out, protocol::RegionItem{change.status, change.block.record, change.block.generation, opened.record, ended.record,
                                     opened.generation, ended.generation});
  }
  return out;
}

std::vector<uint8_t> all_told(const std::vector<RegionChange>& changes) {
  std::vector<uint8_t> out;
  for (const RegionChange& change : changes)
    append(out, protocol::PiecesAnswer{change.status, change.block.record, change.block.generation,
                                       static_cast<uint32_t>(change.opened.size()), static_cast<uint32_t>(change.ended.size())});
  for (const RegionChange& change : changes)
    for (const auto* parts : {&change.opened, &change.ended})
      for (const Handle& part : *parts) append(out, protocol::BlockItem{part.record, 0, part.generation});
  return out;
}

CreateRequest request_of(uint32_t session, const protocol::RegionHead& head) {
  if (head.priority > kMaxPriority)
    throw Error(Code::InvalidArgument,
                "priority is " + std::to_string(head.priority) + ", the limit is " + std::to_string(kMaxPriority));
  return {session, head.layout, head.priority, head.ttl_s, {}};
}

}  // namespace

void need_end(const protocol::Reader& body) {
  if (!body.at_end()) throw Error(Code::InvalidArgument, "the message's length does not fit its count");
}

std::vector<uint8_t> publish(Store& store, uint32_t session, uint32_t count, protocol::Reader body) {
  const auto head = body.take<protocol::RegionHead>();
  const auto items = body.take<protocol::PublishItem>(count);
  need_end(body);
  const CreateRequest request = request_of(session, head);
  std::vector<Publish> blocks;
  for (const auto& item : items)
    blocks.push_back({{.key = item.key, .tokens = item.tokens}, item.offset, item.rest, item.checksummed != 0});
  return told(store.publish(request, blocks));
}

std::vector<uint8_t> publish_pieces(Store& store, uint32_t session, uint32_t count, protocol::Reader body) {
  const auto head = body.take<protocol::RegionHead>();
  const auto items = body.take<protocol::PiecesItem>(count);
  const CreateRequest request = request_of(session, head);
  uint64_t all = 0;
  for (const auto& item : items) all += item.pieces;
  if (all > protocol::kMaxPiecesPerMessage || count > protocol::kMaxBlocksInPieces)
    throw Error(Code::InvalidArgument,
                std::to_string(count) + " blocks in " + std::to_string(all) + " pieces, the limits of a message are " +
                    std::to_string(protocol::kMaxBlocksInPieces) + " and " + std::to_string(protocol::kMaxPiecesPerMessage));
  std::vector<Publish> blocks;
  for (const auto& item : items) {
    Publish block{{.key = item.key, .tokens = item.tokens}, 0, item.rest, item.checksummed != 0};
    for (const uint64_t word : body.take<uint64_t>(item.pieces)) block.pieces.push_back(Extent::unpack(word));
    if (block.pieces.empty()) throw Error(Code::InvalidArgument, "a block of 0 pieces, or of more than the message has");
    blocks.push_back(std::move(block));
  }
  need_end(body);
  return all_told(store.publish(request, blocks));
}

std::vector<uint8_t> take_back(Store& store, uint32_t session, protocol::Op op, uint32_t count, protocol::Reader body) {
  const auto head = body.take<protocol::RegionHead>();
  const auto items = body.take<protocol::TakeBackItem>(count);
  need_end(body);
  std::vector<TakeBack> blocks;
  for (const auto& item : items) blocks.push_back({{item.record, item.generation}, item.key, item.region});
  const std::vector<RegionChange> changes = store.take_back(session, head.layout, blocks);
  return op == protocol::Op::TakeBack ? told(changes) : all_told(changes);
}

}  // namespace kv
