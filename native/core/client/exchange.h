// One request and its reply, seen from the client: through the session's socket, or through its mailbox (session/mailbox.h).
//
// Owns no memory and no descriptor; one request at a time per socket is the caller's to see to. `meanwhile` runs between the two:
// work that does not depend on the reply. Both return the reply's body and throw the error that the daemon answered, Detached if
// it is gone or answers something else, DeadlineExceeded after the socket's timeout.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/format/block.h"
#include "core/format/protocol.h"
#include "core/format/segment.h"

namespace kv {

protocol::Request request_of(protocol::Op op, uint32_t count, uint32_t tag);

// Descriptors that come with the reply are appended to `descriptors`, or closed.
std::vector<uint8_t> exchange(int socket, const protocol::Request& request, std::span<const uint8_t> body,
                              std::vector<Fd>* descriptors, const std::function<void()>& meanwhile = {});

// Of a session that may be refused before its request is read: the refusal is thrown then.
std::vector<uint8_t> first_exchange(int socket, const protocol::Request& request, std::span<const uint8_t> body,
                                    std::vector<Fd>* descriptors);

// Nothing was asked if it returns nothing: the request is too long, or the daemon does not look at the mailbox now.
std::optional<std::vector<uint8_t>> exchange_by_mailbox(Mailbox& box, int socket, const protocol::Request& request,
                                                        std::span<const uint8_t> body, const std::function<void()>& meanwhile);

// What a caller's language holds, as Python its GIL: nobody waits for a daemon with it. Set once, by bindings.
struct HeldLock {
  void* (*let_go)();  // null: this thread does not hold it
  void (*take_back)(void*);
};
inline std::atomic<const HeldLock*> held_lock{nullptr};

class WithoutHeldLock {
 public:
  WithoutHeldLock() : lock_(held_lock.load(std::memory_order_acquire)), state_(lock_ ? lock_->let_go() : nullptr) {}
  WithoutHeldLock(const WithoutHeldLock&) = delete;
  ~WithoutHeldLock() noexcept(false) {  // as bindings/without_gil.h
    if (state_) lock_->take_back(state_);
  }

 private:
  const HeldLock* const lock_;
  void* const state_;
};

}  // namespace kv
