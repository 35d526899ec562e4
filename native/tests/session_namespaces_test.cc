// Goal: what one namespace's sessions do holds up no other's. Method: two namespaces behind one socket; the store's lock of one
// is held, as by an operation that does not end, while the other's clients attach, write and leave.
#include <atomic>
#include <thread>

#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

struct TwoNamespaces {
  TwoNamespaces() : path(first.segments.directory + "/socket") { start(); }
  void start() {
    server = std::make_unique<SessionServer>(SessionServer::Options{path, 8, 4096, {}},
                                             std::vector<Store*>{first.store.get(), second.store.get()});
    server->start();
  }
  std::unique_ptr<Client> client(const char* name) {
    return std::make_unique<Client>(AttachOptions{.socket_path = path, .name = name, .max_pins = 64}, Client::Door::SharedMemory);
  }

  void restart() {
    server.reset();
    first.restart(), second.restart();
    start();
  }

  Rig first{16 * kMiB, 256, false, 1024, "one"}, second{16 * kMiB, 256, false, 1024, "two"};
  std::string path;
  std::unique_ptr<SessionServer> server;
};

}  // namespace

// Fails with one thread for all: the request to `one` would hold it for ever, and every other behind it.
TEST(a_namespace_that_stands_still_holds_up_no_other) {
  TwoNamespaces daemon;
  auto stuck = daemon.client("one"), writer = daemon.client("two");
  put(*writer, key(1), 7);
  std::atomic<bool> answered{false};
  std::thread asking;
  {
    const auto held = StoreTest::hold(*daemon.first.store);
    asking = std::thread([&] {
      put(*stuck, key(1), 9);
      answered.store(true);
    });
    put(*writer, key(2), 8);
    CHECK_EQ(get(*writer, key(2))->hits(), 1u);
    auto second = daemon.client("two");  // attaching waits for no other namespace either
    put(*second, key(3), 8);
    second.reset();
    CHECK(eventually([&] { return daemon.second.store->stats().sessions == 1; }));
    CHECK(!answered.load());
  }
  asking.join();
  CHECK_EQ(get(*stuck, key(1))->hits(), 1u);
  CHECK_EQ(get(*stuck, key(2))->hits(), 0u);
}

TEST(sessions_of_all_namespaces_count_together) {
  TwoNamespaces daemon;
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 8; ++i) clients.push_back(daemon.client(i % 2 ? "one" : "two"));
  CHECK(thrown([&] { daemon.client("one"); }) == Code::Unavailable);
  CHECK_EQ(daemon.server->sessions().size(), 8u);
  {
    const auto held = StoreTest::hold(*daemon.first.store);  // who has left has room again, also before its namespace noticed
    clients[1].reset();
    clients.push_back(daemon.client("two"));
    CHECK(thrown([&] { daemon.client("two"); }) == Code::Unavailable);
  }
}

TEST(lists_reach_every_namespace_and_its_sessions) {
  TwoNamespaces daemon;
  auto first = daemon.client("one"), second = daemon.client("two");
  std::vector<Tenant> tenants(2);
  tenants[0].salt[0] = 1, tenants[1].salt[0] = 2;
  daemon.server->set_tenants(tenants);
  CHECK(eventually([&] { return daemon.client("one")->attachment()->salt()[0] == 1; }));
  CHECK(eventually([&] { return daemon.client("two")->attachment()->salt()[0] == 2; }));
  put(*first, key(1), 7), put(*second, key(1), 8);
}

TEST(the_daemon_ends_while_clients_come_and_go_and_the_next_resumes_them) {
  TwoNamespaces daemon;
  auto first = daemon.client("one"), second = daemon.client("two");
  put(*first, key(1), 7), put(*second, key(1), 8);
  std::atomic<bool> stop{false};
  std::vector<std::thread> coming;
  for (const char* name : {"one", "two"})
    coming.emplace_back([&, name] {
      while (!stop.load()) static_cast<void>(thrown([&] { daemon.client(name); }));
    });
  for (int i = 0; i < 10; ++i) daemon.restart();
  stop.store(true);
  for (std::thread& thread : coming) thread.join();
  first->reattach(), second->reattach();
  put(*first, key(2), 7), put(*second, key(2), 8);
  CHECK_EQ(get(*first, key(1))->hits(), 1u);
  daemon.server.reset();
  daemon.first.store->check_integrity(), daemon.second.store->check_integrity();
}
