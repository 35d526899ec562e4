// What the disk tier asks of a store and is told by it. The tier has a thread of its own and does the I/O; here are only changes
// of the table: which blocks wait to be written, which lie on disk, whose files must go.
//
// A block that lies only on disk keeps a record without an extent (DISK), so that a look-up says so without a call. Such records
// are the first to go when the table is full: the tier finds the file by its path all the same.

#include <sys/eventfd.h>
#include <time.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/base/polling.h"
#include "core/store/store.h"

namespace kv {
namespace {
constexpr uint64_t kOneQueue = 0;  // on-disk blocks and tombstones have one queue each: no record in them occupies memory
constexpr std::chrono::milliseconds kWaitSlice{50};
}  // namespace

void Store::attach_disk(int wake, LowerTier* tier) {
  const Lock lock(mutex_);
  disk_.wake = wake;
  lower_.store(tier, std::memory_order_release);
  if (!disk_.writes.empty() || disk_.tells()) wake_disk();
}

void Store::detach_disk() {
  const Lock lock(mutex_);
  disk_.wake = -1;
  lower_.store(nullptr, std::memory_order_release);
}

void Store::wake_disk() {
  if (disk_.wake >= 0) ::eventfd_write(disk_.wake, 1);
}

// Changes flags and nothing else: state and generation stay, so readers do not notice.
void Store::set_flags(uint32_t record, uint8_t on, uint8_t off) {
  const Control now = control(record);
  const auto flags = static_cast<uint8_t>((now.flags() & ~off) | on);
  index_.record(record).control.store(Control::make(now.generation(), now.state(), flags).word, std::memory_order_release);
  if (journal_.heard() && servable(now.state(), now.flags()) != servable(now.state(), flags))
    journal_.note(key_of(record), false);
}

// ---------------------------------------------------------------- writing behind

// A block is worth writing when it proved useful (its second use), or at once if its priority says so. Of too many that wait the
// least valuable is dropped: writing never slows a create.
void Store::wish_to_write(uint32_t record, bool worth_it) {
  if (!worth_it || control(record).flags() & (kFlagOnDisk | kFlagQueued)) return;
  set_flags(record, kFlagQueued, 0);
  place(record);
  disk_.writes.add(rank(record), record);
  if (disk_.writes.size() == 1) wake_disk();
  if (disk_.writes.size() <= options_.max_pending_writes) return;
  const uint32_t least = disk_.writes.pop_least();
  set_flags(least, 0, kFlagQueued);
  place(least);
  counters_.writes_dropped += 1;
}

// Where a victim is looked for, after it became due for the disk or is no longer.
void Store::place(uint32_t record) {
  if (control(record).state() == State::Sealed && !is_parked(record)) policy_.moved(class_of(record), record, worth(record));
}

// True if it waited to be written. Its place among the victims is the caller's to see to.
bool Store::forget_wish(uint32_t record) {
  if (!(control(record).flags() & kFlagQueued) || !disk_.writes.remove(rank(record), record)) return false;
  set_flags(record, 0, kFlagQueued);
  return true;
}

std::optional<WriteJob> Store::begin_write() {
  const Entry entry(*this);
  // What was deleted goes first: told later, the tier would take it for the deletion of a block put since.
  if (disk_.writes.empty() || disk_.tells()) return std::nullopt;
  if (!own_pins_.may_take(PinOwner::Disk, extent_of(disk_.writes.most()).length, options_.capacity_bytes)) return std::nullopt;
  const uint32_t record = disk_.writes.pop_most();
  const Control now = control(record);
  KV_INVARIANT(now.state() == State::Sealed && now.flags() & kFlagQueued);
  own_pins_.take(PinOwner::Disk, {record, now.generation()}, extent_of(record).length);
  const Record& r = index_.record(record);
  const Upkeep& u = index_.upkeep(record);
  return WriteJob{{record, now.generation()},
                  key_of(record),
                  extent_of(record),
                  pieces_of(record),
                  shape_of(record),
                  u.fingerprint.load(std::memory_order_relaxed),
                  u.created_s.load(std::memory_order_relaxed),
                  r.expiry_s.load(std::memory_order_relaxed),
                  u.parent.load(std::memory_order_relaxed),
                  (now.flags() & kFlagChecksummed) != 0,
                  layouts_.in(shape_of(record).layout)};
}

bool Store::end_write(Handle handle, bool written) {
  const Lock lock(mutex_);
  own_pins_.drop(PinOwner::Disk, handle, extent_of(handle.record).length);
  pins_.gone += 1;
  const Control now = control(handle.record);  // pinned: still this block, sealed or a zombie
  if (now.flags() & kFlagDeleted) written = false;
  set_flags(handle.record, written ? kFlagOnDisk : 0, kFlagQueued);
  place(handle.record);
  if (now.state() == State::Zombie) scan_zombies(true);
  return written;
}

// ---------------------------------------------------------------- files that must go

// Until the file is gone a record remembers it (a DISK record that nobody finds), so that the next daemon does not take what was
// deleted for a block. At most one key per file there is; the tier takes them whenever it wakes. On a disk that removes nothing
// (read-only, say) they would fill the table: what is to be stored goes before what is only remembered for the next daemon.
void Store::file_must_go(const Key& key) {
  if (!options_.disk) return;
  disk_.going.try_emplace(key, Index::kAbsent);
  disk_.deleted.keys.push_back(key);
  if (disk_.deleted.keys.size() == 1) wake_disk();  // the tier takes all that is there
}

// By one record: a file that was written anew, or found again, before it went may have another.
void Store::remember_file(uint32_t record, const Key& key) {
  set_flags(record, kFlagDeleted, kFlagOnDisk | kFlagQueued);
  const uint32_t before = std::exchange(disk_.going.try_emplace(key, Index::kAbsent).first->second, record);
  if (before != Index::kAbsent) drop_tombstone(before);
  disk_.tombstones.insert(kOneQueue, record, static_cast<double>(monotonic_ns()));
}

// Of a deleted block whose file the tier knew, or cannot know of yet, and the table did not: it has fewer records than there are
// files. What there may be no file of takes no other's record.
void Store::remember_unknown(const Key& key, bool sure) {
  const Lock lock(mutex_);
  if (disk_.going.contains(key) || index_.find_exclusive(key) != Index::kAbsent) return;  // somebody writes it anew
  if (!sure && blocks_.free_head == Index::kAbsent) return;
  if (blocks_.free_head == Index::kAbsent && disk_.blocks.size()) free_spare_record();
  file_must_go(key);
  if (const uint32_t record = new_disk_record(key, 0, kFlagDeleted); record != Index::kAbsent) remember_file(record, key);
}

// What lies only on disk first: the tier finds it by its path all the same.
void Store::free_spare_record() {
  if (disk_.blocks.size()) return drop_disk_record(disk_.blocks.least().record, Event::Evict);
  const uint32_t record = disk_.tombstones.least().record;
  disk_.going[key_of(record)] = Index::kAbsent;
  drop_tombstone(record);
}

void Store::file_gone(const Key& key) {
  const Lock lock(mutex_);
  const auto going = disk_.going.find(key);
  if (going == disk_.going.end()) return;
  const uint32_t record = going->second;
  disk_.going.erase(going);
  if (record != Index::kAbsent) drop_tombstone(record);
}

void Store::drop_tombstone(uint32_t record) {
  room_.chances += 1;
  disk_.tombstones.remove(kOneQueue, record);
  free_record(record, Event::Delete);
}

Deleted Store::take_deleted() {
  const Lock lock(mutex_);
  return std::exchange(disk_.deleted, {});
}

// ---------------------------------------------------------------- blocks that lie only on disk

// UINT32_MAX: nobody has read until when the file lives. Then that of a block that ends goes with it at the latest, and a block
// that does not end is written anew, for its file may.
bool Store::add_disk(const Key& key, uint32_t expiry_s) {
  const Entry entry(*this);
  const bool listed = expiry_s == UINT32_MAX;
  if (const uint32_t found = index_.find_exclusive(key); found != Index::kAbsent) {
    if (control(found).state() != State::Disk && !(listed && index_.record(found).expiry_s.load(std::memory_order_relaxed) == 0))
      forget_wish(found), set_flags(found, kFlagOnDisk, 0), place(found);
    return true;
  }
  const uint32_t record = new_disk_record(key, listed ? 0 : expiry_s, 0);
  if (record == Index::kAbsent) return false;
  disk_.blocks.insert(kOneQueue, record, 0);
  remember_expiry(record);
  return true;
}

// A record for a file of which the key is known and nothing else. None: no record is free, or the index has no room.
uint32_t Store::new_disk_record(const Key& key, uint32_t expiry_s, uint8_t flags) {
  if (blocks_.free_head == Index::kAbsent) return Index::kAbsent;
  const uint32_t record = blocks_.free_head;
  Record& r = index_.record(record);
  Upkeep& u = index_.upkeep(record);
  {
    Writing writing(r.sequence);
    for (size_t i = 0; i < 4; ++i) r.key[i].store(key.words[i], std::memory_order_relaxed);
    u.owner.store(0, std::memory_order_relaxed);
    r.extent.store(0, std::memory_order_relaxed);
    r.shape.store(Shape{kUnknownLayout, kDefaultPriority, 0, 0}.pack(), std::memory_order_relaxed);
    u.fingerprint.store(0, std::memory_order_relaxed);
    u.created_s.store(static_cast<uint32_t>(::time(nullptr)), std::memory_order_relaxed);
    set_expiry(record, expiry_s);
    u.parent.store(0, std::memory_order_relaxed);
    u.rank.store(0, std::memory_order_relaxed);
  }
  if (!(flags & kFlagDeleted) && !index_.insert(key, record)) return Index::kAbsent;
  blocks_.free_head = u.link.load(std::memory_order_relaxed);
  transition(record, Event::Indexed, State::Disk, flags);
  blocks_.records += 1;
  return record;
}

void Store::drop_disk(const Key& key) {
  const Lock lock(mutex_);
  for (const auto& [zombie, since] : pins_.zombies)  // whose record would outlive the file
    if (control(zombie).flags() & kFlagOnDisk && key_of(zombie) == key) set_flags(zombie, 0, kFlagOnDisk);
  const uint32_t record = index_.find_exclusive(key);
  if (record == Index::kAbsent) return;
  if (control(record).state() == State::Disk)
    drop_disk_record(record, Event::Evict);
  else
    set_flags(record, 0, kFlagOnDisk);
}

void Store::drop_disk_record(uint32_t record, Event event) {
  room_.chances += 1;
  disk_.blocks.remove(kOneQueue, record);
  index_.erase(key_of(record), record);
  free_record(record, event);
}

// A DISK record whose file must go: found by nobody from here on.
void Store::delete_disk_record(uint32_t record) {
  const Key key = key_of(record);
  disk_.blocks.remove(kOneQueue, record);
  index_.erase(key, record);
  file_must_go(key);
  remember_file(record, key);
}

// A zombie whose memory is free and whose bytes lie on disk, or must go from there: its record stays. False if there is no such
// thing to keep.
bool Store::demote(uint32_t record) {
  const Control now = control(record);
  Record& r = index_.record(record);
  const Key key = key_of(record);
  if (const auto going = disk_.going.find(key);
      now.flags() & kFlagDeleted && going != disk_.going.end() && going->second == Index::kAbsent) {
    transition(record, Event::Demote, State::Disk, kFlagDeleted);  // first: killed after it, the file still goes
    layouts_.went(shape_of(record).layout), layouts_.came_on_disk(shape_of(record).layout);
    {
      Writing writing(r.sequence);
      r.extent.store(0, std::memory_order_relaxed);
    }
    remember_file(record, key);
    return true;
  }
  if (!options_.disk || !(now.flags() & kFlagOnDisk) || expired(r.expiry_s.load(std::memory_order_relaxed)) ||
      index_.find_exclusive(key) != Index::kAbsent || !index_.insert(key, record))
    return false;
  {
    Writing writing(r.sequence);
    r.extent.store(0, std::memory_order_relaxed);
  }
  transition(record, Event::Demote, State::Disk, 0);
  layouts_.went(shape_of(record).layout), layouts_.came_on_disk(shape_of(record).layout);
  disk_.blocks.insert(kOneQueue, record, rank(record));
  return true;
}

// The file is looked at when the block is asked for, and when the tier has listed its directories.
bool Store::adopt_disk_record(uint32_t record) {
  const Key key = key_of(record);
  index_.record(record).extent.store(0, std::memory_order_relaxed);
  if (!options_.disk) return false;
  if (control(record).flags() & kFlagDeleted) {
    if (disk_.going.contains(key)) return false;
    file_must_go(key);
    remember_file(record, key);
    adopt_layout_on_disk(record);
    blocks_.records += 1;
    return true;
  }
  if (index_.find_exclusive(key) != Index::kAbsent || !index_.insert(key, record)) return false;
  if (const double score = rank(record); !std::isfinite(score) || score < 0) index_.upkeep(record).rank.store(0);
  disk_.blocks.insert(kOneQueue, record, rank(record));
  remember_expiry(record);
  adopt_layout_on_disk(record);
  blocks_.records += 1;
  return true;
}

std::vector<Key> Store::disk_keys(uint32_t& record, uint32_t limit) {
  const Entry entry(*this);
  std::vector<Key> out;
  for (uint32_t looked = 0; record < index_.max_blocks() && looked < limit; ++record, ++looked) {
    const Control now = control(record);
    if (now.flags() & kFlagDeleted) continue;
    if (now.state() == State::Disk || (now.state() == State::Sealed && now.flags() & kFlagOnDisk)) out.push_back(key_of(record));
  }
  return out;
}

void Store::tell_load_speed(uint64_t bytes_per_s, uint64_t waiting_bytes, uint64_t latency_us) {
  TableHeader& header = index_.header();
  header.load_bytes_per_s.store(bytes_per_s, std::memory_order_relaxed);
  header.load_waiting_bytes.store(waiting_bytes, std::memory_order_relaxed);
  header.load_latency_us.store(latency_us, std::memory_order_relaxed);
}

// Has what lies below loaded, and waits until every key is in memory, or hopeless, or the time is over. A Presence each.
std::vector<uint8_t> Store::await_blocks(std::span<const Key> keys, uint32_t priority, uint32_t timeout_ms, uint32_t wanted_ms) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  const std::atomic<uint64_t>& ended = progress_[index_.max_blocks()];
  std::vector<uint8_t> out;
  for (const Presence there : promote(keys, priority, Wanting::of(kCalls, wanted_ms))) out.push_back(static_cast<uint8_t>(there));
  for (size_t i = 0; i < keys.size(); ++i) {
    for (;;) {
      const uint64_t seen = ended.load(std::memory_order_acquire);
      const Presence now = promote(keys.subspan(i, 1), priority, Wanting::of(kCalls, wanted_ms))[0];
      out[i] = static_cast<uint8_t>(now);
      const auto left = end - std::chrono::steady_clock::now();
      if (now == Presence::Resident || now == Presence::Missing || left <= left.zero()) break;
      // In slices: the seal of somebody's block wakes its own progress word, not this one.
      const auto slice = std::chrono::duration_cast<std::chrono::nanoseconds>(std::min<decltype(left)>(left, kWaitSlice));
      timespec until;
      ::clock_gettime(CLOCK_MONOTONIC, &until);
      const uint64_t ns = static_cast<uint64_t>(until.tv_nsec) + static_cast<uint64_t>(slice.count());
      until.tv_sec += static_cast<time_t>(ns / 1'000'000'000), until.tv_nsec = static_cast<long>(ns % 1'000'000'000);
      futex_wait(ended, static_cast<uint32_t>(seen), until);
    }
  }
  return out;
}

// Somebody asked for it and has not pinned it yet. In a pool full of blocks that were used more often each load would push out
// the one before, over and over.
void Store::keep_loaded(std::span<const Seal> blocks) {
  const Lock lock(mutex_);
  const uint64_t now_ns = monotonic_ns();
  for (const Seal& block : blocks)
    fresh_.add(block.handle, extent_of(block.handle.record).length, now_ns, options_.capacity_bytes / 2);
}

void Store::load_ended() {
  std::atomic<uint64_t>& ended = progress_[index_.max_blocks()];
  ended.fetch_add(1, std::memory_order_release);
  futex_wake_all(ended);
}

}  // namespace kv
