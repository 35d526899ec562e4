// What came to a store and what went from it, for those who tell other hosts: the last changes, each a mark of its key with the
// lowest bit set while the block is there. Owns the ring. Never waits: the store notes under its own lock, in some ten
// nanoseconds, and nothing at all while nobody listens. Invariant: who has read to a place gets every change behind it in order,
// or is told that some are gone.
//
// And what clients here want one host to come for, until the connection on which that host hears takes it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/format/block.h"

namespace kv {

// What hosts tell each other of a key: 63 of its bits, for a digest has no others that are better.
inline uint64_t mark_of(const Key& key, bool held) { return (key.words[2] & ~uint64_t{1}) | (held ? 1 : 0); }

class Journal {
 public:
  static constexpr size_t kEntries = 8192;
  static constexpr size_t kMostPushed = 4096;  // keys that wait for one host

  void listen(int more) { listeners_.fetch_add(more, std::memory_order_relaxed); }
  bool heard() const { return listeners_.load(std::memory_order_relaxed) != 0; }  // else nothing need be found out to note it

  void note(const Key& key, bool held) {
    std::lock_guard lock(mutex_);
    ring_[head_++ % kEntries] = mark_of(key, held);
    if (waiting_) changed_.notify_all();
  }

  uint64_t head() const {
    std::lock_guard lock(mutex_);
    return head_;
  }

  // Appends what came since `from`, which moves on. False: some of it is gone.
  bool read(uint64_t& from, std::vector<uint64_t>& out) const {
    std::lock_guard lock(mutex_);
    if (head_ - from > kEntries) return false;
    for (; from != head_; ++from) out.push_back(ring_[from % kEntries]);
    return true;
  }

  // Until something is behind `from` or was pushed to the node, or it is over (and wake() was called), or the time is up.
  void wait(uint64_t from, const std::string& node, std::chrono::milliseconds most, const std::atomic<bool>& over) {
    std::unique_lock lock(mutex_);
    const auto pushed = [&] {
      const auto taker = takers_.find(node);
      return taker != takers_.end() && !taker->second.keys.empty();
    };
    waiting_ += 1;
    changed_.wait_for(lock, most, [&] { return head_ != from || over.load() || pushed(); });
    waiting_ -= 1;
  }
  void wake() {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

  // A connection more, or less, of a host that comes for what is pushed to it.
  void take_for(const std::string& node, int more) {
    std::lock_guard lock(mutex_);
    Taker& taker = takers_[node];
    if ((taker.connections += more) == 0) takers_.erase(node);
  }
  // How many of the keys wait for that host now. None: it has no such connection.
  std::optional<size_t> push(const std::string& node, std::span<const Key> keys) {
    std::lock_guard lock(mutex_);
    const auto taker = takers_.find(node);
    if (taker == takers_.end()) return std::nullopt;
    std::vector<Key>& waiting = taker->second.keys;
    keys = keys.first(std::min(keys.size(), kMostPushed - waiting.size()));
    waiting.insert(waiting.end(), keys.begin(), keys.end());
    changed_.notify_all();
    return keys.size();
  }
  // What was pushed to it since.
  std::vector<Key> take(const std::string& node) {
    std::lock_guard lock(mutex_);
    const auto taker = takers_.find(node);
    return taker == takers_.end() ? std::vector<Key>() : std::exchange(taker->second.keys, {});
  }
  std::vector<std::string> takers() const {
    std::lock_guard lock(mutex_);
    std::vector<std::string> nodes;
    for (const auto& [node, taker] : takers_) nodes.push_back(node);
    return nodes;
  }

 private:
  struct Taker {
    int connections = 0;
    std::vector<Key> keys;
  };
  std::atomic<int> listeners_{0};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t waiting_ = 0;
  uint64_t head_ = 0;
  std::array<uint64_t, kEntries> ring_{};
  std::map<std::string, Taker> takers_;  // by node
};

}  // namespace kv
