// What tests of several peers share: servers of a store each, named a, b and so on, and one tier, named z, that fetches from all.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/peer/server.h"
#include "core/peer/tier.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

namespace kv::test {

struct ServingHost {
  ServingHost(const std::string& node, uint64_t bytes, const peer::Secret& salt)
      : rig(bytes, 512), server({.node = node, .address = "127.0.0.1", .peers = {"z"}}), at{node, "127.0.0.1"} {
    server.share(*rig.store, salt);
    server.start();
    at.port = server.port();
  }
  void fill(uint64_t number, uint32_t pages) { CHECK(rig.seal(rig.create(number, pages).handle) == Done::Ok); }

  Rig rig;
  peer::Server server;
  peer::Tier::Address at;
};

struct FetchingHost {
  FetchingHost(size_t peers, bool tell = true, uint64_t bytes = 8 << 20) : here(bytes, 512) {
    const peer::Secret salt{7, 7, 7};
    std::vector<peer::Tier::Address> addresses;
    for (size_t i = 0; i < peers; ++i) {
      there.push_back(std::make_unique<ServingHost>(std::string(1, static_cast<char>('a' + i)), 64 << 20, salt));
      there.back()->at.tells = tell;
      addresses.push_back(there.back()->at);
    }
    tier.emplace(*here.store, "z", salt, addresses);
    tier->start();
    CHECK(eventually([&] {
      for (const auto& peer : tier->stats())
        if (peer.state != "up" || (tell && !peer.complete)) return false;
      return true;
    }));
  }
  ~FetchingHost() {
    tier->stop();
    for (auto& host : there) host->server.stop();
    here.store->check_integrity();
  }
  Presence want(uint64_t number, const std::string& node = "") {
    const Key wanted = key(number);
    return here.store->promote({&wanted, 1}, kDefaultPriority, Wanting{.first = tier->named(node)})[0];
  }
  uint64_t sum(uint64_t peer::Tier::PeerStats::* field) {
    uint64_t out = 0;
    for (const auto& peer : tier->stats()) out += peer.*field;
    return out;
  }

  Rig here;
  std::vector<std::unique_ptr<ServingHost>> there;
  std::optional<peer::Tier> tier;
};

}  // namespace kv::test
