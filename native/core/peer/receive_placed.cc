// Blocks that the other end brings to their place itself: the fabric beside this daemon. It is lent the memory of the block, and
// what lies there then is verified as what came over a stream is.
#include <cstring>

#include "core/base/checksum.h"
#include "core/peer/receive_blocks.h"

namespace kv::peer {
void take_over(Channel& channel, const Frame& head, Quarantine& loans) {
  if (head.bytes > kMaxControlBytes || head.bytes % sizeof(uint64_t)) malformed("numbers of loans that are none");
  std::vector<uint64_t> over(head.bytes / sizeof(uint64_t));
  channel.take_checked(head, reinterpret_cast<std::byte*>(over.data()));
  for (const uint64_t loan : over) loans.over(loan);
}

void BlockReceiver::answer(Kind kind, const Item& landing, uint32_t layer, std::span<const std::byte> payload) {
  channel_.put({.kind = static_cast<uint16_t>(kind), .item = landing.number, .request = request_, .layer = layer}, payload);
  channel_.flush();
}

void BlockReceiver::take_offer(const Frame& head, Item& landing) {
  if (!loans_ || !landing.headed || landing.meta || !landing.offered.empty()) malformed("an offer that does not belong here");
  if (head.bytes != sizeof(uint32_t) * (1 + landing.sums.size())) malformed("an offer of another length");
  landing.offered.resize(1 + landing.sums.size());
  channel_.take_checked(head, reinterpret_cast<std::byte*>(landing.offered.data()));
  Room room{landing.extent.offset, landing.layout->extent_bytes(landing.tokens), 0};
  if (!landing.created) {
    room = {};
  } else if (landing.layers == 0) {  // of what has begun to come otherwise the rest comes so
    room.loan = landing.loan = loans_->lend(landing.key, landing.handle, epoch_);
  }
  answer(Kind::Room, landing, 0, bytes_of(room));
  if (!landing.created) give_up(landing, landing.unwanted);
}

void BlockReceiver::take_placed(Item& landing) {
  if (!landing.loan) malformed("a block that was placed nowhere");
  loans_->over(std::exchange(landing.loan, 0));
  const bool good = !window_.truncated() && is_as_offered(landing);
  if (good) {
    std::memcpy(landing.sums.data(), landing.offered.data() + 1, sizeof(uint32_t) * landing.sums.size());
    landing.next = landing.layers = landing.head.layers, landing.meta = true;
    received_.bytes += landing.layout->extent_bytes(landing.tokens);
    take_whole(landing);
  }
  (good ? received_.placed : received_.corrupt) += 1;
  answer(Kind::Checked, landing, good, {});
}

// What readers see is what was offered, and behind it is nothing.
bool BlockReceiver::is_as_offered(const Item& landing) const {
  const Layout& layout = *landing.layout;
  std::byte* const block = window_.at(landing.extent.offset);
  const auto piece = [&](uint64_t offset, uint64_t bytes, uint64_t end, uint32_t sum) {
    std::memset(block + offset + bytes, 0, end - offset - bytes);
    return crc32c(block + offset, bytes) == sum;
  };
  for (uint32_t layer = 0; layer < landing.head.layers; ++layer) {
    const uint64_t bytes = layout.layer_bytes(layer, landing.tokens), end = layout.layer_offset(layer + 1, landing.tokens);
    if (!piece(layout.layer_offset(layer, landing.tokens), bytes, end, landing.offered[1 + layer])) return false;
  }
  return piece(layout.meta_offset(landing.tokens), layout.meta_bytes(landing.tokens), layout.extent_bytes(landing.tokens),
               landing.offered[0]);
}

}  // namespace kv::peer
