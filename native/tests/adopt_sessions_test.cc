// Goal: a daemon takes over the sessions of the one before it, and nothing else that lies beside their pages; what readers hold
// of blocks that are no more stays held. Method: pages left by a store that is dropped, changed in one respect each, files that
// are no page, pins of sessions that outlive the daemon.
//
// Rules proven by removal (in a copy of the tree; failed checks of one run): the page's mode, owner or pool is not looked
// at, or a link is followed: 2 each; the page's own number of pins is believed: 1; a zombie forgets that its block was being
// written: 4; the file of a deleted block that is held is forgotten: 1.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>

#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {
constexpr uint64_t kMiB = 1 << 20;
}

TEST(only_session_files_of_this_pool_and_user_are_taken) {
  Rig rig(16 * kMiB, 64);
  Page good(*rig.store);
  CHECK(rig.put(1, 4) == Grant::Granted);
  good.pin(rig.handle(1));
  const std::string start = rig.segments.directory + "/p.s.";
  auto write = [&](const char* name, const std::string& bytes, int mode) {
    Fd fd(::open((start + name).c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, mode));
    CHECK(::write(fd.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  };
  write("empty", "", 0600);
  write("garbage", std::string(20'000, 'x'), 0600);
  write("open", std::string(20'000, 'x'), 0644);
  CHECK(::symlink("/etc/passwd", (start + "link").c_str()) == 0);
  {
    Segments stranger(16 * kMiB, 64);  // another pool's
    auto other = stranger.open();
    Page page(*other);
    for (const auto& entry : std::filesystem::directory_iterator(stranger.directory))
      std::filesystem::copy_file(entry.path(), start + "foreign");
    ::chmod((start + "foreign").c_str(), 0600);
  }
  for (const auto& entry : std::filesystem::directory_iterator(rig.segments.directory))  // its client stretches it
    if (entry.is_regular_file() && entry.file_size() == session_file_bytes(64))
      std::filesystem::resize_file(entry.path(), uint64_t{1} << 40);
  good.board->count(1, 1);
  const_cast<SessionPage&>(good.board->page()).pins_high.store(~0ull);
  rig.restart();
  CHECK_EQ(rig.segments.session_files(), 1u);
  CHECK_EQ(rig.store->stats().pins, 1u);  // bounded: a scan of 2^37 words would not end
  rig.store->remove(key(1));
  rig.store->settle();
  CHECK_EQ(rig.store->stats().zombies, 1u);
  rig.store->check_integrity();
}

// The session's number stands in its page, which its client can write. Fails if the second of two is forgotten.
TEST(a_session_that_takes_anothers_number_hides_nobodys_pins) {
  Rig rig(16 * kMiB, 64);
  Page a(*rig.store), b(*rig.store), c(*rig.store);
  for (uint64_t i = 0; i < 3; ++i) CHECK(rig.put(i, 4) == Grant::Granted);
  a.pin(rig.handle(0)), b.pin(rig.handle(1)), c.pin(rig.handle(2));
  for (Page* page : {&a, &b, &c}) const_cast<SessionPage&>(page->board->page()).session = b.id;
  rig.restart();
  for (uint64_t i = 0; i < 3; ++i) CHECK(rig.store->remove(key(i)));
  rig.store->settle();
  CHECK_EQ(rig.store->stats().zombies, 3u);
  rig.store->check_integrity();
}

// Right in all but one respect: who else may open it could write pins into it, and another pool's pins name other blocks.
TEST(a_page_that_others_may_open_or_of_another_pool_is_not_taken) {
  const std::pair<const char*, std::function<bool(const std::string&)>> changes[] = {
      {"none", [](const std::string&) { return true; }},
      {"mode", [](const std::string& path) { return ::chmod(path.c_str(), 0640) == 0; }},
      {"owner", [](const std::string& path) { return ::chown(path.c_str(), 12345, 12345) == 0; }},
      {"symlink",
       [](const std::string& path) {
         const std::string moved = path.substr(0, path.rfind('/')) + "/other";
         return ::rename(path.c_str(), moved.c_str()) == 0 && ::symlink(moved.c_str(), path.c_str()) == 0;
       }},
      {"pool",
       [](const std::string& path) {
         const Fd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
         return ::pwrite(fd.get(), "another", 7, offsetof(SessionPage, pool_id)) == 7;
       }},
  };
  for (const auto& [name, change] : changes) {
    if (std::string_view(name) == "owner" && ::geteuid() != 0) continue;
    const size_t taken = std::string_view(name) == "none";
    Rig rig(16 * kMiB, 64);
    Page page(*rig.store);
    const std::string path = std::filesystem::directory_iterator(rig.segments.directory)->path();
    CHECK(change(path));
    rig.restart();
    CHECK_EQ(rig.store->sessions().size(), taken);
    CHECK_EQ(::access(path.c_str(), F_OK) == 0, taken == 1);
  }
}

// How many pins there are follows from the file's size.
TEST(a_page_that_denies_its_pins_loses_none) {
  Rig rig(16 * kMiB, 64);
  Page page(*rig.store);
  CHECK(rig.put(1, 4) == Grant::Granted);
  page.pin(rig.handle(1));
  const_cast<SessionPage&>(page.board->page()).max_pins = 0;
  rig.restart();
  CHECK(rig.store->remove(key(1)));
  rig.store->settle();
  CHECK_EQ(rig.store->stats().zombies, 1u);
}

// Anybody can make one where fs.protected_hardlinks is 0; the page protects what it did before.
TEST(a_page_with_a_second_link_stops_the_adoption) {
  Rig rig(16 * kMiB, 64);
  CHECK(rig.put(1, 4) == Grant::Granted);
  Page page(*rig.store);
  page.pin(rig.handle(1));
  const std::string path = std::filesystem::directory_iterator(rig.segments.directory)->path();
  const std::string second = rig.segments.directory + "/p.s.00000007.second";
  CHECK(::link(path.c_str(), second.c_str()) == 0);
  rig.store.reset();
  CHECK(thrown([&] { rig.store = rig.segments.open(true); }) == Code::Unavailable);
  CHECK(::access(path.c_str(), F_OK) == 0 && ::access(second.c_str(), F_OK) == 0);
  CHECK(::unlink(second.c_str()) == 0);
  rig.store = rig.segments.open(true);
  CHECK(rig.store->remove(key(1)));
  rig.store->settle();
  CHECK_EQ(rig.store->stats().zombies, 1u);
}

// What cannot even be opened may be a page that protects something: no daemon starts over it, and it stays.
TEST(a_page_that_cannot_be_opened_stops_the_adoption) {
  Rig rig(16 * kMiB, 64);
  CHECK(rig.put(1, 4) == Grant::Granted);
  Page page(*rig.store);
  page.pin(rig.handle(1));
  const std::string path = std::filesystem::directory_iterator(rig.segments.directory)->path();
  rig.store.reset();
  rlimit before;
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  bool adopted = false;
  int failed = 0;
  for (rlim_t most = 3; !adopted && most < 256; ++most) {  // descriptors, until there are enough
    rlimit few = before;
    few.rlim_cur = most;
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    adopted = !thrown([&] { rig.store = rig.segments.open(true); });
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    CHECK_EQ(::access(path.c_str(), F_OK), 0);
    failed += !adopted;
  }
  CHECK(adopted && failed > 3);
  CHECK(rig.store->remove(key(1)));
  rig.store->settle();
  CHECK_EQ(rig.store->stats().zombies, 1u);
}

// A writer through gRPC has no page, so nobody can still write its block: a zombie at once, which a follower's pin, two
// generations back, still holds. Fails if the flag that says so is left out, and the memory is handed out under the follower.
TEST(a_follower_holds_a_block_of_a_writer_without_a_page) {
  Rig rig(16 * kMiB, 64);
  Page follower(*rig.store);
  const Granted granted = rig.create(1, 4);
  const uint32_t slot = follower.pin(granted.handle);
  for (int round = 0; round < 2; ++round) {
    rig.restart();
    CHECK(rig.control(granted.handle.record).state() == State::Zombie);
    CHECK_EQ(rig.control(granted.handle.record).generation(), granted.handle.generation + 2);
    CHECK_EQ(rig.store->stats().zombies, 1u);
  }
  follower.clear(slot);
  rig.store->tick();
  CHECK(rig.control(granted.handle.record).state() == State::Free);
  rig.store->check_integrity();
}

// The daemon died before the file of a deleted block was unlinked, while a reader held the block: the next one has it unlinked.
TEST(the_file_of_a_deleted_block_that_is_still_held_goes_after_the_death) {
  Rig rig(16 * kMiB, 64, true);
  Page reader(*rig.store);
  CHECK(rig.put(1, 4, 0, kMaxPriority) == Grant::Granted);
  const auto job = rig.store->begin_write();
  if (CHECK(job.has_value())) CHECK(rig.store->end_write(job->handle, true));
  const uint32_t slot = reader.pin(rig.handle(1));
  rig.store->remove(key(1));
  rig.restart();
  const Deleted must_go = rig.store->take_deleted();
  CHECK(must_go.keys.size() == 1 && must_go.keys[0] == key(1));
  rig.store->file_gone(key(1));
  reader.clear(slot);
  rig.store->tick();
  CHECK_EQ(rig.store->stats().used_bytes, 0u);
  rig.store->check_integrity();
}

// Anybody may make names in a directory like /dev/shm.
TEST(what_is_no_file_of_ours_stops_no_adoption) {
  Rig rig(16 * kMiB, 64);
  CHECK(rig.put(1, 4) == Grant::Granted);
  CHECK_EQ(::mkdir((rig.segments.directory + "/p.s.evil").c_str(), 0700), 0);
  CHECK_EQ(::mkfifo((rig.segments.directory + "/p.s.00000001.evil").c_str(), 0666), 0);
  rig.restart();
  CHECK(rig.resident(1));
}

// The words that a daemon leaves that is killed inside demote(), after the transition.
TEST(a_delete_that_was_answered_is_not_undone_by_a_death) {
  Rig rig(16 * kMiB, 64, true);
  CHECK(rig.put(1, 4) == Grant::Granted && rig.store->add_disk(key(1), 0));
  const Handle block = rig.handle(1);
  {
    Page page(*rig.store);
    page.pin(block);
    rig.store->remove(key(1));
    rig.store->take_deleted();
    page.unmap();
    rig.store->end_session(page.id);
  }
  rig.store->tick();
  const Control after = rig.control(block.record);
  CHECK(after.state() == State::Disk && after.flags() & kFlagDeleted);
  StoreTest::index(*rig.store).record(block.record).extent.store(Extent{0, 4 * kPageBytes}.pack());
  rig.restart();
  CHECK_EQ(rig.presence(1), Presence::Missing);
  CHECK_EQ(rig.store->take_deleted().keys.size(), 1u);
  rig.store->check_integrity();
}
