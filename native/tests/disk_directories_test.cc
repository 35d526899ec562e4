// Goal: of several directories each rests by itself. One that answers nothing holds up neither the reading nor the writing of the
// others; what it holds comes when it answers again. A directory that cannot be listed is read and not written, until it can be.
//
// Proven by removal (in a copy of the tree): start_loads() asks whether any directory's engine is full instead of this one's: the
// first test fails.
#include <sys/eventfd.h>
#include <filesystem>

#include "check.h"
#include "tier_fixture.h"

namespace kv {
namespace {

namespace fs = std::filesystem;
using test::DiskRig;
using test::eventually;
using test::key;

// Passes everything on, and says that nothing is done while `stuck`.
class StuckEngine final : public Engine {
 public:
  StuckEngine(std::unique_ptr<Engine> engine, std::atomic<bool>& stuck) : engine_(std::move(engine)), stuck_(stuck) {}
  bool submit(Transfer* transfer) override { return in_flight() < depth() && engine_->submit(transfer); }
  size_t completed(std::span<Transfer*> done) override {
    Transfer* now[kMaxDepth];
    const size_t count = engine_->completed(now);
    held_.insert(held_.end(), now, now + count);
    if (stuck_.load()) return 0;
    const size_t ready = std::min(done.size(), held_.size());
    std::copy_n(held_.begin(), ready, done.begin());
    held_.erase(held_.begin(), held_.begin() + static_cast<ptrdiff_t>(ready));
    return ready;
  }
  int event_fd() const override { return engine_->event_fd(); }
  uint32_t depth() const override { return engine_->depth(); }
  uint32_t in_flight() const override { return engine_->in_flight() + static_cast<uint32_t>(held_.size()); }
  std::string name() const override { return "stuck"; }

 private:
  const std::unique_ptr<Engine> engine_;
  std::atomic<bool>& stuck_;
  std::vector<Transfer*> held_;
};

struct TwoDirectories {
  TwoDirectories() {
    rig.also = [this](DiskTier::Options& options) {
      options.fanout = {};  // as a daemon's: two levels
      DiskTier::Directory& first = options.directories[0];
      event = first.engine->event_fd();
      first.engine = std::make_unique<StuckEngine>(std::move(first.engine), stuck);
      Choice choice = choose_engine(other.directory, 8);
      options.directories.push_back(
          {other.directory, std::make_unique<RealFiles>(other.directory, choice.direct), std::move(choice.engine)});
    };
    other.stop();  // only its directory is wanted
    rig.restart(true);
  }
  ~TwoDirectories() { release(); }
  void release() {
    stuck = false;
    ::eventfd_write(event, 1);
  }
  bool in_other(uint64_t number) { return fs::exists(fs::path(other.directory) / path_of(key(number), Fanout{})); }

  std::atomic<bool> stuck{false};
  int event = -1;
  DiskRig other, rig;
};

TEST(a_directory_that_does_not_answer_holds_up_no_other) {
  TwoDirectories two;
  DiskRig& rig = two.rig;
  constexpr uint64_t kBlocks = 48, kMore = 12;
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(rig.put_on_disk(i));
  rig.fill(1000);
  two.stuck = true;
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK_EQ(rig.tier->promote(key(i), 35), Presence::Pending);
  uint64_t there = 0;
  for (uint64_t i = 0; i < kBlocks; ++i) {
    if (!two.in_other(i)) continue;
    there += 1;
    CHECK(eventually([&] { return rig.presence(i) == Presence::Resident; }));
  }
  CHECK(there > 0 && there < kBlocks);
  for (uint64_t i = 2000; i < 2000 + kMore; ++i) {
    CHECK(rig.put(i, kMaxPriority));
    CHECK(eventually([&] { return rig.on_disk_as_well(i); }));
    CHECK(two.in_other(i));
  }
  CHECK_EQ(rig.tier->stats().loaded, there);
  two.release();
  CHECK(eventually([&] { return !rig.busy(); }));
  CHECK_EQ(rig.tier->stats().loaded, kBlocks);
  rig.store->check_integrity();
}

// Fails if a write counts on a place in the index that the files of a directory which joins have taken: the daemon ended then.
TEST(a_directory_that_joins_with_as_many_files_as_there_may_be_costs_a_write) {
  TwoDirectories two;
  DiskRig& rig = two.rig;
  constexpr uint64_t kBlocks = 16;
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(rig.put_on_disk(i));
  CHECK(!two.other.files().empty() && !rig.files().empty());
  DiskTier::Directory late;
  rig.also = [&, before = rig.also](DiskTier::Options& options) {
    before(options);
    late = std::move(options.directories[1]);
    options.directories[1] = {late.path, nullptr, nullptr};
    options.max_files = kBlocks;
  };
  rig.restart(true);
  two.stuck = true;
  CHECK(rig.put(5000, kMaxPriority));
  CHECK(eventually([&] { return rig.tier->stats().writes_in_flight == 1; }));
  rig.tier->open(1, std::move(late));
  CHECK(eventually([&] { return rig.tier->stats().files == kBlocks; }));
  two.release();
  CHECK(eventually([&] { return !rig.busy() && rig.files().size() + two.other.files().size() == kBlocks; }));
  CHECK(!rig.on_disk_as_well(5000) && rig.right(5000));
  rig.store->check_integrity();
}

// Reads asked for between the look at the directories and the choice of one: whoever waits for them to go waits for ever.
TEST(reads_asked_for_at_any_moment_hold_up_no_write) {
  DiskRig rig;
  for (uint64_t i = 1; i <= 8; ++i) CHECK(rig.put_on_disk(i));
  std::atomic<bool> stop{false};
  std::thread asking([&] {
    for (uint64_t i = 0; !stop.load(); ++i) rig.tier->promote(key(1 + i % 8), 35);
  });
  for (uint64_t i = 2000; i < 2300; ++i) {
    rig.put(i, kMaxPriority);
    const uint64_t before = rig.tier->stats().written;
    CHECK(eventually([&] { return rig.tier->stats().written > before || rig.store->stats().pending_writes == 0; }));
  }
  stop.store(true);
  asking.join();
  CHECK(eventually([&] { return !rig.busy(); }));
  rig.store->check_integrity();
}

TEST(nothing_is_written_where_a_directory_could_not_be_listed) {
  DiskRig rig;
  for (uint64_t i = 1; i <= 3; ++i) CHECK(rig.put_on_disk(i));
  rig.tier.reset();
  rig.make_tier();
  const fs::path here(rig.directory), away(here.string() + ".away");
  fs::rename(here, away);
  rig.run_tier();  // which waits for the end of the listing
  const auto conditions = rig.tier->conditions();
  CHECK(!conditions.empty());
  for (const auto& condition : conditions) {
    CHECK_EQ(condition.state, std::string("failed"));
    CHECK(condition.text.find("nothing is written") != std::string::npos);
  }
  CHECK(rig.put(10, kMaxPriority));
  CHECK_EQ(rig.store->stats().pending_writes, 1u);
  for (uint64_t i = 1; i <= 3; ++i) CHECK(rig.load(i));  // each goes through turns that would have written
  CHECK_EQ(rig.tier->stats().written, 0u);
  fs::rename(away, here);  // it is listed again, and all is well
  CHECK(eventually([&] { return rig.on_disk_as_well(10); }));
  CHECK_EQ(rig.tier->conditions().size(), 0u);
  CHECK_EQ(rig.tier->stats().files, 4u);
  CHECK_EQ(rig.tier->stats().bytes, rig.bytes_on_disk());
  rig.store->check_integrity();
}

}  // namespace
}  // namespace kv
