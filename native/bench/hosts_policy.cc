// What the policy of hosts does among 10, 100 and 1,000 of them: a line of JSON for each scene (bench/hosts/policy.py).
#include <cstdio>

#include "tests/hosts_simulation.h"

using kv::test::Outcome;
using kv::test::Scene;
using kv::test::Simulation;

int main() {
  for (const uint32_t hosts : {10u, 100u, 1000u})
    for (const bool hard : {false, true}) {
      Scene scene{.hosts = hosts};
      if (hard) scene.churn_per_s = 0.05, scene.slow_links = 0.2;
      const Outcome seen = Simulation(scene).run();
      std::printf(
          "{\"hosts\": %u, \"hard\": %s, \"lookups\": %llu, \"of_nobody\": %llu, \"asks_per_lookup\": %.3f, \"asks_of_nobody\": "
          "%llu, "
          "\"words_per_block\": %.1f, \"worst_queue\": %u, \"most_copies_at_once\": %u, \"hot_copies\": %.1f, \"hot_spread_s\": "
          "%.3f, \"hot_alone_s\": %.3f, \"fetched\": %llu, \"computed\": %llu, \"lost\": %llu, \"hot_computed\": %llu}\n",
          hosts, hard ? "true" : "false", static_cast<unsigned long long>(seen.lookups),
          static_cast<unsigned long long>(seen.of_nobody), seen.asks_per_lookup(),
          static_cast<unsigned long long>(seen.blind_asks),
          static_cast<double>(seen.words) / static_cast<double>(seen.fetched + seen.computed), seen.worst_queue,
          seen.most_copies_at_once, seen.hot_copies, seen.hot_spread_s, seen.hot_alone_s,
          static_cast<unsigned long long>(seen.fetched), static_cast<unsigned long long>(seen.computed),
          static_cast<unsigned long long>(seen.lost), static_cast<unsigned long long>(seen.hot_computed));
      std::fflush(stdout);
    }
}
