// Goal: who is told what a store holds hears all of it, however much changes meanwhile. Method: the test is the other end of the
// connection, and changes more at each frame than the journal keeps while a whole table is read.
#include "core/peer/announce.h"

#include <set>
#include <thread>

#include "tests/peer_answers.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint32_t kRecords = 160 * 1024;  // 40 looks at the table
constexpr uint64_t kChangesAtOnce = 500, kKeys = 3000;

// So that the announcer is never far ahead of who reads.
void make_narrow(const Fd& socket) {
  const int bytes = 1;  // the system takes its least
  KV_INVARIANT(::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) == 0);
}

struct Heard {
  void frame(peer::Channel& channel) {
    const Frame head = channel.take_head();
    peer::Channel::expect(head, Kind::Holds, head.bytes);
    std::vector<uint64_t> marks(head.bytes / sizeof(uint64_t));
    channel.take_checked(head, reinterpret_cast<std::byte*>(marks.data()));
    for (const uint64_t mark : marks)
      if (mark & 1)
        there.insert(mark);
      else
        there.erase(mark | 1);
    complete |= head.layer == 1;
  }
  std::set<uint64_t> there;
  bool complete = false;
};

}  // namespace

// Fails if the journal is read behind the whole table alone: more has changed by then than it keeps, each time anew.
TEST(a_store_that_changes_all_the_time_is_told_whole) {
  Rig host(4 << 20, kRecords);
  CHECK(host.put(1, 2) == Grant::Granted);
  Pair pair;
  make_narrow(pair.near);
  std::atomic<bool> over{false};
  std::string broken;
  std::jthread telling([&] {
    peer::Channel channel(std::move(pair.near));
    try {
      peer::announce(*host.store, channel, kRequest, "", over);
    } catch (const peer::Broken& error) {
      broken = error.what();
    }
  });
  peer::Channel channel(std::move(pair.far));
  Heard heard;
  std::set<uint64_t> there{mark_of(key(1), true)};
  uint64_t turn = 0;
  try {
    while (!heard.complete) {
      heard.frame(channel);
      for (uint64_t i = 0; i < kChangesAtOnce && !heard.complete; ++i, ++turn) {
        const Key changed = key(100 + turn % kKeys);
        const bool held = turn / kKeys % 2 == 0;
        host.store->journal().note(changed, held);
        held ? void(there.insert(mark_of(changed, true))) : void(there.erase(mark_of(changed, true)));
      }
    }
    while (heard.there != there) heard.frame(channel);
  } catch (const peer::Broken& error) {
    CHECK_EQ(std::string(error.what()), "");
  }
  CHECK(heard.complete && heard.there == there);
  over = true;
  host.store->journal().wake();
  telling.join();
  CHECK_EQ(broken, "");
}
