// A session's mailbox: one small request and its answer in the session page, for as long as the daemon looks there. A message
// through the socket takes two system calls on each side and two copies by the kernel, 6 to 7 us there and back; a line of
// memory from one processor to the other takes 0.1 to 0.2 (docs/log.md).
//
// Owns the daemon's end. The client's is in Attachment: one request at a time, which has gone through the socket or lies here.
// What is too long, or comes while the daemon sleeps, goes through the socket as ever; who knows nothing of mailboxes too.
//
// Nothing is lost between two that fall asleep. The daemon says that it no longer looks, fences, and looks once more; the client
// writes its request, fences, and reads whether the daemon looks: if not, it knocks at the socket. The client says that it falls
// asleep, fences, and looks for the answer once more; the daemon writes the answer, fences, and reads whether the client
// sleeps: if so, it knocks.
//
// Trusts nothing in the page: a request is copied out before it is read. Invariant: a request is taken once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/format/block.h"
#include "core/format/segment.h"

namespace kv {

class DaemonMailbox {
 public:
  // `page` is a mapping of the session page's first kPinsOffset bytes. What was asked of another daemon is not taken.
  explicit DaemonMailbox(Mapping page);

  // A new request, copied into `buffer`, which has room for kMailboxBytes. Empty: there is none.
  std::span<const uint8_t> take(std::vector<uint8_t>& buffer);
  // Answers request `number`, here or (too long for here, false) by saying that the answer lies in the socket.
  bool answer(uint32_t number, std::span<const uint8_t> head, std::span<const uint8_t> body);
  void answered_by_socket(uint32_t number);
  bool asleep(uint32_t number) const;  // does its client sleep? To be asked after the answer
  void attend(bool looks);             // whoever says no looks once more
  uint32_t asked_from() const { return box().processor.load(std::memory_order_relaxed); }  // base/processor.h
  bool cut() const { return cut_.load(std::memory_order_acquire); }  // by its client: nothing will be asked here any more

 private:
  Mailbox& box() const { return *page_.at<Mailbox>(kMailboxOffset); }

  Mapping page_;
  std::atomic<bool> cut_{false};
  Guard guard_;
  uint32_t seen_;
};

}  // namespace kv
