// Latency histograms: the bounds double from 2^10 to 2^30 ns and hold what is at most that long; the session server counts every
// request of an attached client once, under its operation, also one that is refused.
#include "core/base/latency.h"

#include <numeric>

#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

uint64_t requests(Daemon& daemon, const std::string& operation) {
  for (const auto& latency : daemon.server->latencies())
    if (latency.operation == operation)
      return std::accumulate(latency.counts.buckets.begin(), latency.counts.buckets.end(), uint64_t{0});
  return ~0ull;
}

TEST(bounds_double_and_are_inclusive) {
  CHECK_EQ(LatencyHistogram::bucket(0), 0);
  for (int k = 0; k < kLatencyBuckets - 1; ++k) {
    const uint64_t bound = 1ull << (kFirstLatencyBit + k);
    CHECK_EQ(LatencyHistogram::bucket(bound), k);
    CHECK_EQ(LatencyHistogram::bucket(bound + 1), k + 1);
  }
  CHECK_EQ(LatencyHistogram::bucket(~0ull), kLatencyBuckets - 1);
  LatencyHistogram histogram;
  histogram.add(5), histogram.add(5000);
  CHECK_EQ(histogram.read().sum_ns, 5005u);
  CHECK_EQ(histogram.read().buckets[0], 1u);
  CHECK_EQ(histogram.read().buckets[3], 1u);
}

TEST(every_request_is_counted_once) {
  Daemon daemon;
  daemon.rig.store->register_layout(layout_blob(1, kPageBytes, 4));
  auto client = daemon.client();
  put(*client, key(1), 1);
  const Key keys[] = {key(1)};
  client->remove(keys);
  CHECK(eventually([&] { return requests(daemon, "attach") == 1; }));
  CHECK(eventually([&] { return requests(daemon, "create") == 1; }));
  CHECK(eventually([&] { return requests(daemon, "seal") == 1; }));
  CHECK(eventually([&] { return requests(daemon, "delete") == 1; }));
  CHECK(eventually([&] { return requests(daemon, "abort") == 0; }));
  for (uint32_t layers : {2, 3, 2}) client->register_layout(layout_blob(layers, kPageBytes, 4));
  CHECK(eventually([&] { return requests(daemon, "register_layout") == 3; }));
}

}  // namespace
