// Goal: what was flushed is never handed out again, also by a daemon that has nothing but the files, although removing them takes
// long; what is put after the flush stays, whatever the clocks say.
//
// Method: a file system that says a file is gone that is not, as after a loss of power; a daemon without the memory of the one
// before.
//
// Proven against the tier as it was: the first four fail, the others have nothing to look at.
#include <sys/stat.h>

#include "check.h"
#include "core/files/fsck.h"
#include "disk_hooks.h"

namespace kv {
namespace {

using test::eventually;
using test::HookedRig;
using test::key;
using test::kFewDirectories;

constexpr uint64_t kOld = 5, kNew = 10;

void date(HookedRig& rig, uint64_t number, int64_t ahead_s) {
  const timespec times[2] = {{0, UTIME_OMIT}, {::time(nullptr) + ahead_s, 0}};
  CHECK_EQ(::utimensat(AT_FDCWD, (rig.directory + "/" + path_of(key(number), kFewDirectories)).c_str(), times, 0), 0);
}

// Five blocks on disk, flushed without effect on the files, and one more behind it.
struct Flushed {
  explicit Flushed(int64_t ahead_s = 0) {
    for (uint64_t i = 0; i < kOld; ++i) CHECK(rig.put_on_disk(i));
    if (ahead_s) date(rig, 0, ahead_s), rig.restart(false);
    rig.hooks.remove = [](const std::string&) { return -ENOENT; };
    rig.store->flush();
    CHECK(eventually([&] { return rig.tier->stats().files == 0; }));
    CHECK(rig.put_on_disk(kNew));
    rig.hooks.remove = nullptr;
    CHECK_EQ(rig.files().size(), kOld + 1);
  }
  void check_only_the_new_one() {
    for (uint64_t i = 0; i < kOld; ++i) CHECK_EQ(rig.tier->promote(key(i), 35), Presence::Missing);
    CHECK(rig.load(kNew) && rig.right(kNew));
    CHECK(eventually([&] { return rig.files().size() == 1 && rig.tier->stats().bytes == HookedRig::kFileBytes; }));
    rig.store->check_integrity();
  }
  HookedRig rig;
};

TEST(a_flush_outlives_its_daemon_and_the_memory) {
  Flushed f;
  f.rig.restart(false);
  f.check_only_the_new_one();
  f.rig.restart(false);
  CHECK(f.rig.load(kNew));
}

// Written while a clock was ahead: the block behind the flush is dated later still.
TEST(a_clock_that_was_set_back_changes_nothing) {
  Flushed f(3600);
  f.rig.restart(false);
  f.check_only_the_new_one();
}

TEST(while_the_directory_is_listed_it_holds_as_well) {
  Flushed f;
  std::atomic<bool> listing{true};
  f.rig.hooks.make_directories = [&] { CHECK(eventually([&] { return !listing.load(); })); };
  f.rig.stop();
  f.rig.segments.~Segments();
  new (&f.rig.segments) test::Segments(4 * test::kMiB, 256);
  f.rig.segments.disk = true;
  f.rig.store = f.rig.segments.open();
  f.rig.layout = f.rig.store->register_layout(test::layout_blob(4, 4 * kPageBytes, 4, 64));
  CHECK(eventually([&] { return f.rig.store->header().frontier.load() == f.rig.segments.capacity; }));
  f.rig.make_tier();
  f.rig.tier->start();
  for (const uint64_t number : {uint64_t{0}, kNew}) {
    CHECK_EQ(f.rig.tier->promote(key(number), 35), Presence::Pending);
    CHECK(eventually([&] { return !f.rig.busy(); }));
    CHECK_EQ(f.rig.presence(number) == Presence::Resident, number == kNew);
  }
  listing = false;
  CHECK(eventually([&] { return !f.rig.tier->stats().indexing; }));
}

// Nobody may take it for done.
TEST(a_flush_that_cannot_be_kept_says_so) {
  HookedRig rig;
  CHECK(rig.put_on_disk(1));
  rig.hooks.keep_flushed = [] { return -EROFS; };
  CHECK(test::thrown([&] { rig.store->flush(); }) == Code::Unavailable);
  CHECK_EQ(rig.presence(1), Presence::Missing);
}

// What cannot be read might have been any second.
TEST(a_damaged_stamp_flushes_all) {
  HookedRig rig;
  for (const char* text : {"", "12", "x\n", "12 \n", "99999999999\n"}) {
    CHECK(rig.put_on_disk(1));
    rig.stop();
    const Fd fd(::open((rig.directory + "/" + kFlushedFile).c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600));
    CHECK_EQ(::write(fd.get(), text, strlen(text)), static_cast<ssize_t>(strlen(text)));
    rig.restart(false);
    CHECK_EQ(rig.tier->promote(key(1), 35), Presence::Missing);
    CHECK(eventually([&] { return rig.tier->stats().files == 0; }));
    test::fs::remove(rig.directory + "/" + kFlushedFile);
    rig.restart(false);
  }
}

TEST(fsck_knows_it) {
  Flushed f;
  f.rig.stop();
  const auto leftovers = [&](bool repair) {
    const FsckReport report = fsck(f.rig.directory, {.repair = repair}, {});
    CHECK_EQ(report.found[static_cast<size_t>(Finding::Foreign)], 0u);
    return report.found[static_cast<size_t>(Finding::Leftover)];
  };
  CHECK_EQ(leftovers(false), kOld);
  CHECK_EQ(leftovers(true), kOld);
  CHECK_EQ(leftovers(false), 0u);
  f.rig.restart(false);
  CHECK(f.rig.load(kNew));
}

}  // namespace
}  // namespace kv
