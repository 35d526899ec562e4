// A disk tier whose calls of the file system a test sees and answers, and many files without bytes.
#pragma once

#include <fcntl.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tier_fixture.h"

namespace kv {

// DiskTier's friend: what no public name shows.
class DiskTierTest {
 public:
  static bool stopping(DiskTier& tier) { return tier.stop_.load(); }
  static void call_timeout(DiskTier& tier, uint64_t ms) { tier.call_timeout_ms_ = ms; }
  static void hangs_after(DiskTier& tier, uint64_t ms) { tier.hangs_after_ms_ = ms; }
};

namespace test {

// Each may answer in the file system's place (-errno), or let the call go on (0).
struct Hooks {
  std::function<int(const std::string& path)> open, create, publish, remove;
  std::function<void()> make_directories;
  std::function<int()> keep_flushed;
};

class HookedFiles final : public Files {
 public:
  HookedFiles(std::unique_ptr<Files> real, Hooks& hooks) : real_(std::move(real)), hooks_(hooks) {}
  int open_read(const std::string& path, uint64_t* bytes) override {
    const int error = hooks_.open ? hooks_.open(path) : 0;
    return error != 0 ? error : real_->open_read(path, bytes);
  }
  int create_temp(uint64_t bytes, std::string* temp) override {
    const int error = hooks_.create ? hooks_.create(kTempDirectory) : 0;
    return error != 0 ? error : real_->create_temp(bytes, temp);
  }
  int take_over(const std::string& path, uint64_t bytes, std::string* temp) override {
    return real_->take_over(path, bytes, temp);
  }
  int publish(const std::string& temp, const std::string& path) override {
    const int error = hooks_.publish ? hooks_.publish(path) : 0;
    return error != 0 ? error : real_->publish(temp, path);
  }
  void make_directories(Fanout fanout) override {
    real_->make_directories(fanout);
    if (hooks_.make_directories) hooks_.make_directories();
  }
  int remove(const std::string& path) override {
    const int error = hooks_.remove ? hooks_.remove(path) : 0;
    return error != 0 ? error : real_->remove(path);
  }
  int aside(const std::string& path) override { return real_->aside(path); }
  void close(int fd) override { real_->close(fd); }
  uint32_t flushed_s() override { return real_->flushed_s(); }
  int keep_flushed(uint32_t second) override {
    const int error = hooks_.keep_flushed ? hooks_.keep_flushed() : 0;
    return error != 0 ? error : real_->keep_flushed(second);
  }
  int deleted(uint32_t most, std::vector<Key>* keys) override { return real_->deleted(most, keys); }
  int keep_deleted(std::span<const Key> keys) override { return real_->keep_deleted(keys); }
  uint32_t written_s(int fd, uint32_t after_s) override { return real_->written_s(fd, after_s); }
  Written written() override { return real_->written(); }
  int count_written(const Written& written) override { return real_->count_written(written); }
  int in_place() override { return real_->in_place(); }

 private:
  const std::unique_ptr<Files> real_;
  Hooks& hooks_;
};

// One transfer at a time: its end is told while the gate is open.
struct Gate {
  std::function<bool()> open;
  std::string submitted() {
    std::lock_guard lock(mutex);
    return order;
  }
  std::mutex mutex;
  std::string order;  // "r" and "w"
};

class NarrowEngine final : public Engine {
 public:
  NarrowEngine(std::unique_ptr<Engine> real, Gate& gate) : real_(std::move(real)), gate_(gate) {}
  bool submit(Transfer* transfer) override {
    if (real_->in_flight() || !real_->submit(transfer)) return false;
    std::lock_guard lock(gate_.mutex);
    gate_.order += transfer->write ? 'w' : 'r';
    return true;
  }
  size_t completed(std::span<Transfer*> done) override {
    return real_->in_flight() && !gate_.open() ? 0 : real_->completed(done);
  }
  int event_fd() const override { return real_->event_fd(); }
  uint32_t depth() const override { return 1; }
  uint32_t in_flight() const override { return real_->in_flight(); }
  std::string name() const override { return "narrow"; }

 private:
  const std::unique_ptr<Engine> real_;
  Gate& gate_;
};

struct HookedRig : DiskRig {
  explicit HookedRig(uint64_t quota = 64 * kMiB) : DiskRig(quota, "/dev/shm") {  // names are made soonest there
    also = [this](DiskTier::Options& options) {
      for (DiskTier::Directory& each : options.directories)
        each.files = std::make_unique<HookedFiles>(std::move(each.files), hooks);
    };
    restart(true);
  }
  ~HookedRig() { stop(); }  // before the hooks go

  // Files that have a block's name and length and nothing in them: the tier goes by names and lengths until it loads.
  void make_files(uint64_t from, uint64_t count) {
    for (uint64_t i = from; i < from + count; ++i) {
      const Fd fd(::open((directory + "/" + path_of(key(i), kFewDirectories)).c_str(), O_CREAT | O_WRONLY, 0600));
      KV_INVARIANT(fd && ::ftruncate(fd.get(), kFileBytes) == 0);
    }
  }
  // A tier whose only engine is narrow, from here on.
  void narrow(Gate& gate) {
    tier.reset();
    also = [this, &gate, before = also](DiskTier::Options& options) {
      before(options);
      options.directories[0].engine = std::make_unique<NarrowEngine>(std::move(options.directories[0].engine), gate);
    };
    start_tier();
  }
  // A block of several pieces, written at once.
  void put_large(uint64_t number) {
    const uint32_t large = store->register_layout(layout_blob(1, 3 * kMiB, 1));
    const CreateItem item{.key = key(number), .fingerprint = 1, .tokens = 1};
    const Granted granted = store->create({owner, large, kMaxPriority, 0, {&item, 1}})[0];
    CHECK(granted.status == Grant::Granted);
    store->write(granted.handle, 0, std::vector<uint8_t>(3 * kMiB, 7));
    const Seal seal{granted.handle, false};
    CHECK(store->seal(owner, {&seal, 1})[0] == Done::Ok);
  }
  static constexpr uint64_t kFileBytes = 17 * kPageBytes + kBlockFileHeaderBytes;  // of DiskRig's blocks

  Hooks hooks;
};

}  // namespace test
}  // namespace kv
