// Goal: a directory whose file system does not return from a call holds up no other directory of its tier, is named, and nothing
// of what it did too late stays. Method: two directories; the calls of one end when the test says so, and a moment is all that is
// waited for them.
#include <filesystem>

#include "check.h"
#include "disk_hooks.h"

namespace kv {
namespace {

namespace fs = std::filesystem;
using test::DiskRig;
using test::eventually;
using test::HookedFiles;
using test::Hooks;
using test::key;
using test::kFewDirectories;

// The first directory's calls are hooked; a block's home is by its key, so there are blocks of either.
struct TwoDirectories {
  explicit TwoDirectories(uint64_t quota = 64 << 20) : rig(quota) {
    rig.also = [this](DiskTier::Options& options) {
      options.directories[0].files = std::make_unique<HookedFiles>(std::move(options.directories[0].files), hooks);
      Choice choice = choose_engine(other.directory, 8);
      options.directories.push_back(
          {other.directory, std::make_unique<RealFiles>(other.directory, choice.direct), std::move(choice.engine)});
    };
    other.stop();  // only its directory is wanted
    rig.restart(true);
    for (uint64_t i = 0; i < kBlocks; ++i) CHECK(rig.put_on_disk(i));
    rig.fill(1000);
    DiskTierTest::call_timeout(*rig.tier, 20), DiskTierTest::hangs_after(*rig.tier, 50);
  }
  ~TwoDirectories() { open = true, rig.stop(); }
  int hold() {
    return eventually([&] { return open.load(); }) ? 0 : -EIO;
  }
  void go_on() {
    DiskTierTest::call_timeout(*rig.tier, 60'000), DiskTierTest::hangs_after(*rig.tier, 60'000);
    open = true;
  }
  bool in_other(uint64_t number) { return fs::exists(fs::path(other.directory) / path_of(key(number), kFewDirectories)); }
  uint64_t first_of(bool other_directory) {
    uint64_t i = 0;
    while (in_other(i) != other_directory) ++i;
    return i;
  }
  bool tells() {
    for (const auto& condition : rig.tier->conditions())
      if (condition.path == rig.directory && condition.text.find("does not return in " + rig.directory) != std::string::npos)
        return true;
    return false;
  }
  // Writes a block until one goes to the other directory, as all do while the first does not answer.
  bool writes(uint64_t from) {
    for (uint64_t i = from; i < from + 4; ++i)
      if (!rig.put_on_disk(i) || !in_other(i)) return false;
    return true;
  }

  // Another daemon, which the first directory does not answer yet.
  void restart_beside_a_silent_one() {
    rig.also = [this, also = rig.also](DiskTier::Options& options) {
      also(options);
      late = std::move(options.directories[0]);
      options.directories[0] = {late.path, nullptr, nullptr};
    };
    rig.restart(true);
  }

