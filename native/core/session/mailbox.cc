#include "core/session/mailbox.h"

#include <algorithm>
#include <cstring>

#include "core/base/atomics.h"

namespace kv {

DaemonMailbox::DaemonMailbox(Mapping page)
    : page_(std::move(page)), guard_(page_, &cut_), seen_(box().asked.load(std::memory_order_acquire)) {
  attend(false);
}

std::span<const uint8_t> DaemonMailbox::take(std::vector<uint8_t>& buffer) {
  const uint32_t asked = box().asked.load(std::memory_order_acquire);
  if (asked == seen_ || asked == 0) return {};
  seen_ = asked;
  const size_t bytes = std::min<size_t>(box().request_bytes.load(std::memory_order_relaxed), kMailboxBytes);
  std::memcpy(buffer.data(), box().bytes, bytes);
  return {buffer.data(), bytes};
}

bool DaemonMailbox::answer(uint32_t number, std::span<const uint8_t> head, std::span<const uint8_t> body) {
  if (head.size() + body.size() > kMailboxBytes) return false;
  std::memcpy(box().bytes, head.data(), head.size());
  if (!body.empty()) std::memcpy(box().bytes + head.size(), body.data(), body.size());
  box().answer_bytes.store(static_cast<uint32_t>(head.size() + body.size()), std::memory_order_relaxed);
  box().answered.store(number, std::memory_order_release);
  return true;
}

void DaemonMailbox::answered_by_socket(uint32_t number) {
  box().answer_bytes.store(0, std::memory_order_relaxed);
  box().answered.store(number, std::memory_order_release);
}

bool DaemonMailbox::asleep(uint32_t number) const {
  fence_full();
  return box().asleep.load(std::memory_order_relaxed) == number;
}

void DaemonMailbox::attend(bool looks) {
  box().attended.store(looks, std::memory_order_relaxed);
  fence_full();
}

}  // namespace kv
