// Files that go: of blocks that were deleted, of writes that came to nothing, and those that the quota gives up, which become
// another block's where they can.

#include "core/disk/tier_steps.h"

namespace kv {
namespace {

constexpr uint32_t kRemovalsATurn = 64;  // so that reading goes on between them

}  // namespace

// A file's name goes before its entry, and its entry before the key can be found again.
bool DiskTier::remove_file(const Key& key, uint8_t directory) {
  const int error = places_[directory].at.files->remove(path_of(key, fanout_));
  if (error == 0) removed_.fetch_add(1);
  if (error == -EISDIR) strays_ += 1;  // a directory has its name: not ours to remove, and no failure of the disk
  if (error != 0 && error != -ENOENT && error != -EISDIR) {
    went_wrong(directory, -error, true, "removing a file");
    stubborn_.emplace_back(key, directory);
    return false;
  }
  file_is_gone(key);
  return true;
}

void DiskTier::file_is_gone(const Key& key) {
  std::lock_guard lock(mutex_);
  index_.erase(key);
  if (scanned_)
    doomed_unknown_.erase(key);
  else if (doomed_unknown_.contains(key))
    gone_unknown_.push_back(key);  // its name may still come up
}

void DiskTier::remove_doomed() {
  Deleted deleted = store_.take_deleted();
  if (deleted.all) forget_all();
  for (const Key& key : deleted.keys) {
    forget(key);
    tell_if_gone(key);
  }
  std::vector<std::pair<Key, uint8_t>> now;
  std::vector<Leftover> leftovers;
  if (!stubborn_.empty() && well(stubborn_.front().second)) now.swap(stubborn_);
  {
    std::lock_guard lock(mutex_);
    leftovers.swap(leftovers_);
    while (!doomed_.empty() && now.size() < kRemovalsATurn) {
      const Key key = doomed_.back();
      doomed_.pop_back();
      if (const FileIndex::Entry* entry = index_.find(key))
        now.emplace_back(key, entry->directory);
      else
        for (uint8_t d = 0; d < places_.size(); ++d) now.emplace_back(key, d);
    }
    if (sweep_ && now.empty()) {  // everything was flushed: what is doomed stands anywhere
      index_.each([&](FileIndex::Entry& entry) {
        if (entry.doomed && doomed_.size() < 4096) doomed_.push_back(entry.key);
      });
      sweep_ = !doomed_.empty() && stubborn_.empty();
    }
  }
  for (size_t i = 0; i < now.size(); ++i) {
    const bool last = i + 1 == now.size() || !(now[i + 1].first == now[i].first);  // of the directories it may be in
    if (remove_file(now[i].first, now[i].second) && last) store_.file_gone(now[i].first);
  }
  for (Leftover& leftover : leftovers) remove_leftover(std::move(leftover));
}

// Its bytes count until it is gone.
void DiskTier::remove_leftover(Leftover leftover) {
  const int error = well(leftover.directory) ? places_[leftover.directory].at.files->remove(leftover.path) : -EAGAIN;
  if (error != 0 && error != -ENOENT && error != -EAGAIN) went_wrong(leftover.directory, -error, true, "removing a file");
  std::lock_guard lock(mutex_);
  if (error == 0 || error == -ENOENT)
    reserved_bytes_ -= leftover.bytes;
  else
    leftovers_.push_back(std::move(leftover));
}

// A deleted block of which there is no file, and none on its way: the store need not remember it.
void DiskTier::tell_if_gone(const Key& key) {
  {
    std::lock_guard lock(mutex_);
    if (index_.find(key) || doomed_unknown_.contains(key) || writing_.contains(key)) return;
  }
  store_.file_gone(key);
}

// Removes files until `bytes` more fit under the quota. False if that cannot be. The last one may become `heir`'s instead: in a
// directory as full as it may be, every write is over a file that goes.
bool DiskTier::make_quota_room(uint64_t bytes, Write* heir) {
  for (;;) {
    Key key;
    uint8_t directory;
    bool fits;
    {
      std::lock_guard lock(mutex_);
      if (!scanned_) return bytes == 0;
      if (bytes > quota_bytes_) return false;
      const bool many = bytes && index_.size() + writing_.size() >= max_files_;
      if (index_.bytes() + reserved_bytes_ + bytes <= quota_bytes_ && !many) return true;
      const FileIndex::Entry* old =
          index_.old_one([&](const FileIndex::Entry& e) { return !e.doomed && !loading_.contains(e.key) && well(e.directory); });
      if (!old) return false;
      key = old->key, directory = old->directory;
      const bool last = index_.bytes() + reserved_bytes_ <= quota_bytes_ && index_.size() + writing_.size() <= max_files_;
      fits = heir && last && old->bytes() == bytes && directory == heir->directory;
      index_.find(key)->doomed = true;
    }
    const bool reused = fits && reuse_file(key, *heir);
    if (!reused) remove_file(key, directory);
    store_.drop_disk(key);
    evicted_.fetch_add(1);
    if (reused) return true;  // also if the quota has just become smaller: that is the next turn's affair
  }
}

// The file keeps its bytes until they are written over, under a temporary name.
bool DiskTier::reuse_file(const Key& key, Write& heir) {
  heir.fd = places_[heir.directory].at.files->take_over(path_of(key, fanout_), heir.bytes, &heir.temp);
  if (heir.fd < 0) {
    heir.temp.clear();
    return false;
  }
  file_is_gone(key);
  reused_.fetch_add(1);
  return true;
}

}  // namespace kv
