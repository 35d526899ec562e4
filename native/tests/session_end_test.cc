// Goal: a session's end gives back what it held when, and only when, nobody can touch the memory any more. Method: real flock
// descriptors and forked processes; the store without a socket.
//
// Rules proven by removal (in a copy of the tree; failed checks of one run): the generation does not change on QUARANTINED: 7;
// the scan looks one generation back only: 3.
#include <sys/wait.h>

#include <map>
#include <thread>

#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {
constexpr uint64_t kMiB = 1 << 20;
}

// Without quarantine the extent would be granted again while the writer's mapping is there.
TEST(an_ended_sessions_blocks_wait_for_its_last_mapping) {
  Rig rig(16 * kMiB, 64);
  Page writer(*rig.store);
  const Granted granted = rig.create(1, 4, writer.id);
  rig.store->end_session(writer.id);
  CHECK(rig.presence(1) == Presence::Missing);  // its key is free at once, its memory is not
  CHECK(rig.control(granted.handle.record).state() == State::Quarantined);
  CHECK_EQ(rig.control(granted.handle.record).generation(), granted.handle.generation + 1);
  CHECK(progress_phase(StoreTest::progress(*rig.store, granted.handle.record).load()) == Phase::Ended);  // followers are woken
  CHECK(rig.seal(granted.handle, writer.id) == Done::Stale);
  CHECK(thrown([&] { rig.create(2, 4, writer.id); }) == Code::FailedPrecondition);
  const Granted again = rig.create(1, 4);
  CHECK(again.status == Grant::Granted && again.extent.offset != granted.extent.offset);
  rig.store->tick();
  CHECK_EQ(rig.store->stats().quarantined, 1u);
  rig.store->check_integrity();
  writer.unmap();
  rig.store->tick();
  CHECK_EQ(rig.store->stats().quarantined, 0u);
  CHECK_EQ(rig.store->stats().used_bytes, 4 * kPageBytes);
  CHECK_EQ(rig.segments.session_files(), 0u);
  rig.store->check_integrity();
}

// A forked child keeps the mapping: the parent's end, seen by socket or pidfd, proves nothing.
TEST(a_forked_child_keeps_the_memory_until_it_ends_too) {
  Rig rig(16 * kMiB, 64);
  int tell[2];
  CHECK(::pipe(tell) == 0);
  std::optional<Page> writer(std::in_place, *rig.store);
  const Granted granted = rig.create(1, 4, writer->id);
  CHECK(rig.put(2, 4) == Grant::Granted);
  const Handle read = rig.handle(2);
  writer->pin(read);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte;
    ::close(tell[1]);
    ::_exit(::read(tell[0], &byte, 1) != 0);  // until the parent closes its end
  }
  ::close(tell[0]);
  const uint32_t id = writer->id;
  writer.reset();  // the parent's mapping and descriptors are gone
  rig.store->end_session(id);
  CHECK(rig.store->remove(key(2)));
  for (int i = 0; i < 3; ++i) rig.store->tick();
  CHECK_EQ(rig.store->stats().quarantined, 1u);
  CHECK_EQ(rig.store->stats().zombies, 1u);  // pinned by the child's copy of the page
  for (uint64_t i = 10; i < 40; ++i) {
    const Granted other = rig.create(i, 4);
    CHECK(other.extent.end() <= granted.extent.offset || other.extent.offset >= granted.extent.end());
  }
  rig.restart();  // over a restart of the daemon as well
  CHECK_EQ(rig.store->stats().quarantined, 1u);
  CHECK_EQ(rig.store->stats().zombies, 1u);
  CHECK_EQ(rig.control(read.record).generation(), read.generation + 1);
  ::close(tell[1]);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  rig.store->tick();
  const Stats s = rig.store->stats();
  CHECK_EQ(s.quarantined + s.zombies + s.created, 0u);
  CHECK_EQ(s.used_bytes, 0u);
  rig.store->check_integrity();
}

// A reader that follows a block pins the generation before quarantine, two before the zombie's. Fails if the scan looks one back
// only.
TEST(a_follower_of_a_quarantined_block_still_holds_it) {
  Rig rig(16 * kMiB, 64);
  std::optional<Page> writer(std::in_place, *rig.store);
  Page follower(*rig.store);
  const Granted granted = rig.create(1, 4, writer->id);
  const uint32_t slot = follower.pin(granted.handle);
  const uint32_t id = writer->id;
  rig.store->end_session(id);
  writer.reset();
  rig.store->tick();
  CHECK(rig.control(granted.handle.record).state() == State::Zombie);
  CHECK_EQ(rig.store->stats().zombies, 1u);
  rig.restart();
  CHECK(rig.control(granted.handle.record).state() == State::Zombie);
  follower.clear(slot);
  rig.store->tick();
  CHECK(rig.control(granted.handle.record).state() == State::Free);
  rig.store->check_integrity();
}

// Hits and misses are counted in the page, which goes with the session.
TEST(what_an_ended_session_counted_stays_counted) {
  Rig rig(16 * kMiB, 64);
  std::optional<Page> reader(std::in_place, *rig.store);
  auto* page = StoreTest::page(*rig.store, reader->id).at<SessionPage>(0);
  page->hits.fetch_add(3), page->misses.fetch_add(2);
  const uint32_t id = reader->id;
  CHECK(rig.store->stats().hits == 3 && rig.store->stats().misses == 2);
  reader.reset();
  rig.store->end_session(id);
  rig.store->tick();
  CHECK_EQ(rig.store->sessions().size(), 0u);
  CHECK(rig.store->stats().hits == 3 && rig.store->stats().misses == 2);
}

