// A latency histogram as Python reads it: kvstored._core.Latency, of a namespace's session requests or of its disk.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/latency.h"

namespace kv::daemon {

struct Latency {
  std::string space, operation;  // of one namespace; of a disk tier, which has one, no name
  std::vector<uint64_t> counts;  // per bucket
  double sum_s;

  Latency(std::string of, std::string what, const LatencyCounts& read)
      : space(std::move(of)),
        operation(std::move(what)),
        counts(read.buckets.begin(), read.buckets.end()),
        sum_s(static_cast<double>(read.sum_ns) * 1e-9) {}
};

}  // namespace kv::daemon
