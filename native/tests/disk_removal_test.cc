// Goal: files that must go go, however many they are and whatever fails on the way, and meanwhile the tier does all its other
// work and can be stopped.
//
// Method: thousands of files without bytes, and a file system that fails, or waits, at a chosen call.
//
// Proven against the tier as it was (a sweep ended by one file that could not be removed, a quota kept in one turn): all but the
// second fail.
#include "check.h"
#include "disk_hooks.h"

namespace kv {
namespace {

using test::DiskRig;
using test::eventually;
using test::HookedRig;
using test::key;
using test::kFewDirectories;

constexpr uint64_t kMany = 9000;                                // more than the tier lists at once, twice
constexpr uint64_t kRoomy = 2 * kMany * HookedRig::kFileBytes;  // a quota

TEST(a_flush_outlasts_a_spell_of_errors) {
  HookedRig rig(kRoomy);
  rig.tier.reset();
  rig.make_files(10'000, kMany);
  rig.start_tier();
  CHECK_EQ(rig.tier->stats().files, kMany);
  std::atomic<bool> ill{true};
  rig.hooks.remove = [&](const std::string&) { return ill ? -EROFS : 0; };
  rig.store->flush();
  CHECK(eventually([&] { return !rig.tier->conditions().empty(); }));
  ill = false;
  CHECK(eventually([&] { return rig.tier->stats().files == 0; }));
  CHECK_EQ(rig.tier->stats().bytes, 0u);
  CHECK_EQ(rig.files().size(), 0u);
  CHECK(rig.put_on_disk(1));  // and the tier goes on
}

// It stays counted, and keeps no other file from going.
TEST(a_file_that_cannot_be_removed_is_tried_again) {
  HookedRig rig;
  rig.tier.reset();
  rig.make_files(10'000, 200);
  rig.start_tier();
  const std::string bad = path_of(key(10'007), kFewDirectories);
  std::atomic<uint64_t> tries{0};
  rig.hooks.remove = [&](const std::string& path) { return path == bad && ++tries < 3 ? -EPERM : 0; };
  rig.store->flush();
  CHECK(eventually([&] { return rig.tier->stats().files <= 1; }));
  CHECK(eventually([&] { return rig.files().empty() && rig.tier->stats().bytes == 0; }));
  CHECK_EQ(tries.load(), 3u);
}

struct Shrinking {
  static constexpr uint64_t kFew = 10, kFiles = 2000;
  Shrinking() {
    rig.tier.reset();
    rig.make_files(10'000, kFiles);
    rig.start_tier();
    rig.hooks.remove = [this](const std::string&) {
      if (++removed == kFew) at_few();
      return 0;
    };
    rig.hooks.open = [this](const std::string&) { return opened = removed.load(), 0; };
  }
  std::function<void()> at_few;
  std::atomic<uint64_t> removed{0}, opened{0};
  HookedRig rig{kRoomy};
};

TEST(a_load_waits_for_no_more_than_a_few_removals) {
  Shrinking s;
  s.at_few = [&] {
    for (uint64_t i = 0; i < Shrinking::kFiles; ++i)
      if (s.rig.tier->promote(key(10'000 + i), 100) == Presence::Pending) return;
  };
  s.rig.tier->set_quota(5 * HookedRig::kFileBytes);
  CHECK(eventually([&] { return s.rig.tier->stats().bytes <= 5 * HookedRig::kFileBytes; }));
  CHECK(s.opened > 0 && s.opened <= Shrinking::kFew + 64);
}

TEST(a_stop_ends_it) {
  Shrinking s;
  std::atomic<bool> begun{false};
  s.at_few = [&] {
    begun = true;
    CHECK(eventually([&] { return DiskTierTest::stopping(*s.rig.tier); }));
  };
  s.rig.tier->set_quota(5 * HookedRig::kFileBytes);
  CHECK(eventually([&] { return begun.load(); }));
  s.rig.tier->stop();
  CHECK_EQ(s.removed.load(), Shrinking::kFew);
  CHECK_EQ(s.rig.files().size(), Shrinking::kFiles - Shrinking::kFew);
}

// A load that waits for its turn when its block is deleted, and whose file cannot be removed before that comes. Nobody but the
// tier knows of it: the directory has not been listed, and no record is free.
TEST(what_is_deleted_while_it_waits_to_be_loaded_is_not_loaded) {
  HookedRig rig;
  CHECK(rig.put_on_disk(1) && rig.put_on_disk(2));
  rig.fill(1000);
  std::atomic<bool> open{false}, begun{false}, list{false};
  rig.tier.reset();
  rig.hooks.remove = [](const std::string&) { return -EAGAIN; };
  rig.hooks.open = [&](const std::string&) { return begun = true, eventually([&] { return open.load(); }) ? 0 : -EIO; };
  rig.hooks.make_directories = [&] { CHECK(eventually([&] { return list.load(); })); };
  rig.make_tier();
  rig.tier->start();
  for (uint64_t i = 1; i <= 2; ++i) rig.store->drop_disk(key(i));
  for (uint64_t i = 10'000; rig.store->add_disk(key(i), 0);) ++i;
  CHECK_EQ(rig.tier->promote(key(1), 35), Presence::Pending);
  CHECK(eventually([&] { return begun.load(); }));
  CHECK_EQ(rig.tier->promote(key(2), 35), Presence::Pending);
  CHECK(!rig.store->remove(key(2)));
  open = true;
  CHECK(eventually([&] { return !rig.busy(); }));
  CHECK_EQ(rig.presence(1), Presence::Resident);
  CHECK_EQ(rig.presence(2), Presence::Missing);
  CHECK_EQ(rig.tier->stats().loaded, 1u);
  list = true;
}

// Of a directory that has not been listed nobody knows what lies there: what is deleted meanwhile is remembered, up to as many
// keys as there may be files. Of more, nothing there is ever found again.
TEST(more_deletes_than_can_be_remembered_before_the_listing_are_a_flush_of_it) {
  constexpr uint64_t kMost = 8;
  HookedRig rig;
  rig.tier.reset();
  rig.make_files(500, 3);
  rig.also = [before = rig.also](DiskTier::Options& options) { before(options), options.max_files = kMost; };
  std::atomic<bool> open{false};
  rig.hooks.make_directories = [&] { CHECK(eventually([&] { return open.load(); })); };
  rig.make_tier();
  rig.tier->start();
  for (uint64_t i = 0; i < kMost; ++i) CHECK(!rig.store->remove(key(10'000 + i)));
  CHECK(!rig.store->remove(key(500)));
  for (uint64_t i = 500; i < 503; ++i) CHECK_EQ(rig.tier->promote(key(i), 35), Presence::Missing);
  open = true;
  CHECK(eventually([&] { return !rig.tier->stats().indexing && rig.files().empty(); }));
  for (uint64_t i = 500; i < 503; ++i) CHECK_EQ(rig.tier->promote(key(i), 35), Presence::Missing);
  CHECK(rig.put_on_disk(1));  // and the tier goes on
  rig.store->check_integrity();
}

}  // namespace
}  // namespace kv
