// Streams of requests: two that come close behind each other begin one, silence ends it, and what sessions send is noted with the
// store that they use and with no other.
#include "core/base/polling.h"
#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

TEST(requests_close_behind_each_other_are_a_stream) {
  const uint64_t begun = 1'000'000'000, gap = 500'000;
  Stream stream(gap);
  CHECK(!stream.runs(begun));
  stream.note(begun);
  CHECK(!stream.runs(begun));  // a lone one
  stream.note(begun + gap);
  CHECK(!stream.runs(begun + gap));  // too late
  stream.note(begun + 2 * gap - 1);
  CHECK(stream.runs(begun + 2 * gap - 1) && stream.runs(begun + 3 * gap - 2));
  CHECK(!stream.runs(begun + 3 * gap - 1));
  stream.note(begun + 3 * gap - 2);  // it goes on
  CHECK(stream.runs(begun + 4 * gap - 3) && !stream.runs(begun + 4 * gap - 2));
}

TEST(who_is_put_aside_pauses_and_longer_if_it_is_so_again_at_once) {
  Polling pace;
  uint64_t now = 1'000'000'000;
  const auto look = [&](uint64_t took_ns) {
    now += took_ns;
    return pace.looked(now - took_ns, now);
  };
  const auto put_aside = [&] { CHECK(!look(Polling::kPutAsideNs)); };
  const auto looks = [&](uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) CHECK(look(1'000));
  };
  CHECK(pace.worthwhile(now));
  for (uint64_t pause = Polling::kMinPauseNs; pause < 8 * Polling::kMaxPauseNs; pause *= 2) {
    put_aside();
    const uint64_t expected = std::min(pause, Polling::kMaxPauseNs);
    CHECK(!pace.worthwhile(now + expected - 1) && pace.worthwhile(now + expected));
    now += expected;
    looks(Polling::kFewLooks - 1);
  }
  looks(1);  // once more in so many is the host's doing, and no sign of a busy machine
  put_aside();
  CHECK(!pace.worthwhile(now + Polling::kMinPauseNs - 1) && pace.worthwhile(now + Polling::kMinPauseNs));
}

TEST(a_store_streams_while_its_puts_do) {
  Rig rig(16 * kMiB, 16), other(16 * kMiB, 16);
  CHECK(!rig.store->streaming());
  CHECK(eventually([&] {
    for (int i = 0; i < 2; ++i) rig.store->note_put(monotonic_ns());
    return rig.store->streaming();
  }));
  CHECK(!other.store->streaming());
  CHECK(eventually([&] { return !rig.store->streaming(); }));
}

TEST(puts_of_a_session_are_noted_and_what_else_it_asks_is_not) {
  Daemon daemon;
  auto client = daemon.client();
  const Key keys[] = {key(1)};
  for (int i = 0; i < 100; ++i) {
    client->remove(keys);
    client->stats();
    CHECK(!daemon.rig.store->streaming());
  }
  CHECK(eventually([&] {
    put(*client, keys[0], 1);
    client->remove(keys);
    return daemon.rig.store->streaming();
  }));
  CHECK(eventually([&] { return !daemon.rig.store->streaming(); }));
}

}  // namespace
