// A store with a disk tier in a directory of its own, for the tests of the tier.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "core/disk/tier.h"
#include "store_fixture.h"

namespace kv::test {

namespace fs = std::filesystem;

inline constexpr Fanout kFewDirectories{1, 1};  // sixteen, not 272 as a daemon's, to make and to remove

inline constexpr uint64_t kMiB = 1 << 20;

// A store of 64 blocks of 64 KiB (four layers) in 4 MiB, and a tier in a directory of its own: in the working directory, as
// disk_fixture.h says why.
class DiskRig {
 public:
  explicit DiskRig(uint64_t quota = 64 * kMiB, const std::string& under = ".") : segments(4 * kMiB, 256), quota_(quota) {
    std::string name = under + "/kvstored-tier-XXXXXX";
    KV_INVARIANT(::mkdtemp(name.data()) != nullptr);
    directory = fs::absolute(name).lexically_normal();
    segments.disk = true;
    start(false);
  }
  ~DiskRig() {
    stop();
    fs::remove_all(directory);
  }
  void start(bool adopt) {
    store = segments.open(adopt);
    layout = store->register_layout(layout_blob(4, 4 * kPageBytes, 4, 64));
    owner = store->open_owner();
    KV_INVARIANT(eventually([&] { return store->header().frontier.load() == segments.capacity; }));
    start_tier();
  }
  void start_tier() {
    make_tier();
    run_tier();
  }
  void make_tier() {
    DiskTier::Options options;
    Choice choice = choose_engine(directory, 8);
    options.directories.push_back({directory, std::make_unique<RealFiles>(directory, choice.direct), std::move(choice.engine)});
    options.quota_bytes = quota_;
    options.fanout = kFewDirectories;
    if (also) also(options);
    tier = std::make_unique<DiskTier>(*store, std::move(options));
  }
  void run_tier() {
    tier->start();
    CHECK(eventually([&] { return !tier->stats().indexing; }));
  }
  void stop() {
    tier.reset();
    store.reset();
  }
  void restart(bool keep_memory) {
    stop();
    if (!keep_memory) {
      segments.~Segments();
      new (&segments) Segments(4 * kMiB, 256);
      segments.disk = true;
    }
    start(keep_memory);
  }

  static std::vector<uint8_t> bytes_of(uint64_t number) {
    std::vector<uint8_t> out(16 * kPageBytes);
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint8_t>(mixed(number * 7919 + i / 64) >> i % 8);
    return out;
  }
  bool put(uint64_t number, uint32_t priority = kDefaultPriority, uint32_t ttl_s = 0) {
    const CreateItem item{.key = key(number), .fingerprint = number, .tokens = 1, .base_position = 5, .parent = 9};
    const Granted granted = store->create({owner, layout, priority, ttl_s, {&item, 1}})[0];
    if (granted.status != Grant::Granted) return false;
    store->write(granted.handle, 0, bytes_of(number));
    const Seal seal{granted.handle, false};
    return store->seal(owner, {&seal, 1})[0] == Done::Ok;
  }
  // Used twice, and so written.
  bool put_on_disk(uint64_t number) {
    if (!put(number) || !touch(*store, key(number))) return false;
    return eventually([&] { return on_disk_as_well(number); });
  }
  bool on_disk_as_well(uint64_t number) {
    const Snapshot at = store->lookup(key(number)).snapshot;
    return at.control.flags() & kFlagOnDisk && store->lookup(key(number)).presence == Presence::Resident;
  }
  // Evicts everything that was here before.
  void fill(uint64_t from) {
    for (uint64_t i = 0; i < 70; ++i) put(from + i, 90);
  }
  Presence presence(uint64_t number) { return store->lookup(key(number)).presence; }
  bool load(uint64_t number) {
    CHECK(tier->promote(key(number), 35) == Presence::Pending);
    return eventually([&] { return presence(number) != Presence::OnDisk && !busy(); }) && presence(number) == Presence::Resident;
  }
  bool busy() {
    const auto now = tier->stats();  // of one moment
    return now.loads_in_flight + now.loads_waiting + now.writes_in_flight != 0;
  }
  bool right(uint64_t number) {
    const auto found = store->read(key(number), 0, ~0ull);
    return found && *found == bytes_of(number);
  }
  std::vector<fs::path> files() {
    std::vector<fs::path> out;
    std::error_code gone;
    for (fs::recursive_directory_iterator at(directory), end; at != end; at.increment(gone))
      if (at->is_regular_file(gone) && !is_note_name(at->path().filename().string())) out.push_back(at->path());
    return out;
  }
  uint64_t bytes_on_disk() {
    uint64_t sum = 0;
    std::error_code gone;  // while it is looked at
    for (auto& path : files())
      if (const uint64_t bytes = fs::file_size(path, gone); !gone) sum += bytes;
    return sum;
  }

  Segments segments;
  std::string directory;
  std::unique_ptr<Store> store;
  std::unique_ptr<DiskTier> tier;
  uint32_t layout = 0, owner = 0;
  std::function<void(DiskTier::Options&)> also;  // what the next tier is to have besides

 private:
  const uint64_t quota_;
};

}  // namespace kv::test
