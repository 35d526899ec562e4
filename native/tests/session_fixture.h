// A daemon's session socket and its clients in one process, for the tests of both. Nothing here asserts but through CHECK.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "core/client/client.h"
#include "core/session/session_server.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

namespace kv::test {

inline constexpr uint64_t kMiB = 1 << 20;

struct Daemon {
  explicit Daemon(uint64_t capacity = 16 * kMiB, uint32_t blocks = 256, uint32_t max_sessions = 16)
      : rig(capacity, blocks), sessions(max_sessions) {
    path = rig.segments.directory + "/socket";
    start();
  }
  ~Daemon() { stop(); }
  void start() {
    server =
        std::make_unique<SessionServer>(SessionServer::Options{path, sessions, 4096, {}}, std::vector<Store*>{rig.store.get()});
    server->start();
  }
  void stop() { server.reset(); }
  void restart() {
    stop();
    rig.restart();
    start();
  }
  std::unique_ptr<Client> client(uint32_t max_pins = 256) {
    return std::make_unique<Client>(AttachOptions{.socket_path = path, .name = "test", .max_pins = max_pins},
                                    Client::Door::SharedMemory);
  }
  Stats stats() { return rig.store->stats(); }

  Rig rig;
  uint32_t sessions;
  std::string path;
  std::unique_ptr<SessionServer> server;
};

inline std::shared_ptr<BlockWriter> create(Client& client, std::span<const Key> keys, uint32_t tokens = 1) {
  const std::vector<uint32_t> counts(keys.size(), tokens);
  auto grants = client.create({.keys = keys, .token_counts = counts, .layout = 0});
  for (size_t i : grants->open_items()) grants->bytes(i);  // or they could not be sealed
  return grants;
}
inline void put(Client& client, const Key& k, uint8_t stamp, uint32_t tokens = 1) {
  auto grants = create(client, {&k, 1}, tokens);
  if (!CHECK(grants->item(0).open)) return;
  std::memset(grants->bytes(0), stamp, tokens * kPageBytes);
  const size_t all[] = {0};
  grants->seal(all);
}
inline std::shared_ptr<BlockBatch> get(Client& client, const Key& k, bool follow = false) { return client.get({&k, 1}, follow); }

}  // namespace kv::test
