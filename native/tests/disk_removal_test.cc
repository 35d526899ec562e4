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
  const std::string bad = path_of(key(10'007), {});
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

}  // namespace
}  // namespace kv
