// What the store's tests share: segments on memfds that outlive a store, so that a second one can adopt them; layouts whose
// blocks have a chosen number of pages; a session with its page mapped, as a client has it.
//
// Nothing here asserts: it makes things and looks at them.
#pragma once

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/format/index.h"
#include "core/format/session_file.h"
#include "core/store/store.h"

namespace kv {

// Store's friend: what no public name shows.
class StoreTest {
 public:
  static Index& index(Store& store) { return store.index_; }
  static Arena& arena(Store& store) { return store.arena_; }
  static std::atomic<uint64_t>& progress(Store& store, uint32_t record) { return store.progress_[record]; }
  static void evict(Store& store, uint32_t record) { store.to_zombie(record, Event::Evict); }
  static bool is_read(Store& store, uint32_t record) {  // or written, by the daemon itself
    std::lock_guard lock(store.mutex_);
    return store.own_pins_.contains(record);
  }
  static size_t expiries(Store& store) { return store.expiries_.size(); }
  static size_t files_that_go(Store& store) {
    std::lock_guard lock(store.mutex_);
    return store.disk_.going.size();
  }
  static PinAllowance allowance(Store& store, uint32_t session) {
    std::lock_guard lock(store.mutex_);
    return store.sessions_.at(session)->allowance;
  }
  static auto hold(Store& store) { return std::unique_lock(store.mutex_); }  // as an operation that does not end
  static void scan_zombies(Store& store) {                                   // as a create does
    std::lock_guard lock(store.mutex_);
    store.scan_zombies(false);
  }
  static uint32_t waiting(Store& store) { return store.mutex_.waiting(); }
  static uint64_t gave_way(Store& store) {
    std::lock_guard lock(store.mutex_);
    return store.mutex_.gave_way();
  }
  static SlicedMutex::Holds holds(Store& store) {
    std::lock_guard lock(store.mutex_);
    return store.mutex_.holds();
  }
  static void forget_holds(Store& store) {
    std::lock_guard lock(store.mutex_);
    store.mutex_.forget_holds();
  }
  // All that left are reaped; how many files there are before the lock is let go of.
  template <class F>
  static size_t files_left_while_locked(Store& store, F&& files) {
    const BuriedSessions::Rites after(store.buried_);
    std::lock_guard lock(store.mutex_);
    store.reap_in_slices();
    return files();
  }
  static uint64_t uses_unseen(Store& store) {
    std::lock_guard lock(store.mutex_);
    uint64_t unseen = 0;
    for (auto& [id, session] : store.sessions_)
      if (session->file) unseen += std::min<uint64_t>(session->file->page().ring_head.load() - session->drained, kTouchRing);
    return unseen;
  }
  static uint64_t pins_read(Store& store) { return store.pins_.read; }
  static void next_session(Store& store, uint32_t id) { store.sessions_.next_id = id; }
  static const Mapping& page(Store& store, uint32_t session) { return store.sessions_.at(session)->file->mapping(); }
};

namespace test {

inline uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

inline Key key(uint64_t i) { return {{mixed(4 * i), mixed(4 * i + 1), mixed(4 * i + 2), mixed(4 * i + 3)}}; }

inline bool touch(Store& store, const Key& key) { return store.touch({&key, 1})[0]; }

// Waits for a condition another thread or process brings about. False after a minute.
template <class F>
bool eventually(F&& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    const timespec moment{0, 500'000};
    ::nanosleep(&moment, nullptr);
  }
  return true;
}

// The code of the error that f throws.
template <class F>
std::optional<Code> thrown(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.code;
  }
  return std::nullopt;
}

inline std::vector<uint8_t> layout_blob(uint32_t layers, uint32_t layer_bytes_per_token, uint32_t block_tokens,
                                        uint32_t meta_fixed = 0) {
  const uint32_t head[9] = {layers, 2, 1, 1, 0, block_tokens, 0, meta_fixed, 0};
  std::vector<uint8_t> blob{'K', 'V', 'L', '1'};
  auto add = [&](uint32_t word) {
    blob.insert(blob.end(), reinterpret_cast<uint8_t*>(&word), reinterpret_cast<uint8_t*>(&word) + 4);
  };
  for (uint32_t word : head) add(word);
  for (uint32_t i = 0; i < layers; ++i) add(layer_bytes_per_token);
  return blob;
}

// The segments of one pool and a directory for its sessions.
class Segments {
 public:
  Segments(uint64_t capacity_bytes, uint32_t max_blocks)
      : table(::memfd_create("table", MFD_CLOEXEC)),
        progress(::memfd_create("progress", MFD_CLOEXEC)),
        pool(::memfd_create("pool", MFD_CLOEXEC)),
        capacity(capacity_bytes),
        blocks(max_blocks) {
    KV_INVARIANT(::ftruncate(table.get(), static_cast<off_t>(Store::table_bytes(blocks, capacity))) == 0);
    KV_INVARIANT(::ftruncate(progress.get(), static_cast<off_t>(round_up(Store::progress_bytes(blocks), kPageBytes))) == 0);
    char name[] = "/tmp/kvstored-test-XXXXXX";
    KV_INVARIANT(::mkdtemp(name) != nullptr);
    directory = name;
  }
  ~Segments() { std::filesystem::remove_all(directory); }
  Segments(const Segments&) = delete;

