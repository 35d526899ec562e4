// What lies in the directories at start, by name and stat: a header is looked at when its block is asked for. Meanwhile the tier
// loads what it is asked for by its path, and writes nothing, because it does not know yet how much is there.

#include <pthread.h>
#include <sys/eventfd.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/disk/tier_steps.h"
#include "core/files/scan.h"

namespace kv {
namespace {
constexpr std::chrono::seconds kFirstPause{1}, kLongestPause{60};
}

// What cannot be listed is tried again, ever less often: until then its files are found by their paths, and nothing is written.
void DiskTier::scan(uint8_t directory) {
  ::pthread_setname_np(::pthread_self(), "kv-scan");
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    const bool done = list(directory) && !stop_.load();
    std::unique_lock lock(mutex_);
    if (done && --unlisted_ == 0) {  // the last one: it is still counted as being listed
      lock.unlock();
      prune();
      lock.lock();
      if (!stop_.load()) all_listed();
    }
    listings_[directory].done = done, listings_[directory].tried = true;
    counted_ = index_.bytes() + reserved_bytes_;
    ::eventfd_write(wake_.get(), 1);
    if (done || stopping_.wait_for(lock, pause, [&] { return stop_.load(); })) return;
  }
}

// Each directory that answers was listed, or that failed. The lock is held, as for the next.
bool DiskTier::tried() const {
  if (!begun_.load()) return false;
  for (uint8_t d = 0; d < volumes_.size(); ++d)
    if (!is_silent(d) && !listings_[d].tried) return false;
  return true;
}

// Of each that answers it is known how much lies there.
bool DiskTier::counted() const {
  for (uint8_t d = 0; d < volumes_.size(); ++d)
    if (!is_silent(d) && !listings_[d].done) return false;
  return true;
}

void DiskTier::all_listed() {
  written_today_ = std::max(written_today_.load(), found_today_);  // where nothing was counted, or a power loss took it
  doom_what_is_found_ = false, listed_ = true;
  for (const Key& key : gone_unknown_) doomed_unknown_.erase(key);  // the others' files are still to be removed
  gone_unknown_.clear();
}

// False if it, or anything below, could not be.
bool DiskTier::list(uint8_t directory) {
  const std::string& path = volumes_[directory].at.path;
  std::atomic<uint64_t>& seen_ms = listings_[directory].seen_ms;
  std::vector<Leftover>
      leftovers;  // of a daemon that is gone, or had another fan-out: nothing is written before the listing ends
  std::vector<Key> misplaced;
  uint64_t strays = 0;  // not ours to remove
  Visitor visitor;
  visitor.blocks = [&](std::span<const FoundFile> found) { return add_found(directory, found); };
  visitor.stray = [&](Stray kind, const std::string& at, uint64_t bytes) {
    const bool left_over = kind == Stray::Temp || kind == Stray::Misplaced;
    if (left_over) leftovers.push_back({at, directory, bytes});
    strays += !left_over && kind != Stray::Aside;
    if (kind == Stray::Misplaced) misplaced.push_back(*key_of(at.substr(at.rfind('/') + 1)));
  };
  visitor.over = [&] {
    seen_ms.store(monotonic_ms(), std::memory_order_relaxed);
    return stop_.load();
  };
  seen_ms = monotonic_ms();
  volumes_[directory].at.files->make_directories(fanout_);
  seen_ms = monotonic_ms();
  std::string wrong;
  try {
    const Scanned scanned = kv::scan(path, fanout_, visitor);
    if (scanned.errors)
      wrong = errno_text(std::to_string(scanned.errors) + " places below " + path + " cannot be listed", scanned.first_error);
  } catch (const Error& error) {
    wrong = error.what();
  }
  seen_ms = 0;
  std::lock_guard lock(mutex_);
  if (!wrong.empty()) {
    wrong += ": nothing is written, because the quota is not known";
    return conditions_[{directory, Doing::Listing}] = {path, "failed", wrong}, false;
  }
  conditions_.erase({directory, Doing::Listing});
  strays_ += strays;
  for (const Key& key : misplaced) misplaced_.insert(key);
  for (Leftover& each : leftovers) reserved_bytes_ += each.bytes, leftovers_.push_back(std::move(each));
  return true;
}

bool DiskTier::add_found(uint8_t directory, std::span<const FoundFile> found) {
  std::vector<Key> fresh;
  std::vector<Leftover> duplicates;
  {
    std::lock_guard lock(mutex_);
    for (const FoundFile& file : found) {
      newest_s_ = std::max(newest_s_, file.written_s);
      if (doomed_unknown_.contains(file.key)) {
        doomed_.push_back(file.key);  // it may have been out of reach when its turn came
        continue;
      }
      FileIndex::Entry* entry = index_.find(file.key);
      if (entry && entry->directory == directory) continue;  // an earlier try got as far
      if (file.written_s / kDayS == day_) found_today_ += file.bytes;
      if (entry) {  // the same block in two directories: of no use, and it would outlive the other
        duplicates.push_back({path_of(file.key, fanout_), directory, file.bytes});
        misplaced_.insert(file.key);
        continue;
      }
      const auto pages = static_cast<uint32_t>(std::min<uint64_t>((file.bytes + kPageBytes - 1) / kPageBytes, UINT32_MAX));
      // Longer than all may be together: no block, however little of it is there. Counted, it would push out all others.
      entry = file.bytes > quota_bytes_ ? nullptr : index_.add(file.key, pages, directory, std::min(file.written_s, begun_s_));
      if (!entry) {  // that, or more than the index may hold: gone, or the quota would not know of it
        doomed_unknown_.insert(file.key);
        doomed_.push_back(file.key);
      } else if (doom_what_is_found_ || file.written_s <= flushed_s_.load()) {
        entry->doomed = sweep_ = true;
      } else {
        fresh.push_back(file.key);
      }
      names_ += 1;
    }
    for (Leftover& each : duplicates) reserved_bytes_ += each.bytes, leftovers_.push_back(std::move(each));
  }
  // A record for each, while there are free ones; the others are found by their paths.
  for (const Key& key : fresh) {
    if (table_full_) break;
    table_full_ = !accepted([&] { table_full_ = !store_.add_disk(key, UINT32_MAX); }) || table_full_;
  }
  return !stop_.load();
}

// What the table of the daemon before said to be on disk, and is not.
void DiskTier::prune() {
  constexpr uint32_t kAtOnce = 4096;
  for (uint32_t record = 0; record < store_.options().max_blocks && !stop_.load();) {
    std::vector<Key> keys;
    if (!accepted([&] { keys = store_.disk_keys(record, kAtOnce); })) return;
    std::vector<Key> absent;
    {
      std::lock_guard lock(mutex_);
      for (const Key& key : keys)
        if (const FileIndex::Entry* entry = index_.find(key); !entry || entry->doomed) absent.push_back(key);
    }
    for (const Key& key : absent) store_.drop_disk(key);
  }
}

}  // namespace kv
