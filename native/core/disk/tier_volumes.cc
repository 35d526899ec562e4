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
  const TimedFiles* timed = volumes_[directory].timed;
  return !timed || !timed->overdue_since_ms();
}

bool DiskTier::well(uint8_t directory) const {
  const Volume& volume = volumes_[directory];
  return answers(directory) && monotonic_ms() >= std::max(volume.reading.paused_until_ms, volume.writing.paused_until_ms);
}

// A directory that fails again and again is left alone for a while, then probed.
void DiskTier::went_wrong(uint8_t directory, int error, bool writing, const char* doing) {
  Volume& volume = volumes_[directory];
  Breaker& breaker = writing ? volume.writing : volume.reading;
  if (well(directory)) breaker.errors += 1;  // what fails while it rests says nothing new
  const bool at_once = error == ENOSPC || error == EDQUOT || error == EROFS;
  if (!at_once && breaker.errors < kErrorsToPause) return;
  const uint32_t first = at_once ? 1 : kErrorsToPause;  // of a directory that rests for another reason none was counted
  const uint32_t doublings = std::min(std::max(breaker.errors, first) - first, 10u);
  breaker.paused_until_ms = monotonic_ms() + std::min(kFirstPauseMs << doublings, kLongestPauseMs);
  breaker.open = true;
  const char* state = error == ENOSPC || error == EDQUOT ? "full" : error == EROFS ? "read_only" : "failed";
  std::lock_guard lock(mutex_);
  conditions_[{directory, writing ? Doing::Writing : Doing::Reading}] = {
      volume.at.path, state, errno_text(std::string(doing) + " in " + volume.at.path, error)};
}

// A read that succeeds says nothing about writing, nor the other way round.
void DiskTier::went_well(uint8_t directory, bool writing) {
  (writing ? volumes_[directory].writing : volumes_[directory].reading).errors = 0;
  end_condition(directory, writing);
}

void DiskTier::end_condition(uint8_t directory, bool writing) {
  Breaker& breaker = writing ? volumes_[directory].writing : volumes_[directory].reading;
  if (!breaker.open) return;
  breaker.open = false, breaker.paused_until_ms = 0;
  std::lock_guard lock(mutex_);
  conditions_.erase({directory, writing ? Doing::Writing : Doing::Reading});
}

// Whether it is better, also if nobody writes; what cannot be read is seen at the next load. A file that can be made does not
// prove everything: the errors stay counted, so the next one makes the pause longer.
void DiskTier::probe() {
  for (uint8_t d = 0; d < volumes_.size(); ++d) {
    Volume& volume = volumes_[d];
    if (monotonic_ms() >= volume.looked_ms + kLookMs) {
      volume.looked_ms = monotonic_ms();
      if (answers(d)) look_whether_in_place(d);
      look_whether_it_answers(d);
    }
    if (!volume.writing.open || !well(d)) continue;
    {
      std::lock_guard lock(mutex_);
      if (!counted() || index_.bytes() + reserved_bytes_ + volume.probe_bytes > most_bytes())
        continue;  // the next write is the probe
    }
    std::string temp;
    const int fd = volume.at.files->create_temp(volume.probe_bytes, &temp);
    if (fd < 0) {
      went_wrong(d, -fd, true, "making a file");
      continue;
    }
    volume.at.files->close(fd);
    {
      std::lock_guard lock(mutex_);
      reserved_bytes_ += volume.probe_bytes;
    }
    end_condition(d, true);
    remove_leftover({temp, d, volume.probe_bytes});
  }
}

// A file system that is mounted over a directory, or away from under its name, takes nothing from who has it open. What is
// written there from then on the next daemon does not find.
void DiskTier::look_whether_in_place(uint8_t directory) {
  Volume& volume = volumes_[directory];
  const int error = volume.at.files->in_place();
  if (volume.in_place && error == 0) return;
  volume.in_place = error == 0;
  const std::string& path = volume.at.path;
  const std::string what = error == -ESTALE ? "another directory lies at " + path : errno_text(path, -error);
  std::lock_guard lock(mutex_);
  if (volume.in_place)
    conditions_.erase({directory, Doing::Lying});
  else
    conditions_[{directory, Doing::Lying}] = {path, "failed", what + ": nothing is written until it is back, or a restart"};
}

// A device that takes transfers and gives none back.
void DiskTier::look_whether_it_answers(uint8_t directory) {
  const Volume& volume = volumes_[directory];
  const bool hangs = volume.at.engine->in_flight() && monotonic_ms() >= volume.answered_ms + hangs_after_ms_;
  std::lock_guard lock(mutex_);
  if (hangs)
    conditions_[{directory, Doing::Answering}] = {volume.at.path, "failed",
                                                  "no transfer in " + volume.at.path + " ends: the device does not answer"};
  else
    conditions_.erase({directory, Doing::Answering});
}

// A file system that does not return from a call holds one of this tier's threads, so others have to notice.
void DiskTier::add_hanging(std::vector<Condition>& out) const {
  const auto long_ago = [&](uint64_t ms) { return ms && monotonic_ms() >= ms + hangs_after_ms_; };
  for (uint8_t d = 0; d < volumes_.size(); ++d)
    if (const std::string& path = volumes_[d].at.path; long_ago(listings_[d].seen_ms))
      out.push_back({path, "failed", "listing " + path + " does not return: nothing is written there"});
  if (!begun_.load()) return;
  for (uint8_t d = 0; d < volumes_.size(); ++d)
    if (const Volume& volume = volumes_[d]; is_open(d) && volume.timed && long_ago(volume.timed->overdue_since_ms()))
      out.push_back({volume.at.path, "failed", "a call to the file system does not return in " + volume.at.path});
  if (!long_ago(turned_ms_)) return;
  std::string paths;
  for (const Volume& volume : volumes_) paths += (paths.empty() ? "" : ", ") + volume.at.path;
  out.push_back({paths, "failed", "a call to the file system does not return, in one of " + paths});
}

}  // namespace kv