  std::unique_ptr<Store> open(bool adopt = false) const {
    return std::make_unique<Store>(Store::Options{.name = name,
                                                  .table_fd = table.get(),
                                                  .progress_fd = progress.get(),
                                                  .pool_fd = pool.get(),
                                                  .capacity_bytes = capacity,
                                                  .max_blocks = blocks,
                                                  .pool_id = id,
                                                  .session_directory = directory,
                                                  .session_prefix = "p",
                                                  .adopt = adopt,
                                                  .disk = disk,
                                                  .max_pending_writes = max_pending_writes});
  }
  size_t session_files() const {
    return static_cast<size_t>(
        std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator{}));
  }

  Fd table, progress, pool;
  uint64_t capacity;
  uint32_t blocks;
  Id id = random_id();
  std::string directory, name = "test";
  bool disk = false;  // a disk tier will be attached
  uint32_t max_pending_writes = 1024;
};

// A store with a layout whose block of n tokens takes n + 1 pages: n of one layer, one for checksums.
class Rig {
 public:
  static constexpr uint32_t kMaxTokens = 4096;
  Rig(uint64_t capacity_bytes, uint32_t max_blocks, bool disk = false, uint32_t max_pending_writes = 1024,
      const std::string& name = "test")
      : segments(capacity_bytes, max_blocks) {
    segments.disk = disk, segments.max_pending_writes = max_pending_writes, segments.name = name;
    start(false);
  }

  void start(bool adopt) {
    store = segments.open(adopt);
    layout = store->register_layout(layout_blob(1, kPageBytes, kMaxTokens));
    owner = store->open_owner();
    KV_INVARIANT(eventually([&] { return store->header().frontier.load() == segments.capacity; }));
  }
  // What a daemon's death leaves, taken over by the next.
  void restart() {
    store.reset();
    start(true);
  }

  std::vector<Granted> create(std::span<const uint64_t> numbers, uint32_t pages, uint32_t by = 0, uint32_t ttl_s = 0,
                              uint32_t priority = kDefaultPriority) {
    std::vector<CreateItem> items;
    for (uint64_t i : numbers) items.push_back({.key = key(i), .tokens = pages - 1});
    return store->create({.owner = by ? by : owner, .layout = layout, .priority = priority, .ttl_s = ttl_s, .items = items});
  }
  Granted create(uint64_t number, uint32_t pages, uint32_t by = 0, uint32_t ttl_s = 0, uint32_t priority = kDefaultPriority) {
    return create(std::span<const uint64_t>(&number, 1), pages, by, ttl_s, priority)[0];
  }
  Done seal(Handle handle, uint32_t by = 0, bool checksummed = false) {
    const Seal block{handle, checksummed};
    return store->seal(by ? by : owner, {&block, 1})[0];
  }
  // Creates and seals. The status of the create.
  Grant put(uint64_t number, uint32_t pages, uint32_t ttl_s = 0, uint32_t priority = kDefaultPriority) {
    const Granted granted = create(number, pages, 0, ttl_s, priority);
    if (granted.status == Grant::Granted && seal(granted.handle) != Done::Ok) return Grant::NoSpace;
    return granted.status;
  }
  Presence presence(uint64_t number) { return store->lookup(key(number)).presence; }
  bool resident(uint64_t number) { return presence(number) == Presence::Resident; }
  Handle handle(uint64_t number) {
    const Snapshot at = store->lookup(key(number)).snapshot;
    return {at.record, at.control.generation()};
  }
  Control control(uint32_t record) { return StoreTest::index(*store).control(record); }

  Segments segments;
  std::unique_ptr<Store> store;
  uint32_t layout = 0, owner = 0;
};

// A client's session without a client: its page mapped through the locked description.
class Page {
 public:
  explicit Page(Store& store, uint32_t max_pins = 64, uint32_t uid = ::geteuid(), bool read_only = false, bool asks = true)
      : asked(asks && uid == ::geteuid() ? &store : nullptr) {
    Fd locked;
    std::tie(id, locked) = store.open_session(max_pins, static_cast<uint32_t>(::getpid()), uid, read_only,
                                              asks ? protocol::kVersion : protocol::kOldestVersion);
    board.emplace(Mapping(locked.get(), store.session_page_bytes(id), true));
  }
  Id token() const {
    Id out;
    std::copy_n(board->page().token, out.size(), out.begin());
    return out;
  }
  // The last mapping goes, and with it the lock.
  void unmap() { board.reset(); }
  uint32_t pin(Handle handle) {
    const uint64_t word = pin_word(handle.record, handle.generation);
    uint32_t slot;
    if (board->take({&word, 1}, &slot) == 1) return slot;
    if (asked && board->bounded()) asked->allow_pins(id, static_cast<uint32_t>(board->taken()) + 1, 1);
    return board->take({&word, 1}, &slot) == 1 ? slot : PinBoard::kNoSlot;
  }
  void clear(uint32_t slot) { board->clear({&slot, 1}); }

  Store* asked;  // whose pins are not bounded, and which is asked for words
  uint32_t id = 0;
  std::optional<PinBoard> board;
};

}  // namespace test
}  // namespace kv
