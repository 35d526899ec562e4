// How long operations take: counts in buckets whose bounds double, from 1 µs to 1 s. Adding costs two relaxed increments and
// may be done by any thread; reading is a snapshot that is at most a few additions apart from itself.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace kv {

inline constexpr int kFirstLatencyBit = 10;  // the first bucket holds what takes at most 2^10 ns
inline constexpr int kLatencyBuckets = 22;   // bounds 2^10 to 2^30 ns, and what takes longer

struct LatencyCounts {
  std::array<uint64_t, kLatencyBuckets> buckets;  // not cumulative
  uint64_t sum_ns;
};

class LatencyHistogram {
 public:
  static int bucket(uint64_t ns) {
    return std::clamp(static_cast<int>(std::bit_width(ns ? ns - 1 : 0)) - kFirstLatencyBit, 0, kLatencyBuckets - 1);
  }
  void add(uint64_t ns) {
    buckets_[static_cast<size_t>(bucket(ns))].fetch_add(1, std::memory_order_relaxed);
    sum_ns_.fetch_add(ns, std::memory_order_relaxed);
  }
  LatencyCounts read() const {
    LatencyCounts counts{};
    for (size_t i = 0; i < counts.buckets.size(); ++i) counts.buckets[i] = buckets_[i].load(std::memory_order_relaxed);
    counts.sum_ns = sum_ns_.load(std::memory_order_relaxed);
    return counts;
  }

 private:
  std::array<std::atomic<uint64_t>, kLatencyBuckets> buckets_{};
  std::atomic<uint64_t> sum_ns_{0};
};

}  // namespace kv
