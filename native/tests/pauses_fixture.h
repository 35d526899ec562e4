// Another thread that has the store at the n-th pause of an operation, and a block in pieces for both to work on.
//
// The clock by which slices end goes on at each look, so that each slice is over at once; at look n the operation waits until the
// other thread asks for the lock, which has it at the next pause.
#pragma once

#include <sched.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "core/base/slices.h"
#include "tests/pieces_fixture.h"

namespace kv::test {

inline thread_local bool is_operation = false;
inline std::atomic<uint64_t> looks{0}, stop_at{0};
inline std::atomic<bool> begun{false}, finished{false};
inline Store* stopped = nullptr;

inline uint64_t stepping_clock() {
  if (!is_operation) return 0;
  const uint64_t look = ++looks;
  if (look >= stop_at.load()) {
    begun = true;
    // No longer: who gives the lock away to us in the middle of its own work waits for it again, and is not counted.
    for (int i = 0; i < 5000 && !finished && StoreTest::waiting(*stopped) == 0; ++i) ::sched_yield();
  }
  return look * 200'000;
}

// False: the operation ended before its look number `at`.
inline bool at_look(uint64_t at, Store& store, const std::function<void()>& other, const std::function<void()>& operation) {
  looks = 0, stop_at = at, begun = finished = false, stopped = &store;
  SlicedMutex::clock = &stepping_clock;
  std::atomic<bool> over{false};
  std::thread thread([&] {
    while (!begun && !over) ::sched_yield();
    if (begun) other();
    finished = true;
  });
  is_operation = true;
  operation();
  is_operation = false, over = true;
  thread.join();
  SlicedMutex::clock = &monotonic_ns;
  return begun;
}

inline std::string bytes_of(const Fd& segment) {
  std::string out(static_cast<size_t>(::lseek(segment.get(), 0, SEEK_END)), '\0');
  KV_INVARIANT(::pread(segment.get(), out.data(), out.size(), 0) == static_cast<ssize_t>(out.size()));
  return out;
}

// Beside each other, so that no run is left between them, and apart.
inline const std::vector<uint32_t> kPages = {30, 31, 29, 32, 28, 60, 57, 54, 51, 48, 10, 90};
inline constexpr uint32_t kPieces = 12;

struct Stage {
  explicit Stage(uint64_t capacity = 4 * kMiB, bool disk = false)
      : world(capacity, 256, 100, disk), item(world.wanted(1, kPages)) {
    used = world.used();
  }
  void publish() { said = store().publish({.owner = world.client.id, .layout = world.rig.layout, .items = {}}, {&item, 1})[0]; }
  void take_back() {  // as a client does, which has it pinned
    world.client.pin(said.block);
    const TakeBack asked{said.block, key(700'000), kRegion};
    said = store().take_back(world.client.id, world.region_layout(), {&asked, 1})[0];
  }
  bool is(Grant status) const { return said.status == static_cast<uint8_t>(status); }
  bool is(Back status) const { return said.status == static_cast<uint8_t>(status); }
  Store& store() { return *world.rig.store; }
  // The region is as it was: its pages can be published.
  void is_whole() {
    store().check_integrity();
    CHECK_EQ(world.used(), used);
    item.rest = key(800'000);
    publish();
    CHECK(is(Grant::Granted));
  }
  void end() {
    world.end();
    world.nothing_is_left();
  }
  PiecesRig world;
  Publish item;
  RegionChange said;
  uint64_t used = 0;
};

}  // namespace kv::test
