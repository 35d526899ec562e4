// Making room: what goes, and when its memory may be used again.

#include <time.h>

#include <algorithm>
#include <functional>

#include "core/base/atomics.h"
#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/base/polling.h"
#include "core/store/store.h"

namespace kv {
namespace {

constexpr int kTickBusyMs = 50;  // while something waits to become free
constexpr int kTickIdleMs = 1000;
constexpr size_t kReapedAtOnce = 4;      // sessions that a create looks after: a system call each
constexpr size_t kTriedAtOnce = 1024;    // victims that one hold of the lock looks at
constexpr size_t kUsesOfACreate = 2048;  // of others, that it looks at before it chooses
constexpr size_t kParkedAtOnce = 8192, kPinsOfAPass = 1 << 16;

}  // namespace

// ---------------------------------------------------------------- zombies

// Unlinked first, then the state: a reader that still found it will see the generation changed, or be seen by the scan.
void Store::to_zombie(uint32_t record, Event event) {
  const bool due = forget_wish(record);
  const Control before = control(record);
  const uint8_t below = before.flags() & (kFlagOnDisk | kFlagQueued);
  uint8_t flags = 0;
  if (event != Event::Delete && !expired(index_.record(record).expiry_s.load(std::memory_order_relaxed)))
    flags = below, counters_.evictions_unwritten += due;
  else if (below)
    flags = kFlagDeleted, file_must_go(key_of(record));
  if (before.state() == State::Sealed) leave_queue(record);
  if (before.state() == State::Created) blocks_.created -= 1;
  if (before.state() == State::Quarantined)
    flags |= kFlagQuarantined;
  else
    index_.erase(key_of(record), record);
  transition(record, event, State::Zombie, flags);
  if (before.state() == State::Created) {
    publish_progress(record, Phase::Ended);
    futex_wake_all(progress_[record]);
  }
  pins_.add_zombie(record);
}

// One that evict_least() has taken out is in neither.
void Store::leave_queue(uint32_t record) {
  if (is_parked(record))
    leave_parking(record);
  else if (policy_.contains(class_of(record), record))
    policy_.remove(class_of(record), record);
}

// False: there was no time for all of its pieces.
bool Store::free_zombie(uint32_t record, Slice& slice) {
  const Extent extent = extent_of(record);
  if (extent.in_pieces()) {
    if (!free_pieces(record, slice)) return false;
  } else {
    blocks_.used_bytes -= extent.length;
    arena_.release(extent, record);
  }
  if (!demote(record)) free_record(record, Event::LastPinGone);
  room_.chances += 1;
  return true;
}

// What readers got since the last look, of at most so many uses, the sessions in turn: a put answers for no more of what others
// read. In slices.
void Store::drain_rings(size_t most) {
  double now = use_now();
  Slice slice(kSlice, 1);
  size_t here = 0;
  for (size_t left = sessions_.size(); left > 0 && most > 0;) {
    auto at = sessions_.at_least(sessions_.next_ring);
    if (at == sessions_.end()) at = sessions_.begin();
    if (at == sessions_.end()) return;
    const size_t wanted = std::min(most, kSlice), drained = at->second->file ? drain_ring(*at->second, wanted, now) : 0;
    here += drained, most -= drained;
    sessions_.next_ring = at->first;
    if (drained < wanted || here >= kTouchRing) sessions_.next_ring += 1, here = 0, --left;
    if (slice.over() || drained == kSlice)
      mutex_.give_way(), slice.again(), now = std::min(now, clock_.value);  // all scores may have been divided
  }
}

// How many it drained. The ring is lossy and its owner may write anything into it: a number out of range or of a block that is
// gone is passed over.
size_t Store::drain_ring(Session& session, size_t most, double now) {
  const SessionPage& page = session.file->page();
  const uint64_t head = page.ring_head.load(std::memory_order_acquire);
  const uint64_t begin = head - std::min<uint64_t>(head - session.drained, kTouchRing);
  session.drained = begin + std::min<uint64_t>(head - begin, most);
  for (uint64_t i = begin; i != session.drained; ++i) {
    const uint32_t record = page.ring[i % kTouchRing].load(std::memory_order_relaxed);
    if (record >= index_.max_blocks()) continue;
    const State state = control(record).state();
    if (state == State::Sealed) use(record, now);
    if (state == State::Created) add_use(record, now);  // by who follows it
  }
  return session.drained - begin;
}

// ---------------------------------------------------------------- eviction

// Room for `count` extents of this length, as far as pins allow: what is a zombie for no reason any more; then, whichever is
// worth less for the room it makes, the least valuable blocks of the same class or a slab of another class; then, when the class
// has nothing left, the cheapest slab anywhere, and at last the cheapest run of slots just long enough.
//
// What was refused stays refused until something was freed, sealed or unpinned: nothing longer finds room where this found none.
void Store::make_room(uint64_t length, size_t count, bool last_look) {
  last_look ? reap_in_slices() : reap_sessions(kReapedAtOnce);
  scan_zombies();
  auto room = [&]() REQUIRES(mutex_) {
    return (blocks_.free_head != Index::kAbsent || disk_.spare_records()) && arena_.has_room(length);
  };
  if (room()) return;
  const uint64_t chances = room_.chances + releases();
  if (length >= room_.refused_length && chances == room_.refused_at) return;
  drain_rings(kUsesOfACreate);
  look_at_pins();
  unpark(policy_.least(Arena::size_class(length)).record == policy_.kNone && releases() != pins_.parked_scanned_at);
  if (blocks_.free_head == Index::kAbsent && !disk_.spare_records()) {
    evict_least(std::nullopt, count + room_for_more(length));
    scan_zombies();
    if (room()) return;
  }
  const uint64_t size_class = Arena::size_class(length);
  const uint64_t slab = arena_.slab_bytes_for(length);
  const auto least = policy_.least(size_class);
  const auto any = policy_.least();
  // Neither a block may go nor a run be free: no need to look at all of the pool.
  auto hopeless = [&]() REQUIRES(mutex_) { return policy_.size() == 0 && blocks_.used_bytes + length > pool_.frontier(); };
  bool taken = false;
  if (least.record == policy_.kNone) {
    if (!hopeless()) taken = evict_cheapest_run(arena_.pieces(true), slab, INFINITY).has_value();
  } else if (any.score < least.score) {
    // Where the least valuable block of all lies, a slab may be cheaper than what it would hold. Looking around it costs a few
    // slabs.
    const uint64_t at = pieces_of(any.record)[0].offset;
    const double worth = least.score * static_cast<double>(slab / size_class * size_class);
    taken = evict_cheapest_run(arena_.pieces(true, at - std::min(at, slab), at + slab), slab, worth).has_value();
  }
  if (!taken) evict_least(size_class, count + room_for_more(length));
  scan_zombies();
  if (arena_.has_room(length)) return;
  if (!hopeless()) room_.reserved = evict_cheapest_run(arena_.pieces(false), length, INFINITY);
  scan_zombies();
  if (room_.reserved) return;
  if (!fresh_.empty() || !last_look) {  // better than no room; and a snapshot of pins may be out of date
    fresh_.clear(), pins_.poor_until_ns = 0;
    return make_room(length, count, true);
  }
  room_.refused_length = length, room_.refused_at = chances;
}

// The next batch like the last will find its room at once: what it would evict is evicted while nobody waits. Never more than a
// small part of the pool or the table, and nothing as long as they have room of their own.
void Store::make_room_ahead() {
  const Lock lock(mutex_);
  const auto [length, count] = std::exchange(room_.ahead, {});
  if (count == 0 || draining_ || !fence_.empty()) return;
  if (const size_t records = index_.max_blocks() - blocks_.records + disk_.spare_records(); records < count) {
    drain_rings(kUsesOfACreate);
    evict_least(std::nullopt, count - records + room_for_more(length));
    scan_zombies();
  }
  if (pool_.frontier() < pool_.capacity()) return;
  const size_t there = arena_.room(length, count);
  const uint64_t size_class = Arena::size_class(length);
  const auto least = policy_.least(size_class);
  // Where another class has the least valuable block, make_room() weighs the two.
  if (there == count || blocks_.free_head == Index::kAbsent || least.record == policy_.kNone ||
      policy_.least().score < least.score)
    return;
  drain_rings(kUsesOfACreate);
  evict_least(size_class, count - there + room_for_more(length));
  scan_zombies();
}

// Evicts up to `count` of the least valuable blocks of a class, or of all. Pinned ones are parked, fresh ones kept. In slices:
// who calls this must not rely on what it found before.
void Store::evict_least(std::optional<uint64_t> size_class, size_t count) {
  bool any = false;
  for (size_t wanted = count;; wanted *= 4) {
    look_at_pins();
    // Taken in no order they cost little beside a pass over all pins.
    wanted = any && pins_.last_scan <= kPinsOfAPass ? kParkedAtOnce : std::min(wanted, kTriedAtOnce);
    const Tried tried = try_victims(size_class, count, wanted, any);
    count -= tried.evicted;
    if (count == 0 || tried.looked_at == 0) return;
    // Where nearly all are pinned the rest goes the same way, and its order is not worth what it costs.
    any = tried.parked > tried.looked_at / 4 * 3 && tried.looked_at >= kTriedAtOnce / 4;
    mutex_.give_way();
  }
}

Tried Store::try_victims(std::optional<uint64_t> size_class, size_t count, size_t wanted, bool any) {
  const std::vector<uint32_t> fresh = fresh_records();
  std::vector<uint32_t> kept, victims, tried;
  while (tried.size() < wanted) {
    const uint32_t victim = any ? policy_.pop_any(size_class) : policy_.pop_least(size_class).record;
    if (victim == policy_.kNone) break;
    (std::binary_search(fresh.begin(), fresh.end(), victim) ? kept : tried).push_back(victim);
    index_.prefetch_whole(victim);
  }
  std::vector<uint32_t> held = held_among(tried);
  for (const uint32_t record : held) pins_.asked.add(record);
  for (const uint32_t record : tried) {
    if (pins_.asked.contains(record))
      park(record);
    else
      (!any && victims.size() < count ? victims : kept).push_back(record);
  }
  for (const uint32_t record : held) pins_.asked.remove(record);
  // Each step touches memory that is not in any cache: all misses of a step together.
  for (uint32_t victim : victims) {
    index_.prefetch_erase(victim);
    if (const Extent extent = extent_of(victim); !extent.in_pieces()) arena_.prefetch(extent);
    __builtin_prefetch(&progress_[victim], 1);
  }
  for (uint32_t victim : victims) to_zombie(victim, Event::Evict);
  counters_.evictions += victims.size();
  for (const uint32_t record : kept) policy_.insert(class_of(record), record, worth(record));
  return {tried.size(), held.size(), victims.size()};
}

// Evicts the run of neighbouring pieces, at least `need_bytes` long and free of pins and of blocks being written, whose
// blocks are worth least together, and less than `limit`. A free run counts as worth nothing.
std::optional<Extent> Store::evict_cheapest_run(const std::vector<Arena::Piece>& pieces, uint64_t need_bytes, double limit) {
  const RecordSet& poor = poor_victims();
  std::vector<double> costs;
  for (const Arena::Piece& piece : pieces) {
    double cost = 0;
    std::vector<uint32_t> apart;  // all of such a block goes, for whichever of its pieces, and is counted once here
    for (const uint32_t held : piece.records) {
      const uint32_t record = block_of(held);
      const bool evictable = control(record).state() == State::Sealed && !poor.contains(record);
      if (!evictable) cost = INFINITY;
      if (std::isinf(cost)) break;
      if (record != held)
        apart.push_back(record);
      else
        cost += worth(record) * static_cast<double>(extent_of(record).length);
    }
    std::sort(apart.begin(), apart.end());
    apart.erase(std::unique(apart.begin(), apart.end()), apart.end());
    for (const uint32_t record : apart) cost += worth(record) * static_cast<double>(extent_of(record).length);
    costs.push_back(cost);
  }
  double best = limit;
  std::pair<size_t, size_t> run{0, 0};
  // The window's cost is a sum from its left end to `middle` and one from there on. Not a running difference: scores differ by so
  // many orders of magnitude that it would keep nothing but rounding errors.
  std::vector<double> older;
  double newer = 0;
  size_t begin = 0, middle = 0;
  for (size_t left = 0, right = 0; right < pieces.size(); ++right) {
    if (std::isinf(costs[right])) {
      left = middle = right + 1, newer = 0;
      continue;
    }
    auto length_from = [&](size_t from) { return pieces[right].extent.end() - pieces[from].extent.offset; };
    newer += costs[right];
    while (left < right && length_from(left + 1) >= need_bytes) ++left;
    if (length_from(left) < need_bytes) continue;
    if (left >= middle) {  // all of the older part has left the window: the newer becomes it
      older.assign(right + 1 - left, 0);
      double sum = 0;
      for (size_t i = right + 1; i-- > left;) older[i - left] = sum += costs[i];
      begin = left, middle = right + 1, newer = 0;
    }
    if (const double cost = older[left - begin] + newer; cost < best) best = cost, run = {left, right + 1};
  }
  if (run.second == 0) return std::nullopt;
  for (size_t i = run.first; i < run.second; ++i)
    for (const uint32_t held : pieces[i].records)
      if (const uint32_t record = block_of(held); control(record).state() == State::Sealed) {  // else it has gone already
        to_zombie(record, Event::Evict);
        counters_.evictions += 1;
      }
  return Extent{pieces[run.first].extent.offset, need_bytes};
}

// True if this entry of the heap is about the block that lies in the record now.
bool Store::is_current(const Expiry& entry) const {
  const auto [second, record] = entry;
  const Control now = control(record);
  const bool kept = now.state() == State::Disk && !(now.flags() & kFlagDeleted);  // a deleted one only waits for its file to go
  return (now.state() == State::Sealed || kept) && index_.record(record).expiry_s.load(std::memory_order_relaxed) == second;
}

void Store::set_expiry(uint32_t record, uint32_t second) {
  std::atomic<uint32_t>& ends = index_.record(record).expiry_s;
  if (ends.load(std::memory_order_relaxed) != second) expiries_.changed(record);
  ends.store(second, std::memory_order_relaxed);
}

void Store::remember_expiry(uint32_t record) {
  const uint32_t second = index_.record(record).expiry_s.load(std::memory_order_relaxed);
  if (second == 0) return;
  expiries_.add({second, record}, [this](const Expiry& entry) { return is_current(entry); });
}

void Store::expire() {
  for (Slice slice(kSlice); !expiries_.empty() && expired(expiries_.earliest().second);) {
    if (slice.over()) mutex_.give_way(), scan_zombies(), mutex_.give_way(), slice.again();
    if (expiries_.empty() || !expired(expiries_.earliest().second)) return;  // the lock was given away
    const Expiry entry = expiries_.pop();
    if (!is_current(entry)) continue;
    const uint32_t record = entry.record;
    if (control(record).state() == State::Disk)
      delete_disk_record(record);
    else
      to_zombie(record, Event::Evict);
    counters_.expired += 1;
  }
}

// ---------------------------------------------------------------- the clock, and broken memory

void Store::check_memory() {
  if (fence_.empty() && progress_truncated_.load(std::memory_order_acquire)) fence_ = "a client truncated its progress words";
}

void Store::check_pool() {
  if (fence_.empty() && pool_.truncated()) fence_ = "a client truncated its pool";
  if (!fence_.empty()) throw Error(Code::Fenced, "namespace " + options_.name + " is fenced: " + fence_);
}

int Store::tick() {
  const BuriedSessions::Rites after(buried_);
  const Lock lock(mutex_);
  check_memory();
  if (fence_.empty() && pool_.truncated()) fence_ = "a client truncated its pool";
  end_truncated_sessions();
  mutex_.give_way(), reap_in_slices();
  mutex_.give_way(), expire();
  mutex_.give_way(), scan_zombies(true);
  mutex_.give_way(), unpark(true);
  room_.refused_length = ~0ull;  // whoever does not count the pins it clears waits no longer than this
  mutex_.give_way(), drain_rings(kTouchRing * sessions_.size());
  keep_origin();
  mutex_.give_way();
  const bool on_terms = look_after_terms();
  bool waiting = on_terms || !pins_.zombies.empty() || !pins_.parked.empty();
  for (auto& [id, session] : sessions_) waiting |= session->ended;
  return waiting ? kTickBusyMs : kTickIdleMs;
}

}  // namespace kv