  static constexpr uint64_t kBlocks = 24, kFileBytes = 17 * kPageBytes + kBlockFileHeaderBytes;
  DiskTier::Directory late;
  std::atomic<bool> open{false};
  Hooks hooks;
  DiskRig other, rig;
};

TEST(an_open_that_does_not_return_holds_up_no_other_directory) {
  TwoDirectories two;
  DiskRig& rig = two.rig;
  two.hooks.open = [&](const std::string&) { return two.hold(); };
  const uint64_t stuck = two.first_of(false), read = two.first_of(true);
  CHECK_EQ(rig.tier->promote(key(stuck), 35), Presence::Pending);
  CHECK(eventually([&] { return two.tells(); }));
  for (uint64_t i = 0; i < two.kBlocks; ++i)
    if (i != stuck && !two.in_other(i)) CHECK_EQ(rig.tier->promote(key(i), 35), Presence::Pending);
  CHECK_EQ(rig.tier->promote(key(read), 35), Presence::Pending);
  CHECK(eventually([&] { return rig.presence(read) == Presence::Resident; }) && rig.right(read));
  CHECK(two.writes(5000));
  CHECK(rig.store->remove(key(read)));
  CHECK(eventually([&] { return !two.in_other(read); }));
  two.go_on();
  for (uint64_t i = 0; i < two.kBlocks; ++i)  // what waited comes
    if (i != stuck && !two.in_other(i) && i != read) CHECK(eventually([&] { return rig.presence(i) == Presence::Resident; }));
  CHECK(eventually([&] { return !rig.busy() && rig.tier->conditions().empty(); }));
  CHECK(eventually([&] { return rig.tier->promote(key(stuck), 35) == Presence::Pending; }));  // a moment after it failed
  CHECK(eventually([&] { return rig.presence(stuck) == Presence::Resident; }) && rig.right(stuck));
}

TEST(a_file_that_is_made_too_late_goes) {
  TwoDirectories two;
  DiskRig& rig = two.rig;
  two.hooks.create = [&](const std::string&) { return two.hold(); };
  uint64_t next = 5000;
  while (!two.tells()) CHECK(rig.put(next++, kMaxPriority));  // until one has its home there
  CHECK(two.writes(9000));
  two.go_on();
  CHECK(eventually([&] { return !rig.busy() && rig.tier->conditions().empty(); }));
  CHECK(eventually([&] { return fs::is_empty(fs::path(rig.directory) / kTempDirectory); }));
  CHECK(rig.put_on_disk(12000));
}

TEST(a_name_that_is_given_too_late_is_taken_back) {
  TwoDirectories two;
  DiskRig& rig = two.rig;
  const size_t before = rig.files().size();
  std::atomic<uint64_t> names{0};
  two.hooks.publish = [&](const std::string&) { return ++names, two.hold(); };
  uint64_t next = 5000;
  while (names.load() == 0) CHECK(rig.put(next++, kMaxPriority));
  CHECK(eventually([&] { return two.tells(); }));
  CHECK(two.writes(9000));
  two.go_on();
  CHECK(eventually([&] { return !rig.busy() && rig.tier->conditions().empty(); }));
  CHECK(eventually([&] { return fs::is_empty(fs::path(rig.directory) / kTempDirectory); }));
  CHECK_EQ(rig.files().size(), before + names.load() - 1);  // those that came after it have theirs
  CHECK(eventually([&] { return rig.tier->stats().bytes == rig.bytes_on_disk() + two.other.bytes_on_disk(); }));
}

TEST(a_removal_that_does_not_return_is_made_once_it_does) {
  TwoDirectories two;
  DiskRig& rig = two.rig;
  two.hooks.remove = [&](const std::string&) { return two.hold(); };
  const uint64_t stuck = two.first_of(false), other = two.first_of(true);
  CHECK(rig.store->remove(key(stuck)) && rig.store->remove(key(other)));
  CHECK(eventually([&] { return two.tells() && !two.in_other(other); }));
  CHECK_EQ(rig.presence(stuck), Presence::Missing);
  CHECK(two.writes(9000));
  two.go_on();
  CHECK(eventually([&] { return !fs::exists(fs::path(rig.directory) / path_of(key(stuck), kFewDirectories)); }));
  CHECK(eventually([&] { return rig.tier->conditions().empty() && rig.presence(stuck) == Presence::Missing; }));
}

TEST(a_directory_that_answers_after_the_start_holds_up_no_other_and_joins) {
  TwoDirectories two;
  DiskRig& rig = two.rig;
  const uint64_t late = two.first_of(false), read = two.first_of(true);
  uint64_t deleted = late + 1;
  while (two.in_other(deleted)) ++deleted;
  two.restart_beside_a_silent_one();
  CHECK(rig.load(read) && rig.right(read));
  CHECK_EQ(rig.tier->promote(key(late), 35), Presence::Missing);
  CHECK(two.writes(5000));
  CHECK(rig.store->remove(key(read)) && rig.store->remove(key(deleted)));
  CHECK(eventually([&] { return !two.in_other(read); }));
  rig.tier->open(0, std::move(two.late));
  CHECK(eventually([&] { return !fs::exists(fs::path(rig.directory) / path_of(key(deleted), kFewDirectories)); }));
  CHECK_EQ(rig.presence(deleted), Presence::Missing);
  CHECK(eventually([&] { return rig.tier->promote(key(late), 35) == Presence::Pending; }));
  CHECK(eventually([&] { return rig.presence(late) == Presence::Resident; }) && rig.right(late));
  CHECK(eventually([&] { return rig.tier->stats().bytes == rig.bytes_on_disk() + two.other.bytes_on_disk(); }));
  CHECK(rig.put_on_disk(12000) && rig.put_on_disk(12001));
}

TEST(a_listing_that_does_not_return_holds_up_no_other_directory) {
  TwoDirectories two;
  DiskRig& rig = two.rig;
  two.hooks.make_directories = [&] { two.hold(); };
  const uint64_t stuck = two.first_of(false), read = two.first_of(true);
  uint64_t deleted = stuck + 1;
  while (two.in_other(deleted)) ++deleted;
  rig.tier.reset();
  rig.make_tier();
  DiskTierTest::call_timeout(*rig.tier, 20), DiskTierTest::hangs_after(*rig.tier, 50);
  rig.tier->start();
  CHECK(eventually([&] {
    const auto conditions = rig.tier->conditions();
    return conditions.size() == 1 &&
           conditions[0].text == "listing " + rig.directory + " does not return: nothing is written there";
  }));
  CHECK(rig.load(read) && rig.right(read));
  CHECK(rig.load(stuck) && rig.right(stuck));  // by its path
  CHECK(two.writes(5000));
  CHECK(rig.store->remove(key(read)) && rig.store->remove(key(deleted)));
  CHECK(eventually([&] { return !two.in_other(read); }));
  two.go_on();
  CHECK(eventually([&] { return rig.tier->conditions().empty() && !rig.tier->stats().indexing; }));
  CHECK(eventually([&] { return !fs::exists(fs::path(rig.directory) / path_of(key(deleted), kFewDirectories)); }));
  CHECK_EQ(rig.presence(deleted), Presence::Missing);
  CHECK(rig.right(stuck));
  CHECK(eventually([&] { return rig.tier->stats().bytes == rig.bytes_on_disk() + two.other.bytes_on_disk(); }));
  CHECK(rig.put_on_disk(12000) && rig.put_on_disk(12001));
}

TEST(a_flush_beside_a_silent_directory_says_so_and_holds_when_it_answers) {
  TwoDirectories two;
  DiskRig& rig = two.rig;
  two.restart_beside_a_silent_one();
  CHECK_EQ(test::thrown([&] { rig.store->flush(); }), std::optional(Code::Unavailable));
  CHECK(eventually([&] { return two.other.files().empty(); }));
  CHECK(!rig.files().empty());
  rig.tier->open(0, std::move(two.late));
  CHECK(eventually([&] { return rig.files().empty(); }));
  for (uint64_t i = 0; i < two.kBlocks; ++i) CHECK(rig.tier->promote(key(i), 35) == Presence::Missing);
  CHECK(rig.put_on_disk(12000));
}

TEST(a_flush_does_not_hang_with_a_listing) {
  TwoDirectories two;
  DiskRig& rig = two.rig;
  two.hooks.make_directories = [&] { two.hold(); };
  two.hooks.keep_flushed = [&] { return two.hold(); };
  rig.tier.reset();
  rig.make_tier();
  DiskTierTest::call_timeout(*rig.tier, 20), DiskTierTest::hangs_after(*rig.tier, 50);
  rig.tier->start();
  CHECK(eventually([&] { return !rig.tier->conditions().empty(); }));
  CHECK_EQ(test::thrown([&] { rig.store->flush(); }), std::optional(Code::Unavailable));
  CHECK(!two.open && eventually([&] { return two.other.files().empty(); }));
  two.go_on();
  CHECK(eventually([&] { return rig.files().empty(); }));
}

// For days, say: what was deleted meanwhile is remembered up to as many keys as there may be files. Of more, nothing that lies
// in that directory is ever found again.
TEST(more_deletes_than_can_be_remembered_beside_a_silent_directory_are_a_flush_of_it) {
  constexpr uint64_t kMost = TwoDirectories::kBlocks + 8;
  TwoDirectories two;
  DiskRig& rig = two.rig;
  const uint64_t silent = two.first_of(false);
  rig.also = [before = rig.also](DiskTier::Options& options) { before(options), options.max_files = kMost; };
  two.restart_beside_a_silent_one();
  for (uint64_t i = 5000; i < 5000 + 2 * kMost; ++i) {
    CHECK(rig.put_on_disk(i) && rig.store->remove(key(i)));
    CHECK(eventually([&] { return !two.in_other(i); }));
  }
  CHECK(eventually([&] { return StoreTest::files_that_go(*rig.store) <= kMost; }));
  rig.tier->open(0, std::move(two.late));
  CHECK(eventually([&] { return rig.files().empty() && StoreTest::files_that_go(*rig.store) == 0; }));
  CHECK_EQ(rig.tier->promote(key(silent), 35), Presence::Missing);
  CHECK(rig.put_on_disk(12000));
  rig.store->check_integrity();
}

// What it has is not known: half of the quota, for all that anybody can say.
TEST(beside_a_silent_directory_the_others_have_their_share_of_the_quota) {
  TwoDirectories two(20 * TwoDirectories::kFileBytes);
  DiskRig& rig = two.rig;
  two.restart_beside_a_silent_one();
  const uint64_t most = std::max(10 * TwoDirectories::kFileBytes, two.other.bytes_on_disk());
  for (uint64_t i = 5000; i < 5030; ++i) CHECK(rig.put_on_disk(i));
  CHECK(two.other.bytes_on_disk() <= most &&
        two.other.bytes_on_disk() + TwoDirectories::kFileBytes > 10 * TwoDirectories::kFileBytes);
  rig.tier->open(0, std::move(two.late));
  CHECK(eventually([&] {  // what is too much goes once it has been listed
    const uint64_t bytes = rig.tier->stats().bytes;
    return bytes <= 20 * TwoDirectories::kFileBytes && bytes == rig.bytes_on_disk() + two.other.bytes_on_disk() && !rig.busy();
  }));
  for (uint64_t i = 6000; i < 6030; ++i) CHECK(rig.put_on_disk(i));
  CHECK(rig.files().size() > 0 && rig.bytes_on_disk() + two.other.bytes_on_disk() <= 20 * TwoDirectories::kFileBytes);
}

}  // namespace
}  // namespace kv
