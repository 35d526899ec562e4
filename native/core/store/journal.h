// What came to a store and what went from it, for those who tell other hosts: the last changes, each a mark of its key with the
// lowest bit set while the block is there. Owns the ring. Never waits: the store notes under its own lock, in some ten
// nanoseconds, and nothing at all while nobody listens. Invariant: who has read to a place gets every change behind it in order,
// or is told that some are gone.
//
// And what clients here want one host to come for. It hears that on a connection; a word on its way is lost where that breaks, so
// the next one is told again what is not old. To be told twice costs a look.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/polling.h"
#include "core/format/block.h"

namespace kv {

// What hosts tell each other of a key: 63 of its bits, for a digest has no others that are better.
inline uint64_t mark_of(const Key& key, bool held) { return (key.words[2] & ~uint64_t{1}) | (held ? 1 : 0); }

class Journal {
 public:
  static constexpr size_t kEntries = 8192;
  static constexpr size_t kMostPushed = 4096;               // keys for one host
  static constexpr uint64_t kToldAgainNs = 15'000'000'000;  // a connection is known to be gone sooner, and there is another

  void listen(int more) { listeners_.fetch_add(more, std::memory_order_relaxed); }
  bool heard() const { return listeners_.load(std::memory_order_relaxed) != 0; }  // else nothing need be found out to note it

  void note(const Key& key, bool held) {
    std::lock_guard lock(mutex_);
    ring_[head_++ % kEntries] = mark_of(key, held);
    if (std::exchange(asleep_, false)) changed_.notify_one();  // which wakes the others
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

  // Until something is behind `from`, or behind `taken` of what was pushed to the node, or it is over (and wake() was called), or
  // the time is up.
  void wait(uint64_t from, const std::string& node, uint64_t taken, std::chrono::milliseconds most,
            const std::atomic<bool>& over) {
    std::unique_lock lock(mutex_);
    const auto pushed = [&] {
      const auto taker = takers_.find(node);
      return taker != takers_.end() && taker->second.end() > taken;
    };
    const auto until = std::chrono::steady_clock::now() + most;
    bool in_time = true;
    while (in_time && head_ == from && !over.load() && !pushed()) {
      asleep_ = true;
      in_time = changed_.wait_until(lock, until) == std::cv_status::no_timeout;
    }
    if (head_ != from) changed_.notify_all();
  }
  void wake() {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

  // A connection more, or less, of a host that comes for what is pushed to it. Where the first has to read from.
  uint64_t take_for(const std::string& node, int more, uint64_t now_ns = monotonic_ns()) {
    std::lock_guard lock(mutex_);
    takers_[node].connections += more;
    for (auto& [name, taker] : takers_) taker.forget(now_ns);
    std::erase_if(takers_, [](const auto& taker) { return taker.second.connections == 0 && taker.second.keys.empty(); });
    const auto taker = takers_.find(node);
    return taker == takers_.end() ? 0 : taker->second.first;
  }
  // How many of the keys that host is told now. None: it has no such connection.
  std::optional<size_t> push(const std::string& node, std::span<const Key> keys) {
    std::lock_guard lock(mutex_);
    const auto found = takers_.find(node);
    if (found == takers_.end() || found->second.connections == 0) return std::nullopt;
    Taker& taker = found->second;
    keys = keys.first(std::min<size_t>(keys.size(), kMostPushed - (taker.end() - taker.taken)));
    while (taker.keys.size() + keys.size() > kMostPushed) taker.keys.pop_front(), ++taker.first;
    for (const Key& key : keys) taker.keys.emplace_back(key, monotonic_ns());
    changed_.notify_all();
    return keys.size();
  }
  // What was pushed to it behind `from`, which moves on.
  std::vector<Key> take(const std::string& node, uint64_t& from) {
    std::lock_guard lock(mutex_);
    std::vector<Key> out;
    const auto found = takers_.find(node);
    if (found == takers_.end()) return out;
    Taker& taker = found->second;
    for (from = std::max(from, taker.first); from < taker.end(); ++from) out.push_back(taker.keys[from - taker.first].first);
    taker.taken = std::max(taker.taken, from);
    return out;
  }
  std::vector<std::string> takers() const {
    std::lock_guard lock(mutex_);
    std::vector<std::string> nodes;
    for (const auto& [node, taker] : takers_)
      if (taker.connections) nodes.push_back(node);
    return nodes;
  }

 private:
  struct Taker {
    int connections = 0;
    uint64_t first = 0, taken = 0;                // numbers: of keys[0], and behind the last that a connection took
    std::deque<std::pair<Key, uint64_t>> keys{};  // and when each was pushed
    uint64_t end() const { return first + keys.size(); }
    void forget(uint64_t now_ns) {  // what is old, and was taken if there is who may
      const auto over = [&] { return keys.front().second + kToldAgainNs < now_ns && (connections == 0 || first < taken); };
      for (; !keys.empty() && over(); ++first) keys.pop_front();
      taken = std::max(taken, first);
    }
  };
  std::atomic<int> listeners_{0};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool asleep_ = false;  // somebody may be, whom nobody has woken
  uint64_t head_ = 0;
  std::array<uint64_t, kEntries> ring_{};
  std::map<std::string, Taker> takers_;  // by node
};

}  // namespace kv
