// What is asked by key: look up, delete, touch; and the namespace as a whole: flush, drain.

#include <time.h>

#include "core/base/error.h"
#include "core/store/store.h"

namespace kv {

Found Store::lookup(const Key& key) {
  const Entry entry(*this);
  Found out;
  if (index_.find(key, out.snapshot) != Find::Hit) return out;
  const State state = out.snapshot.control.state();
  if (state == State::Created) out.presence = Presence::Pending;
  if (state == State::Disk && !expired(out.snapshot.expiry_s)) out.presence = Presence::OnDisk;
  if (state == State::Sealed && !expired(out.snapshot.expiry_s)) out.presence = Presence::Resident;
  return out;
}

// Below first: from then on no load of it begins, and a write that is on its way comes to nothing.
bool Store::remove(const Key& key) {
  LowerTier* lower = this->lower();
  using enum LowerTier::Below;
  auto below = lower ? lower->forget(key) : Nothing;
  const bool here = remove_here(key);
  while (here && lower && lower->forget(key) == Known) {  // it was written between the two
    below = Known;
    remove_here(key);  // and may have been loaded from there
  }
  if (below != Nothing) remember_unknown(key, below == Known);
  return here || below == Known;
}

bool Store::remove_here(const Key& key) {
  const Entry entry(*this);
  const uint32_t record = index_.find_exclusive(key);
  if (record == Index::kAbsent) return false;
  const State state = control(record).state();
  if (state != State::Sealed && state != State::Disk) return false;
  const bool late = expired(index_.record(record).expiry_s.load(std::memory_order_relaxed));
  if (state == State::Disk) {
    delete_disk_record(record);
  } else {
    to_zombie(record, late ? Event::Evict : Event::Delete);
  }
  (late ? counters_.expired : counters_.deletes) += 1;
  return !late;
}

std::vector<bool> Store::touch(std::span<const Key> keys) {
  const Entry entry(*this);
  double now = use_now();
  std::vector<bool> out;
  Slice slice(kSlice);
  for (const Key& key : keys) {
    if (slice.over()) mutex_.give_way(), slice.again(), now = std::min(now, clock_.value);  // all scores may have been divided
    const uint32_t record = index_.find_exclusive(key);
    out.push_back(record != Index::kAbsent && control(record).state() == State::Sealed &&
                  !expired(index_.record(record).expiry_s.load(std::memory_order_relaxed)));
    if (out.back()) use(record, now);
  }
  return out;
}

// What is put meanwhile may go or stay.
uint64_t Store::flush() {
  LowerTier* lower = this->lower();
  if (lower) lower->forget_all();
  uint64_t count = 0;
  {
    const Entry entry(*this);
    Slice slice(kSlice);
    const auto deleted = [&]() REQUIRES(mutex_) {
      counters_.deletes += 1, count += 1;
      if (slice.over()) mutex_.give_way(), scan_zombies(), mutex_.give_way(), slice.again();
    };
    for (uint32_t record = 0; record < index_.max_blocks(); ++record) {
      if (control(record).state() == State::Sealed) to_zombie(record, Event::Delete), deleted();
      if (record % (64 * kSlice) == 64 * kSlice - 1) mutex_.give_way();
    }
    while (disk_.blocks.size()) delete_disk_record(disk_.blocks.least().record), deleted();
    disk_.deleted.all = true;
    wake_disk();
  }
  if (lower) lower->remember_flush();
  return count;
}

void Store::settle() {
  const Lock lock(mutex_);
  scan_zombies();
}

void Store::drain(bool on) {
  const Lock lock(mutex_);
  draining_ = on;
}

}  // namespace kv
