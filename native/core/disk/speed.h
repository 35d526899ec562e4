// How fast loads are: bytes per second of time in which something was being loaded. What was measured fades with time, loads or
// not: one stall, after which everybody rather computes than loads, would otherwise be the last that is known of a disk.
#pragma once

#include <cmath>
#include <cstdint>

namespace kv {

class LoadSpeed {
 public:
  void add(uint64_t bytes) { bytes_ += static_cast<double>(bytes); }
  // Bytes a second, 0 if nothing is known, or no more. `loading`: from now on something is being loaded.
  uint64_t tell(uint64_t now_ns, bool loading) {
    const uint64_t passed_ns = now_ns - told_ns_;
    if (loading_) busy_ns_ += static_cast<double>(passed_ns), loaded_ns_ = now_ns;
    const double faded = std::exp2(-static_cast<double>(passed_ns) / kHalfLifeNs);
    bytes_ *= faded, busy_ns_ *= faded;
    if (!loading && now_ns - loaded_ns_ >= kForgottenNs) bytes_ = busy_ns_ = 0;
    told_ns_ = now_ns, loading_ = loading;
    return busy_ns_ > 0 ? static_cast<uint64_t>(bytes_ * 1e9 / busy_ns_) : 0;
  }

 private:
  static constexpr double kHalfLifeNs = 10e9;
  static constexpr uint64_t kForgottenNs = 60'000'000'000;  // then somebody finds out anew
  double bytes_ = 0, busy_ns_ = 0;
  uint64_t told_ns_ = 0, loaded_ns_ = 0;
  bool loading_ = false;
};

}  // namespace kv
