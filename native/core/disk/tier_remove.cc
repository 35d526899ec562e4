// Files that go: of blocks that were deleted, of writes that came to nothing, and those that the quota gives up, which become
// another block's where they can.

#include <time.h>

#include <algorithm>
#include <bit>

#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/disk/tier_steps.h"

namespace kv {
namespace {

constexpr uint32_t kRemovalsATurn = 64;  // so that reading goes on between them
constexpr size_t kListedAtOnce = 4096;
constexpr uint64_t kRetryRemovalsMs = 1000;  // until what could not be removed is tried again
constexpr std::chrono::seconds kFlushWait{2};

}  // namespace

// A file's name goes before its entry, and its entry before the key can be found again.
bool DiskTier::remove_file(const Key& key, uint8_t directory) {
  if (!unlink(key, directory)) return false;
  file_is_gone(key);
  return true;
}

// The key of a file that cannot be removed now is kept until its directory is well.
bool DiskTier::unlink(const Key& key, uint8_t directory) {
  Volume& volume = volumes_[directory];
  const int error = well(directory) ? volume.at.files->remove(path_of(key, fanout_)) : -EAGAIN;
  if (error == 0) removed_.fetch_add(1);
  if (error == -EISDIR) strays_ += 1;  // a directory has its name: not ours to remove, and no failure of the disk
  if (error == 0 || error == -ENOENT || error == -EISDIR) return true;
  if (error != -EAGAIN) went_wrong(directory, -error, true, "removing a file");
  volume.unremoved.push_back(key);
  volume.retry_removals_ms = monotonic_ms() + kRetryRemovalsMs;
  std::lock_guard lock(mutex_);
  if (FileIndex::Entry* entry = index_.find(key)) entry->listed = true;
  return false;
}

// Of a file that is not in the index it is not known where it lies.
bool DiskTier::remove_everywhere(const Key& key) {
  uint8_t from = 0, to = static_cast<uint8_t>(volumes_.size());
  {
    std::lock_guard lock(mutex_);
    const FileIndex::Entry* entry = index_.find(key);
    if (entry && !entry->doomed) return false;  // written since
    if (entry) from = entry->directory, to = static_cast<uint8_t>(from + 1);
  }
  bool all = true;
  for (uint8_t d = from; d < to; ++d) all = unlink(key, d) && all;
  if (all) file_is_gone(key);
  return all;
}

void DiskTier::file_is_gone(const Key& key) {
  std::lock_guard lock(mutex_);
  index_.erase(key);
  if (listed_)
    doomed_unknown_.erase(key);
  else if (doomed_unknown_.contains(key))
    gone_unknown_.push_back(key);  // its name may still come up
}

void DiskTier::take_deleted() {
  Deleted deleted = store_.take_deleted();
  if (deleted.all) forget_all();
  for (const Key& key : deleted.keys) {
    forget(key);
    tell_if_gone(key);
  }
}

// What was deleted and lies there still must not come back with a daemon that has lost the memory, as after a reboot. One
// directory tells of all: where a file lies is found out again.
void DiskTier::keep_doomed() {
  std::vector<Key> left;
  {
    std::lock_guard lock(mutex_);
    left = doomed_;
    left.insert(left.end(), gone_later_.begin(), gone_later_.end());
  }
  for (const Volume& volume : volumes_) left.insert(left.end(), volume.unremoved.begin(), volume.unremoved.end());
  if (left.empty() && !kept_) return;
  for (uint8_t d = 0; d < volumes_.size(); ++d) {
    if (is_silent(d)) continue;
    const int error = volumes_[d].at.files->keep_deleted(left);
    if (error == 0) left.clear();
    if (error != 0) went_wrong(d, -error, true, "keeping what was deleted");
  }
  kept_ = false;
}

// A few a turn; once the tier is to stop only what is gone `until_ms`.
void DiskTier::remove_doomed(uint64_t until_ms) {
  take_deleted();
  retry_removals();
  const auto over = [&] { return stop_.load() && monotonic_ms() >= until_ms; };
  std::vector<Key> now;
  size_t leftovers;
  {
    std::lock_guard lock(mutex_);
    leftovers = std::min<size_t>(leftovers_.size(), kRemovalsATurn);
    if (doomed_.empty() && sweep_) list_doomed();
    while (!doomed_.empty() && now.size() < kRemovalsATurn) now.push_back(doomed_.back()), doomed_.pop_back();
  }
  size_t done = 0;
  for (; done < now.size() && !over(); ++done)
    if (remove_everywhere(now[done])) tell_gone(now[done]);
  size_t left, removed = 0;
  for (left = leftovers; left > 0 && !over(); --left) removed += remove_next_leftover();
  std::unique_lock lock(mutex_);
  doomed_.insert(doomed_.end(), now.begin() + static_cast<ptrdiff_t>(done), now.end());
  more_leftovers_ = !leftovers_.empty() && (removed || left);  // else none of them can be removed now
  const bool over_with =
      kept_ && listed_ && doomed_.empty() && gone_later_.empty() &&
      std::all_of(volumes_.begin(), volumes_.end(), [](const Volume& volume) { return volume.unremoved.empty(); });
  lock.unlock();
  if (over_with) keep_doomed();
  tell_gone_later();
}

bool DiskTier::remove_next_leftover() {
  Leftover next;
  {
    std::lock_guard lock(mutex_);
    next = std::move(leftovers_.back());
    leftovers_.pop_back();
  }
  return remove_leftover(std::move(next));
}

void DiskTier::retry_removals() {
  for (uint8_t d = 0; d < volumes_.size(); ++d) {
    Volume& volume = volumes_[d];
    if (volume.unremoved.empty() || !well(d) || monotonic_ms() < volume.retry_removals_ms) continue;
    std::lock_guard lock(mutex_);
    doomed_.insert(doomed_.end(), volume.unremoved.begin(), volume.unremoved.end());
    volume.unremoved.clear();
  }
}

// Everything was flushed: what is doomed stands anywhere. Over when all of it is listed, removed or not.
void DiskTier::list_doomed() {
  index_.each([&](FileIndex::Entry& entry) {
    if (!entry.doomed || entry.listed || doomed_.size() >= kListedAtOnce) return;
    entry.listed = true;
    doomed_.push_back(entry.key);
  });
  sweep_ = !doomed_.empty();
}

// Its bytes count until it is gone. False: it is tried again.
bool DiskTier::remove_leftover(Leftover leftover) {
  const std::optional<Key> key = key_of(leftover.path.substr(leftover.path.rfind('/') + 1));
  const auto gone = [&] {
    reserved_bytes_ -= leftover.bytes;
    if (key) misplaced_.erase(misplaced_.find(*key));
    return true;
  };
  if (key) {
    std::lock_guard lock(mutex_);
    const FileIndex::Entry* entry = index_.find(*key);
    const bool again = entry && entry->directory == leftover.directory && leftover.path == path_of(*key, fanout_);
    if (again) return gone();  // the other one went, and it was written here
  }
  const int error = well(leftover.directory) ? volumes_[leftover.directory].at.files->remove(leftover.path) : -EAGAIN;
  if (error != 0 && error != -ENOENT && error != -EAGAIN) went_wrong(leftover.directory, -error, true, "removing a file");
  std::lock_guard lock(mutex_);
  if (error == 0 || error == -ENOENT) return gone();
  leftovers_.push_front(std::move(leftover));
  return false;
}

// A deleted block of which there is no file, and none on its way: the store need not remember it.
void DiskTier::tell_if_gone(const Key& key) {
  {
    std::lock_guard lock(mutex_);
    if (index_.find(key) || doomed_unknown_.contains(key) || writing_.contains(key)) return;
  }
  tell_gone(key);
}

// Not while a file of it may lie where nobody looks for it here: another daemon would find it there. Of more keys than there
// may be files that is not remembered one by one: nothing that is found where nobody could list will be taken by this daemon
// (the next one knows of those only that it was told of: docs/limits.md).
void DiskTier::tell_gone(const Key& key) {
  {
    std::lock_guard lock(mutex_);
    const bool many = gone_later_.size() >= max_files_;
    if (misplaced_.contains(key) || (!listed_ && !many)) return (void)gone_later_.insert(key);
    if (!listed_) doom_what_is_found_ = true;
  }
  store_.file_gone(key);
}

void DiskTier::tell_gone_later() {
  std::vector<Key> gone;
  {
    std::lock_guard lock(mutex_);
    if (!listed_) return;
    for (const Key& key : gone_later_)
      if (!misplaced_.contains(key)) gone.push_back(key);
    for (const Key& key : gone) gone_later_.erase(key);
  }
  for (const Key& key : gone) tell_if_gone(key);
}

// Removes files until `bytes` more fit under the quota. False if that cannot be. The last one may become `heir`'s instead: in a
// directory as full as it may be, every write is over a file that goes.
bool DiskTier::make_quota_room(uint64_t bytes, Write* heir) {
  Room room;
  do room = give_up_one(bytes, heir);
  while (room == Room::GaveUp);
  return room == Room::Fits;
}

// How much may lie here, as far as that is known: a directory that has not answered yet has its even share, for all that anybody
// can say, and the others need not give up for it what they had. The lock is held.
uint64_t DiskTier::most_bytes() const {
  uint64_t silent = 0;
  for (uint8_t d = 0; d < volumes_.size(); ++d) silent += is_silent(d);
  return std::min(quota_bytes_, std::max(quota_bytes_ - quota_bytes_ / volumes_.size() * silent, counted_));
}

// Files go because the quota became smaller, a few a turn: it may be most of them. True if there are more.
bool DiskTier::shrink() {
  if (more_leftovers_) return false;  // they go first
  for (uint32_t i = 0; i < kRemovalsATurn && !stop_.load(); ++i)
    if (give_up_one(0, nullptr) != Room::GaveUp) return false;
  return true;
}

DiskTier::Room DiskTier::give_up_one(uint64_t bytes, Write* heir) {
  Key key;
  uint8_t directory;
  bool fits;
  {
    std::lock_guard lock(mutex_);
    if (!tried()) return bytes == 0 ? Room::Fits : Room::None;
    if (bytes > quota_bytes_) return Room::None;
    const bool many = bytes && index_.size() + writing_.size() >= max_files_;
    const uint64_t quota = bytes ? most_bytes() : quota_bytes_;
    if (index_.bytes() + reserved_bytes_ + bytes <= quota && !many) return Room::Fits;
    const FileIndex::Entry* old =
        index_.old_one([&](const FileIndex::Entry& e) { return !e.doomed && !loading_.contains(e.key) && well(e.directory); });
    if (!old) return Room::None;
    key = old->key, directory = old->directory;
    const bool last = index_.bytes() + reserved_bytes_ <= quota && index_.size() + writing_.size() <= max_files_;
    fits = heir && last && old->bytes() == bytes && directory == heir->directory;
    index_.find(key)->doomed = true;
  }
  const bool reused = fits && reuse_file(key, *heir);
  if (!reused) remove_file(key, directory);
  store_.drop_disk(key);
  evicted_.fetch_add(1);
  return reused ? Room::Fits : Room::GaveUp;  // also if the quota has just become smaller: that is the next turn's affair
}

// A million files take minutes to remove, and a daemon may end at any moment of them: what the next one finds that is not younger
// than this it removes. By the files' own times, later than any of a file that is here: what a clock says is no order.
void DiskTier::remember_flush() {
  if (!begun_.load()) throw Error(Code::Unavailable, "flushed until a restart only: " + volumes_[0].at.path + " is not open yet");
  // A disk that hangs holds up one flush, and not the threads of all that follow. (No timed mutex: g++ 12's TSan sees none.)
  std::unique_lock flush_lock(flush_mutex_);
  if (!flush_ended_.wait_for(flush_lock, kFlushWait, [&] { return !flushing_; }))
    throw Error(Code::Unavailable, "flushed until a restart only: a flush before it is still being written");
  flushing_ = true;
  flush_lock.unlock();
  uint32_t second;
  {
    std::lock_guard lock(mutex_);
    second = std::min(std::max(static_cast<uint32_t>(::time(nullptr)), newest_s_), UINT32_MAX - 1);
  }
  flushed_s_.store(second);
  std::string wrong;
  for (uint8_t d = 0; d < volumes_.size(); ++d)
    if (const int error = is_silent(d) ? -ETIMEDOUT : volumes_[d].at.files->keep_flushed(second); error != 0)
      wrong = errno_text("flushed until a restart only: " + volumes_[d].at.path + "/" + kFlushedFile, -error);
  flush_lock.lock();
  flushing_ = false;
  flush_lock.unlock();
  flush_ended_.notify_one();
  if (!wrong.empty()) throw Error(Code::Unavailable, wrong);
}

// The file keeps its bytes until they are written over, under a temporary name.
bool DiskTier::reuse_file(const Key& key, Write& heir) {
  heir.fd = volumes_[heir.directory].at.files->take_over(path_of(key, fanout_), heir.bytes, &heir.temp);
  if (heir.fd < 0) {
    heir.temp.clear();
    return false;
  }
  file_is_gone(key);
  reused_.fetch_add(1);
  return true;
}

}  // namespace kv
