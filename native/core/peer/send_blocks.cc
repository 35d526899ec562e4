#include "core/peer/send_blocks.h"

#include <time.h>

#include <algorithm>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/disk/block_file.h"

namespace kv::peer {
namespace {
constexpr uint32_t kSliceMs = 20;         // between two looks whether the other end is still there
constexpr uint64_t kSignOfLifeMs = 500;   // of kStallMs
constexpr uint64_t kLongestMs = 120'000;  // for which a block that nobody finishes is followed
}  // namespace

struct BlockSender::Block {
  explicit Block(Store& store, uint16_t item) : store(store), item(item) {}
  ~Block() {
    if (job) store.end_read(job->handle);
  }
  Block(const Block&) = delete;

  Store& store;
  const uint16_t item;
  std::optional<ReadJob> job;
  const Layout* layout = nullptr;
  std::vector<uint32_t> sums;  // of the layers, where they are known
  uint32_t layers_sent = 0, meta_crc = 0;
  bool meta_sent = false, done = false;
};

Frame BlockSender::frame(Kind kind, const Block& block) const {
  return {.kind = static_cast<uint16_t>(kind), .item = block.item, .request = request_};
}

BlockSender::Sent BlockSender::answer(uint32_t request, std::span<const Key> keys) {
  request_ = request, sent_ = {};
  std::list<Block> blocks;
  for (const Key& key : keys) begin(blocks.emplace_back(store_, static_cast<uint16_t>(blocks.size())), key);
  const uint64_t began_ms = monotonic_ns() / 1'000'000;
  for (uint64_t told_ms = began_ms;;) {
    Block* first = nullptr;
    for (Block& block : blocks)
      if (!block.done && !advance(block) && !first) first = &block;
    const uint64_t now_ms = monotonic_ns() / 1'000'000;
    if (first && now_ms - told_ms > kSignOfLifeMs) channel_.put(frame(Kind::Waiting, *first), {}), told_ms = now_ms;
    channel_.flush();
    if (!first) return sent_;
    if (channel_.hung_up()) throw Broken(Broken::Why::Gone, "it hung up");
    if (now_ms - began_ms > kLongestMs) throw Broken(Broken::Why::Stalled, "a block that nobody finishes");
    try {
      store_.wait_layers(first->job->handle, first->layers_sent + 1, kSliceMs);
    } catch (const Error&) {
      // advance() says so.
    }
  }
}

void BlockSender::begin(Block& block, const Key& key) {
  block.job = store_.begin_read(key);
  if (!block.job) {
    channel_.put(frame(Kind::Missing, block), {});
    block.done = true;
    return;
  }
  const ReadJob& job = *block.job;
  block.layout = &job.layout->layout;
  if (told_.insert(job.layout->digest.words).second)
    channel_.put(frame(Kind::Layout, block), std::as_bytes(std::span(block.layout->blob)));
  if (job.checksummed) {
    block.sums.resize(block.layout->num_layers());
    std::memcpy(block.sums.data(), window_.at(job.extent.offset + block.layout->checksums_offset(job.shape.tokens)),
                4 * block.sums.size());
  }
  const auto now_s = static_cast<uint32_t>(::time(nullptr));
  const uint32_t ttl_s = job.expiry_s ? std::max(job.expiry_s, now_s + 1) - now_s : 0;
  const BlockHead head{key,        job.layout->digest, job.fingerprint, job.shape.tokens,          job.shape.base_position,
                       job.parent, job.shape.priority, ttl_s,           block.layout->num_layers()};
  channel_.put(frame(Kind::Head, block), bytes_of(head));
}

// Sends what is ready. True if that was the last of the block.
bool BlockSender::advance(Block& block) {
  const uint32_t layers = block.layout->num_layers();
  bool sealed = block.job->sealed;
  uint32_t ready = layers;
  try {
    if (!sealed) {
      sealed = store_.is_sealed(block.job->handle);
      ready = store_.wait_layers(block.job->handle, 0, 0);
    }
    if (window_.truncated()) throw Error(Code::Fenced, "the pool's memory is gone");
  } catch (const Error&) {
    channel_.put(frame(Kind::Lost, block), {});
    return block.done = true;
  }
  if (ready > block.layers_sent && !block.meta_sent) send_meta(block);
  for (; block.layers_sent < ready; ++block.layers_sent) send_layer(block, block.layers_sent);
  if (!sealed || ready < layers) return false;
  if (!block.job->sealed) send_meta(block);  // its writer may have changed it until the seal
  channel_.put(frame(Kind::Whole, block), {});
  sent_.blocks += 1;
  return block.done = true;
}

void BlockSender::send_meta(Block& block) {
  const uint32_t tokens = block.job->shape.tokens;
  const std::span meta(window_.at(block.job->extent.offset + block.layout->meta_offset(tokens)),
                       block.layout->meta_bytes(tokens));
  const uint32_t crc = crc32c(meta.data(), meta.size());
  if (block.meta_sent && crc == block.meta_crc) return;
  block.meta_sent = true, block.meta_crc = crc;
  Frame head = frame(Kind::Meta, block);
  head.payload_crc = crc;
  channel_.put_summed(head, meta);
  sent_.bytes += meta.size();
}

void BlockSender::send_layer(Block& block, uint32_t layer) {
  const uint32_t tokens = block.job->shape.tokens;
  const std::span bytes(window_.at(block.job->extent.offset + block.layout->layer_offset(layer, tokens)),
                        block.layout->layer_bytes(layer, tokens));
  Frame head = frame(Kind::Layer, block);
  head.layer = layer;
  // The writer's own sum, where it left one: what this host's memory has made of the bytes since is then found out over there.
  head.payload_crc = block.sums.empty() ? crc32c(bytes.data(), bytes.size()) : block.sums[layer];
  channel_.put_summed(head, bytes);
  sent_.bytes += bytes.size();
}

}  // namespace kv::peer
