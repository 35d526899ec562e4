// How the directories fare: which of them fails and is left alone, and when it is better.
//
// Invariant: a condition is told from the failure that made it until a call of the same kind succeeds.

#include <algorithm>

#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/disk/tier_steps.h"

namespace kv {
namespace {

constexpr uint64_t kFirstPauseMs = 1000, kLongestPauseMs = 60'000;
constexpr uint32_t kErrorsToPause = 3;
constexpr uint64_t kLookMs = 1000;

}  // namespace

// What lies there nobody knows: it was not opened yet, or its listing does not return.
bool DiskTier::is_silent(uint8_t directory) const {
  const uint64_t seen_ms = listings_[directory].seen_ms.load();
  return !is_open(directory) || (seen_ms && monotonic_ms() >= seen_ms + hangs_after_ms_);
}

// It was opened, and no call there is overdue. What is listed without an end is asked by path all the same.
bool DiskTier::answers(uint8_t directory) const {
  if (!is_open(directory)) return false;  // first: what else its place says is there from then on
  const PatientFiles* patient = places_[directory].patient;
  return !patient || !patient->overdue_since_ms();
}

bool DiskTier::well(uint8_t directory) const {
  const Place& place = places_[directory];
  return answers(directory) && monotonic_ms() >= std::max(place.reading.paused_until_ms, place.writing.paused_until_ms);
}

// A directory that fails again and again is left alone for a while, then probed.
void DiskTier::went_wrong(uint8_t directory, int error, bool writing, const char* doing) {
  Place& place = places_[directory];
  Fares& fares = writing ? place.writing : place.reading;
  if (well(directory)) fares.errors += 1;  // what fails while it rests says nothing new
  const bool at_once = error == ENOSPC || error == EDQUOT || error == EROFS;
  if (!at_once && fares.errors < kErrorsToPause) return;
  const uint32_t first = at_once ? 1 : kErrorsToPause;  // of a directory that rests for another reason none was counted
  const uint32_t doublings = std::min(std::max(fares.errors, first) - first, 10u);
  fares.paused_until_ms = monotonic_ms() + std::min(kFirstPauseMs << doublings, kLongestPauseMs);
  fares.ill = true;
  const char* state = error == ENOSPC || error == EDQUOT ? "full" : error == EROFS ? "read_only" : "failed";
  std::lock_guard lock(mutex_);
  conditions_[{directory, writing ? Doing::Writing : Doing::Reading}] = {
      place.at.path, state, errno_text(std::string(doing) + " in " + place.at.path, error)};
}

// A read that succeeds says nothing about writing, nor the other way round.
void DiskTier::went_well(uint8_t directory, bool writing) {
  (writing ? places_[directory].writing : places_[directory].reading).errors = 0;
  end_condition(directory, writing);
}

void DiskTier::end_condition(uint8_t directory, bool writing) {
  Fares& fares = writing ? places_[directory].writing : places_[directory].reading;
  if (!fares.ill) return;
  fares.ill = false, fares.paused_until_ms = 0;
  std::lock_guard lock(mutex_);
  conditions_.erase({directory, writing ? Doing::Writing : Doing::Reading});
}

// Whether it is better, also if nobody writes; what cannot be read is seen at the next load. A file that can be made does not
// prove everything: the errors stay counted, so the next one makes the pause longer.
void DiskTier::probe() {
  for (uint8_t d = 0; d < places_.size(); ++d) {
    Place& place = places_[d];
    if (monotonic_ms() >= place.looked_ms + kLookMs) {
      place.looked_ms = monotonic_ms();
      if (answers(d)) look_whether_in_place(d);
      look_whether_it_answers(d);
    }
    if (!place.writing.ill || !well(d)) continue;
    {
      std::lock_guard lock(mutex_);
      if (!counted() || index_.bytes() + reserved_bytes_ + place.probe_bytes > most_bytes())
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
    end_condition(d, true);
    remove_leftover({temp, d, place.probe_bytes});
  }
}

// A file system that is mounted over a directory, or away from under its name, takes nothing from who has it open. What is
// written there from then on the next daemon does not find.
void DiskTier::look_whether_in_place(uint8_t directory) {
  Place& place = places_[directory];
  const int error = place.at.files->in_place();
  if (place.in_place && error == 0) return;
  place.in_place = error == 0;
  const std::string& path = place.at.path;
  const std::string what = error == -ESTALE ? "another directory lies at " + path : errno_text(path, -error);
  std::lock_guard lock(mutex_);
  if (place.in_place)
    conditions_.erase({directory, Doing::Lying});
  else
    conditions_[{directory, Doing::Lying}] = {path, "failed", what + ": nothing is written until it is back, or a restart"};
}

// A device that takes transfers and gives none back.
void DiskTier::look_whether_it_answers(uint8_t directory) {
  const Place& place = places_[directory];
  const bool hangs = place.at.engine->in_flight() && monotonic_ms() >= place.answered_ms + hangs_after_ms_;
  std::lock_guard lock(mutex_);
  if (hangs)
    conditions_[{directory, Doing::Answering}] = {place.at.path, "failed",
                                                  "no transfer in " + place.at.path + " ends: the device does not answer"};
  else
    conditions_.erase({directory, Doing::Answering});
}

// A file system that does not return from a call holds one of this tier's threads, so others have to notice.
void DiskTier::add_hanging(std::vector<Condition>& out) const {
  const auto long_ago = [&](uint64_t ms) { return ms && monotonic_ms() >= ms + hangs_after_ms_; };
  for (uint8_t d = 0; d < places_.size(); ++d)
    if (const std::string& path = places_[d].at.path; long_ago(listings_[d].seen_ms))
      out.push_back({path, "failed", "listing " + path + " does not return: nothing is written there"});
  if (!begun_.load()) return;
  for (uint8_t d = 0; d < places_.size(); ++d)
    if (const Place& place = places_[d]; is_open(d) && place.patient && long_ago(place.patient->overdue_since_ms()))
      out.push_back({place.at.path, "failed", "a call to the file system does not return in " + place.at.path});
  if (!long_ago(turned_ms_)) return;
  std::string paths;
  for (const Place& place : places_) paths += (paths.empty() ? "" : ", ") + place.at.path;
  out.push_back({paths, "failed", "a call to the file system does not return, in one of " + paths});
}

}  // namespace kv
