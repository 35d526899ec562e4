// Goal: a tier that is to stop does: it lists no further, submits nothing more, and removes for a moment only.
//
// Method: the step under way waits until the tier was told to stop; then what is done after it is counted.
//
// Proven against the tier as it was: all fail.
#include "check.h"
#include "core/polling.h"
#include "disk_hooks.h"

namespace kv {
namespace {

using test::eventually;
using test::HookedRig;
using test::kMiB;

bool stopping(HookedRig& rig) {
  return eventually([&] { return DiskTierTest::stopping(*rig.tier); });
}

TEST(a_listing_ends_among_strays) {
  HookedRig rig;
  rig.tier.reset();
  for (int i = 0; i < 500; ++i) const Fd made(::open((rig.directory + "/stray" + std::to_string(i)).c_str(), O_CREAT, 0600));
  std::atomic<bool> begun{false};
  rig.hooks.make_directories = [&] { begun = true, CHECK(stopping(rig)); };
  rig.make_tier();
  rig.tier->start();
  CHECK(eventually([&] { return begun.load(); }));
  rig.tier->stop();
  CHECK_EQ(rig.tier->stats().strays, 0u);
}

// One transfer at a time, and none is done before the tier stops.
class NarrowEngine final : public Engine {
 public:
  NarrowEngine(std::unique_ptr<Engine> real, HookedRig& rig, std::atomic<uint64_t>& submitted)
      : real_(std::move(real)), rig_(rig), submitted_(submitted) {}
  bool submit(Transfer* transfer) override {
    if (real_->in_flight() || !real_->submit(transfer)) return false;
    return ++submitted_ > 0;
  }
  size_t completed(std::span<Transfer*> done) override {
    if (real_->in_flight()) CHECK(stopping(rig_));
    return real_->completed(done);
  }
  int event_fd() const override { return real_->event_fd(); }
  uint32_t depth() const override { return 1; }
  uint32_t in_flight() const override { return real_->in_flight(); }
  std::string name() const override { return "narrow"; }

 private:
  const std::unique_ptr<Engine> real_;
  HookedRig& rig_;
  std::atomic<uint64_t>& submitted_;
};

TEST(a_large_write_is_given_up) {
  HookedRig rig;
  std::atomic<uint64_t> submitted{0};
  rig.also = [&](DiskTier::Options& options) {
    options.directories[0].engine = std::make_unique<NarrowEngine>(std::move(options.directories[0].engine), rig, submitted);
  };
  rig.restart(false);
  const uint32_t layout = rig.store->register_layout(test::layout_blob(1, 3 * kMiB, 1));
  const CreateItem item{.key = test::key(1), .fingerprint = 1, .tokens = 1};
  const Granted granted = rig.store->create({rig.owner, layout, kMaxPriority, 0, {&item, 1}})[0];
  CHECK(granted.status == Grant::Granted);
  rig.store->write(granted.handle, 0, std::vector<uint8_t>(3 * kMiB, 7));
  const Seal seal{granted.handle, false};
  CHECK(rig.store->seal(rig.owner, {&seal, 1})[0] == Done::Ok);
  CHECK(eventually([&] { return submitted.load() == 1; }));
  rig.tier->stop();
  CHECK_EQ(submitted.load(), 1u);
  CHECK_EQ(rig.files().size(), 0u);
  CHECK_EQ(rig.tier->stats().write_errors, 0u);
  CHECK_EQ(rig.store->stats().pending_writes, 0u);
  rig.store->check_integrity();
}

// The rest is the next daemon's.
TEST(removals_end_soon) {
  constexpr uint64_t kFew = 10, kEachNs = 10'000'000, kTimeNs = 50'000'000;
  HookedRig rig;
  rig.tier.reset();
  rig.make_files(10'000, 500);
  rig.start_tier();
  std::atomic<uint64_t> removed{0};
  rig.hooks.remove = [&](const std::string&) {
    if (++removed == kFew) CHECK(stopping(rig));
    if (removed > kFew)  // a slow disk
      for (const uint64_t end = monotonic_ns() + kEachNs; monotonic_ns() < end;) continue;
    return 0;
  };
  rig.store->flush();
  CHECK(eventually([&] { return removed.load() == kFew; }));
  rig.tier->stop();
  CHECK(removed.load() <= kFew + kTimeNs / kEachNs + 1);
}

}  // namespace
}  // namespace kv
