// What the store knows of pins between two scans of them (store_pins.cc): which memory waits, which blocks wait beside the
// eviction queue, and what the last scans saw. Plain state; the store's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/store/record_set.h"
#include "core/store/steady_array.h"

namespace kv {

struct Zombie {
  uint32_t record;
  uint32_t since;  // how many scans had begun
};

struct PinScans {
  explicit PinScans(uint32_t all) : records(all), zombies(all), parked(all) { asked.resize(records), poor.resize(records); }

  void add_zombie(uint32_t record) { zombies.push_back({record, scans}); }
  // An empty set, for one scan. One that was disturbed does not come back.
  RecordSet lend() {
    RecordSet out = std::exchange(spare, {});
    if (!out.bits()) out.resize(records);
    return out;
  }
  void remove_zombie(size_t at) {
    if (at < held_zombies) zombies[at] = zombies[--held_zombies], at = held_zombies;
    zombies[at] = zombies.back();
    zombies.pop_back();
  }

  const uint32_t records;
  SteadyArray<Zombie> zombies;
  size_t held_zombies = 0;                                 // how many of them, the first, were found pinned
  SteadyArray<uint32_t> parked;                            // sealed, found pinned: not in the eviction queue
  uint64_t zombies_scanned_at = 0, parked_scanned_at = 0;  // what releases() said then
  uint64_t gone = 0;                                       // with their session, or the daemon's own
  uint64_t read = 0;                                       // by all scans
  uint64_t last_scan = 0;                                  // words that it read
  uint32_t scans = 0;                                      // that have begun, of zombies
  RecordSet asked;                                         // what a short scan looks for; empty between two
  RecordSet spare;                                         // what lend() lends
  RecordSet poor;                                          // poor_victims(), good until then
  uint64_t poor_until_ns = 0;
};

}  // namespace kv
