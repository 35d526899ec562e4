// How the directories fare: which of them fails and is left alone, and when it is better.
//
// Invariant: a condition is told from the failure that made it until a call of the same kind succeeds.

#include <algorithm>

#include "core/disk/tier_steps.h"
#include "core/error.h"
#include "core/polling.h"

namespace kv {
namespace {

constexpr uint64_t kFirstPauseMs = 1000, kLongestPauseMs = 60'000;
constexpr uint32_t kErrorsToPause = 3;

uint64_t now_ms() { return monotonic_ns() / 1'000'000; }

}  // namespace

bool DiskTier::well(uint8_t directory) const { return now_ms() >= places_[directory].paused_until_ms; }

// A directory that fails again and again is left alone for a while, then probed.
void DiskTier::went_wrong(uint8_t directory, int error, bool writing, const char* doing) {
  Place& place = places_[directory];
  if (well(directory)) place.errors += 1;  // a removal that fails while it rests says nothing new
  const bool at_once = error == ENOSPC || error == EDQUOT || error == EROFS;
  if (!at_once && place.errors < kErrorsToPause) return;
  const uint32_t doublings = std::min(place.errors - (at_once ? 1 : kErrorsToPause), 10u);
  place.paused_until_ms = now_ms() + std::min(kFirstPauseMs << doublings, kLongestPauseMs);
  place.state = error == ENOSPC || error == EDQUOT ? "full" : error == EROFS ? "read_only" : "failed";
  place.reading = !writing;
  place.text = errno_text(std::string(doing) + " in " + place.at.path, error);
  std::lock_guard lock(mutex_);
  std::erase_if(conditions_, [&](const Condition& c) { return c.path == place.at.path; });
  conditions_.push_back({place.at.path, place.state, place.text});
}

// A read that succeeds says nothing about writing.
void DiskTier::went_well(uint8_t directory, bool writing) {
  Place& place = places_[directory];
  if (!writing && !place.state.empty() && place.state != "failed") return;
  place.errors = 0;
  end_condition(place);
}

void DiskTier::end_condition(Place& place) {
  if (place.state.empty()) return;
  place.state.clear(), place.paused_until_ms = 0;
  std::lock_guard lock(mutex_);
  std::erase_if(conditions_, [&](const Condition& c) { return c.path == place.at.path; });
}

// Whether it is better, also if nobody writes; what cannot be read is seen at the next load. A file that can be made does not
// prove everything: the errors stay counted, so the next one makes the pause longer.
void DiskTier::probe() {
  for (uint8_t d = 0; d < places_.size(); ++d) {
    Place& place = places_[d];
    if (place.state.empty() || place.reading || !well(d)) continue;
    {
      std::lock_guard lock(mutex_);
      if (!scanned_ || index_.bytes() + reserved_bytes_ + place.probe_bytes > quota_bytes_)
        continue;  // the next write is the probe
    }
    std::string temp;
    const int fd = place.at.files->create_temp(place.probe_bytes, &temp);
    if (fd < 0) {
      went_wrong(d, -fd, true, "making a file");
      continue;
    }
    place.at.files->close(fd);
    {
      std::lock_guard lock(mutex_);
      reserved_bytes_ += place.probe_bytes;
    }
    end_condition(place);
    remove_leftover({temp, d, place.probe_bytes});
  }
}

}  // namespace kv