TEST(who_knows_the_token_resumes_and_says_what_stopped) {
  Rig rig(16 * kMiB, 64);
  Page writer(*rig.store);
  const Granted a = rig.create(1, 4, writer.id);
  CHECK(rig.create(2, 4, writer.id).status == Grant::Granted);
  Id wrong = writer.token();
  wrong[0] ^= 1;
  CHECK(!rig.store->resume_session(writer.id, writer.token(), 1, 1));  // attached
  for (bool restart : {false, true}) {
    if (restart)
      rig.restart();
    else
      rig.store->end_session(writer.id);
    CHECK(!rig.store->resume_session(writer.id, wrong, 1, 1));
    CHECK(!rig.store->resume_session(writer.id + 100, writer.token(), 1, 1));
    CHECK(rig.store->resume_session(writer.id, writer.token(), 1, 1));
    CHECK(!rig.store->resume_session(writer.id, writer.token(), 1, 1));
  }
  CHECK_EQ(rig.store->stats().quarantined, 2u);
  CHECK(rig.seal(a.handle, writer.id) == Done::Stale);
  CHECK(rig.store->abort(rig.owner, a.handle) == Done::NotOwner);
  for (uint64_t other : {a.handle.generation - 1, a.handle.generation + 1})  // a writer of what was there before, or will be
    CHECK(rig.store->abort(writer.id, {a.handle.record, other}) == Done::Stale);
  CHECK(rig.store->abort(writer.id, a.handle) == Done::Ok);
  CHECK(rig.store->abort(writer.id, a.handle) == Done::Stale);
  rig.store->settle();
  CHECK_EQ(rig.store->stats().quarantined, 1u);
  CHECK(rig.create(3, 4, writer.id).status == Grant::Granted);  // works on
  rig.store->check_integrity();
  rig.store->end_session(writer.id);
  const Id token = writer.token();
  writer.unmap();
  rig.store->tick();
  CHECK_EQ(rig.store->stats().used_bytes, 0u);
  CHECK(!rig.store->resume_session(writer.id, token, 1, 1));
}

TEST(what_a_resumed_session_does_not_keep_is_given_up_and_nothing_else) {
  Rig rig(16 * kMiB, 64);
  Page writer(*rig.store);
  const Granted kept = rig.create(1, 4, writer.id), other = rig.create(2, 4, writer.id), unknown = rig.create(3, 4, writer.id);
  rig.store->end_session(writer.id);
  CHECK(rig.store->resume_session(writer.id, writer.token(), 1, 1));
  const Granted fresh = rig.create(4, 4, writer.id);
  rig.store->keep_only(writer.id, {kept.handle, {other.handle.record, other.handle.generation + 1}, {63, 1}});
  CHECK(rig.control(kept.handle.record).state() == State::Quarantined);
  CHECK(rig.control(other.handle.record).state() == State::Free);  // of another generation: not the one the client means
  CHECK(rig.control(unknown.handle.record).state() == State::Free);
  CHECK(rig.seal(fresh.handle, writer.id) == Done::Ok);
  CHECK_EQ(rig.store->stats().quarantined, 1u);
  rig.store->check_integrity();
}

// Its client cut the page: what it pins cannot be read any more, so it gets no further session out of it.
TEST(a_session_whose_page_was_cut_is_not_resumed) {
  Rig rig(16 * kMiB, 64);
  Page writer(*rig.store);
  const Id token = writer.token();
  CHECK(::truncate(std::filesystem::directory_iterator(rig.segments.directory)->path().c_str(), 0) == 0);
  rig.store->tick();  // looks at the ring, and finds it
  rig.store->tick();
  CHECK(!rig.store->sessions()[0].attached);
  CHECK(!rig.store->resume_session(writer.id, token, 1, 1));
}

// Numbers of sessions come round after four thousand million; a living one is never given twice, and 0 asks for a new one.
TEST(session_numbers_wrap_without_meeting) {
  Rig rig(16 * kMiB, 64);
  Page first(*rig.store);
  StoreTest::next_session(*rig.store, ~0u);
  std::vector<std::unique_ptr<Page>> more;
  std::map<uint32_t, int> seen{{first.id, 1}, {rig.owner, 1}};
  for (int i = 0; i < 6; ++i) {
    more.push_back(std::make_unique<Page>(*rig.store));
    CHECK(more.back()->id != 0);
    CHECK_EQ(++seen[more.back()->id], 1);
    CHECK_EQ(more.back()->board->page().session, more.back()->id);
  }
  CHECK_EQ(rig.store->stats().sessions, 7u);
}

TEST(a_session_asks_for_bounded_pins) {
  Rig rig(16 * kMiB, 64);
  CHECK(thrown([&] { rig.store->open_session(0, 1, 1); }) == Code::InvalidArgument);
  CHECK(thrown([&] { rig.store->open_session(~0u, 1, 1); }) == Code::InvalidArgument);
  CHECK_EQ(rig.segments.session_files(), 0u);
}

// An owner inside the process that ends while its create waits for the pool to grow: nothing stays granted to nobody.
TEST(an_owner_that_ends_during_its_create_leaves_nothing) {
  for (int round = 0; round < 30; ++round) {
    Segments segments(256 * kMiB, 256);
    auto store = segments.open();
    const uint32_t layout = store->register_layout(layout_blob(1, kPageBytes, 8192));
    const uint32_t owner = store->open_owner();
    std::thread ender([&] { store->end_session(owner); });
    std::vector<CreateItem> items;
    for (uint64_t i = 0; i < 20; ++i) items.push_back({.key = key(i), .tokens = 2047});
    thrown([&] { store->create({.owner = owner, .layout = layout, .items = items}); });
    ender.join();
    store->settle();
    CHECK_EQ(store->stats().used_bytes, 0u);
    store->check_integrity();
  }
}
