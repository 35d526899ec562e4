// How many sessions of a user have ended while a client still locks them, as of the last look. Thread-safe by itself, so that the
// threads of other namespaces count them without waiting for the store's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace kv {

class LeftSessions {
 public:
  void add(uint32_t uid) {
    std::lock_guard lock(mutex_);
    ++left_[uid];
  }
  void drop(uint32_t uid) {
    std::lock_guard lock(mutex_);
    if (--left_.at(uid) == 0) left_.erase(uid);
  }
  size_t of(uint32_t uid) const {
    std::lock_guard lock(mutex_);
    const auto found = left_.find(uid);
    return found == left_.end() ? 0 : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint32_t, size_t> left_;  // none has 0
};

}  // namespace kv
