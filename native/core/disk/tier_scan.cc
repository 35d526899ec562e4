// What lies in the directories at start, by name and stat: a header is looked at when its block is asked for. Meanwhile the tier
// loads what it is asked for by its path, and writes nothing, because it does not know yet how much is there.

#include <pthread.h>
#include <sys/eventfd.h>

#include <algorithm>

#include "core/disk/scan.h"
#include "core/disk/tier_steps.h"
#include "core/error.h"

namespace kv {

void DiskTier::scan() {
  ::pthread_setname_np(::pthread_self(), "kv-scan");
  for (uint8_t d = 0; d < places_.size() && !stop_.load(); ++d) {
    Visitor visitor;
    visitor.blocks = [&](std::span<const FoundFile> found) { return add_found(d, found); };
    visitor.stray = [&](Stray kind, const std::string& path, uint64_t bytes) {
      if (kind == Stray::Aside) return;
      std::lock_guard lock(mutex_);
      if (kind == Stray::Temp)  // of a daemon that is gone: nothing is written before the listing ends
        leftovers_.push_back({path, d, bytes}), reserved_bytes_ += bytes;
      else
        strays_ += 1;  // not ours to remove
    };
    visitor.over = [&] { return stop_.load(); };
    places_[d].at.files->make_directories(fanout_);
    std::string wrong;
    try {
      const Scanned scanned = kv::scan(places_[d].at.path, fanout_, visitor);
      if (scanned.errors)
        wrong = errno_text(std::to_string(scanned.errors) + " places below " + places_[d].at.path + " cannot be listed",
                           scanned.first_error);
    } catch (const Error& error) {
      wrong = error.what();
    }
    if (wrong.empty()) continue;
    std::lock_guard lock(mutex_);
    unlisted_ = true;
    conditions_.push_back({places_[d].at.path, "failed", wrong + ": nothing is written, because the quota is not known"});
  }
  if (stop_.load()) return;
  if (!unlisted_) prune();  // written by this thread only
  std::lock_guard lock(mutex_);
  scanned_ = true;
  doom_what_is_found_ &= unlisted_;
  for (const Key& key : gone_unknown_) doomed_unknown_.erase(key);  // the others' files are still to be removed
  gone_unknown_.clear();
  ::eventfd_write(wake_.get(), 1);
}

bool DiskTier::add_found(uint8_t directory, std::span<const FoundFile> found) {
  std::vector<Key> fresh;
  {
    std::lock_guard lock(mutex_);
    for (const FoundFile& file : found) {
      newest_s_ = std::max(newest_s_, file.written_s);
      if (file.written_s / kDayS == day_) written_today_ += file.bytes;  // the day's budget outlives its daemon
      if (doomed_unknown_.contains(file.key)) continue;
      const auto pages = static_cast<uint32_t>(std::min<uint64_t>((file.bytes + kPageBytes - 1) / kPageBytes, UINT32_MAX));
      // Longer than all may be together: no block, however little of it is there. Counted, it would push out all others.
      FileIndex::Entry* entry = file.bytes > quota_bytes_ ? nullptr : index_.add(file.key, pages, directory, file.written_s);
      if (!entry) {  // that, or more than the index may hold: gone, or the quota would not know of it
        doomed_unknown_.insert(file.key);
        doomed_.push_back(file.key);
      } else if (doom_what_is_found_ || file.written_s <= flushed_s_.load()) {
        entry->doomed = sweep_ = true;
      } else {
        fresh.push_back(file.key);
      }
    }
    listed_ += found.size();
  }
  // A record for each, while there are free ones; the others are found by their paths.
  for (const Key& key : fresh) {
    if (table_full_) break;
    table_full_ = !accepted([&] { table_full_ = !store_.add_disk(key, 0); }) || table_full_;
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
