// Goal: a create that seals an earlier writer's blocks on the way seals those or says that they are lost; never others', never
// silently. Method: daemons that go between the two creates and come back as the same store, or as an empty one.
//
// Proven by removal (in a copy of the tree): seal_apart() without another attachment: the first test's unfilled block is found;
// end_open() before the answer in claim(): the last fails, where nothing was adopted.
#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {
std::shared_ptr<BlockWriter> create_sealing(Client& client, const Key& k, BlockWriter& earlier) {
  const uint32_t tokens[] = {1};
  return client.create({.keys = {&k, 1}, .token_counts = tokens, .layout = 0, .sealing = &earlier});
}

// As KVClient does it: once more after the session was found to be over.
std::optional<Code> after_reattaching(Client& client, const Key& k, BlockWriter& earlier) {
  const auto ask = [&] { return thrown([&] { create_sealing(client, k, earlier); }); };
  const std::optional<Code> first = ask();
  if (first != Code::Detached) return first;
  client.reattach();
  return ask();
}
}  // namespace

TEST(the_same_handle_in_another_pool_is_another_block) {
  Daemon before;
  auto client = before.client();
  const Key old = key(1), here = key(2), next = key(3);
  auto earlier = create(*client, {&old, 1});
  before.stop();
  Daemon empty;
  empty.stop();
  empty.path = before.path;
  Store::retire(before.rig.store->options().table_fd);
  empty.start();
  client->reattach();
  auto unfilled = create(*client, {&here, 1});
  CHECK(unfilled->item(0).handle == earlier->item(0).handle);
  CHECK(thrown([&] { create_sealing(*client, next, *earlier); }) == Code::BlockLost);
  CHECK_EQ(get(*client, here)->hits(), 0u);
  CHECK_EQ(client->lookup({&here, 1})[0], static_cast<uint8_t>(Presence::Pending));  // neither sealed nor given up
  const size_t all[] = {0};
  unfilled->seal(all);
  CHECK(!thrown([&] { create_sealing(*client, next, *earlier); }));  // said once
}

TEST(another_clients_writer_is_sealed_by_its_own_session) {
  Daemon daemon;
  auto client = daemon.client(), other = daemon.client();
  const Key first = key(1), second = key(2);
  auto earlier = create(*client, {&first, 1});
  auto made = create_sealing(*other, second, *earlier);
  CHECK_EQ(get(*other, first)->hits(), 1u);
}

// The connection breaks before the daemon's epoch is seen to be another, or after.
TEST(what_was_to_be_sealed_when_the_daemon_went_is_said_to_be_lost) {
  for (const bool adopted : {false, true}) {
    Daemon daemon;
    auto client = daemon.client();
    const Key first = key(1), second = key(2);
    auto earlier = create(*client, {&first, 1});
    if (adopted)
      daemon.restart();
    else
      daemon.stop(), daemon.start();
    CHECK(after_reattaching(*client, second, *earlier) == Code::BlockLost);
    CHECK_EQ(get(*client, first)->hits(), 0u);
    if (!adopted) continue;  // the session before is not resumed: nobody here looks at its lock
    CHECK(eventually([&] { return daemon.stats().created + daemon.stats().quarantined == 0; }));
    daemon.rig.store->check_integrity();
  }
}
