// What the store knows of pins between two scans of them (store_pins.cc): which memory waits, which blocks wait beside the
// eviction queue, and what the last scans saw. Plain state; the store's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/store/record_set.h"

namespace kv {

struct PinScans {
  explicit PinScans(uint32_t records) { asked.resize(records), poor.resize(records); }

  std::vector<uint32_t> zombies;
  size_t held_zombies = 0;                                 // how many of them, the first, were found pinned
  std::vector<uint32_t> parked;                            // sealed, found pinned: not in the eviction queue
  uint64_t zombies_scanned_at = 0, parked_scanned_at = 0;  // what releases() said then
  uint64_t gone = 0;                                       // with their session, or the daemon's own
  uint64_t read = 0;                                       // by all scans
  uint64_t last_scan = 0;                                  // words that it read
  RecordSet asked;                                         // what a scan looks for; empty between two
  RecordSet poor;                                          // poor_victims(), good until then
  uint64_t poor_until_ns = 0;
};

}  // namespace kv
