// Pins as the store sees them: whose memory must wait, and which blocks are poor victims.
//
// Every word that a client pinned is read where it decides (scan_zombies, held_among): one pass over the pages, compared with a
// set of bits, so that a pin costs a nanosecond and only a match costs more. Blocks found pinned leave the eviction queue
// (parked) and come back when pins have gone. How many went is a client's word, a hint: who does not count delays the return of
// what it held until the next tick, and no memory is reused on it.
//
// Invariant: a SEALED record is in its eviction queue or parked, never both; no other record is in either.

#include <algorithm>

#include "core/base/atomics.h"
#include "core/base/polling.h"
#include "core/store/each_pin.h"

namespace kv {
namespace {

constexpr uint64_t kPinsPerRelease = 16;  // a pass over so many pins is worth one that has gone
constexpr uint64_t kPinsPerBlock = 128;   // a scan of so many pins makes room for one block more than was asked for
constexpr uint64_t kSessionWords = 16;    // what a session costs a scan beside its pins, in pins
constexpr uint64_t kScanDivisor = 128;    // never more than this part of the pool
constexpr uint64_t kFewPins = 4096;       // so many are always looked at anew
constexpr size_t kUnparkedAtOnce = 8192;
constexpr uint64_t kManyPins = 1 << 16;       // a pass over more gives way in between
constexpr uint64_t kSnapshotWorth = 16;       // a snapshot serves so many times as long as it took,
constexpr uint64_t kSnapshotNs = 50'000'000;  // and no longer than this

}  // namespace

// How many pins have gone, as far as their owners say, and how many went for other reasons. Only ever compared.
uint64_t Store::releases() const {
  uint64_t sum = pins_.gone;
  for (auto& [id, session] : sessions_)
    if (session->file) sum += session->file->page().released.load(std::memory_order_acquire);
  return sum;
}

bool Store::worth_a_scan(uint64_t before, uint64_t now) const { return (now - before) > pins_.last_scan / kPinsPerRelease; }

// How many words a pass over all pins reads.
uint64_t Store::pin_words() const {
  uint64_t sum = 0;
  for (auto& [id, session] : sessions_)
    if (session->file) sum += session->file->pin_words(session->allowance.slots).size();
  return sum;
}

// The fence stands between the change of the generations and the reading of the pins. Its counterpart is the reader's,
// between the writing of its pins and the reading of the generations.
//
// What was found pinned before stands first and is looked at again once enough pins have gone, or if `all`. In slices where there
// are many pins: nobody can pin what is a zombie already, so a pin that is seen at no time is gone, and what became a zombie
// meanwhile waits for the next scan. Who calls this must not rely on what it found before.
void Store::scan_zombies(bool all) {
  if (pins_.zombies.empty()) return;
  const uint64_t gone = pins_.held_zombies ? releases() : 0;  // before the pins: what goes meanwhile is seen the next time
  const size_t from = all || worth_a_scan(pins_.zombies_scanned_at, gone) ? 0 : pins_.held_zombies;
  if (from == pins_.zombies.size()) return;
  const uint32_t scan = pins_.scans++;
  const uint64_t undisturbed = mutex_.gave_way();
  RecordSet asked = pins_.lend();
  for (size_t i = from; i < pins_.zombies.size(); ++i) asked.add(pins_.zombies[i].record);
  fence_full();
  uint64_t pins = 0;
  Slice slice(kSlice);
  each_pin_in_slices(slice, [&, bits = asked.bits()](uint32_t record, uint64_t generation, uint32_t pages) REQUIRES(mutex_) {
    ++pins;
    if (!RecordSet::has(bits, record)) return;
    const Control now = control(record);
    if (generation + (now.flags() & kFlagQuarantined ? 2 : 1) != now.generation() || !honoured(record, pages)) return;
    asked.remove(record);
  });
  pins_.read += pins_.last_scan = pins;
  if (from == 0) pins_.held_zombies = 0, pins_.zombies_scanned_at = gone;
  // What another scan freed meanwhile, and became a zombie again, is younger than this one. What another found held stands first
  // and stays there: it is more than stood there when this one began, or fewer.
  for (size_t at = std::max(from, pins_.held_zombies); at < pins_.zombies.size();) {
    if (slice.over()) {
      mutex_.give_way(), slice.again();
      at = std::max(at, pins_.held_zombies);
      continue;
    }
    const auto [record, since] = pins_.zombies[at];
    if (static_cast<int32_t>(since - scan) > 0) {
      ++at;
    } else if (asked.contains(record)) {
      if (!free_zombie(record, slice)) {
        mutex_.give_way(), slice.again();
        at = std::max(at, pins_.held_zombies);
        continue;  // with what is left of it, unless another scan took that, or has it at another place
      }
      asked.remove(record);
      pins_.remove_zombie(at);
    } else {
      std::swap(pins_.zombies[at++], pins_.zombies[pins_.held_zombies++]);
    }
  }
  if (mutex_.gave_way() == undisturbed) pins_.spare = std::move(asked);  // else another scan may have freed what is in it
}

// Of these sealed records the ones whose block is pinned at this moment; of few among very many pins, those that were lately.
std::vector<uint32_t> Store::held_among(std::span<const uint32_t> records) {
  if (records.empty()) return {};
  // So few are not worth a pass, and so many pins are not read at once: the snapshot, and the last scan decides.
  if (records.size() < pins_.last_scan / kPinsPerBlock || pins_.last_scan > kManyPins) {
    const RecordSet& poor = poor_victims();
    std::vector<uint32_t> held;
    for (const uint32_t record : records)
      if (poor.contains(record)) held.push_back(record);
    return held;
  }
  for (const uint32_t record : records) pins_.asked.add(record);
  std::vector<uint32_t> held;
  uint64_t pins = 0;
  each_pin([&, bits = pins_.asked.bits()](uint32_t record, uint64_t generation, uint32_t pages) REQUIRES(mutex_) {
    ++pins;
    if (!RecordSet::has(bits, record) || control(record).generation() != generation || !honoured(record, pages)) return;
    pins_.asked.remove(record);
    held.push_back(record);
  });
  for (const uint32_t record : records) pins_.asked.remove(record);
  pins_.read += pins_.last_scan = pins;
  return held;
}

bool Store::is_held(std::span<const Handle> blocks) {
  const Lock lock(mutex_);
  fence_full();
  bool held = false;
  Slice slice(kSlice);
  each_pin_in_slices(slice, [&](uint32_t record, uint64_t generation, uint32_t pages) REQUIRES(mutex_) {
    held |= std::ranges::find(blocks, Handle{record, generation}) != blocks.end() && honoured(record, pages);
  });
  return held;
}

// Blocks that were loaded for somebody who has had no time to pin them.
std::vector<uint32_t> Store::fresh_records() {
  std::vector<uint32_t> out;
  for (const auto& fresh : fresh_.at(monotonic_ns()))
    if (control(fresh.block.record).generation() == fresh.block.generation) out.push_back(fresh.block.record);
  std::sort(out.begin(), out.end());
  return out;
}

// All poor victims: pinned, or fresh. Where there are many pins it is reused for a while: a block pinned since is a poor choice
// and no wrong one, because its memory waits for scan_zombies(). Very many are read by look_at_pins() alone.
const RecordSet& Store::poor_victims() {
  const uint64_t begin = monotonic_ns();
  if (begin < pins_.poor_until_ns || pins_.last_scan > kManyPins) return pins_.poor;
  pins_.poor.clear();
  uint64_t pins = 0;
  each_pin([&](uint32_t record, uint64_t generation, uint32_t pages) REQUIRES(mutex_) {
    ++pins;
    if (!pins_.poor.contains(record) && control(record).generation() == generation && honoured(record, pages))
      pins_.poor.add(record);
  });
  for (const uint32_t record : fresh_records()) pins_.poor.add(record);
  pins_.read += pins;
  const uint64_t end = monotonic_ns();
  pins_.poor_until_ns = pins > kFewPins ? end + kSnapshotWorth * (end - begin) : 0;
  return pins_.poor;
}

// Makes that snapshot in slices where there are so many pins that nobody may wait for a pass over them.
void Store::look_at_pins() {
  const uint64_t words = pin_words();
  if (words <= kManyPins) {
    if (pins_.last_scan > kManyPins) pins_.last_scan = words;
    return;
  }
  pins_.last_scan = words;
  const uint64_t begin = monotonic_ns();
  if (begin < pins_.poor_until_ns) return;
  RecordSet poor;
  poor.resize(index_.max_blocks());
  uint64_t pins = 0;
  Slice slice(kSlice);
  each_pin_in_slices(slice, [&](uint32_t record, uint64_t generation, uint32_t pages) REQUIRES(mutex_) {
    ++pins;
    if (!poor.contains(record) && control(record).generation() == generation && honoured(record, pages)) poor.add(record);
  });
  for (const uint32_t record : fresh_records()) poor.add(record);
  pins_.poor = std::move(poor);
  pins_.read += pins_.last_scan = pins;
  const uint64_t end = monotonic_ns();
  pins_.poor_until_ns = end + std::min(kSnapshotWorth * (end - begin), kSnapshotNs);
}

// ---------------------------------------------------------------- parked blocks

bool Store::is_parked(uint32_t record) const {
  return places_[record] < pins_.parked.size() && pins_.parked[places_[record]] == record;
}

void Store::park(uint32_t record) {
  places_[record] = static_cast<uint32_t>(pins_.parked.size());
  pins_.parked.push_back(record);
}

void Store::leave_parking(uint32_t record) {
  const uint32_t place = places_[record], last = pins_.parked.back();
  pins_.parked[place] = last;
  places_[last] = place;
  pins_.parked.pop_back();
}

// Of the parked records those whose block is pinned, of some moment or other in between: nothing but what is worth a try rests on
// it. In slices.
void Store::mark_held(RecordSet& held, Slice& slice) {
  RecordSet parked;  // as held_among(): a bit is nearer than a record
  parked.resize(index_.max_blocks());
  for (size_t place = 0; place < pins_.parked.size(); ++place) {
    parked.add(pins_.parked[place]);
    if (slice.over()) mutex_.give_way(), slice.again();
  }
  uint64_t pins = 0;
  each_pin_in_slices(slice, [&](uint32_t record, uint64_t generation, uint32_t pages) REQUIRES(mutex_) {
    ++pins;
    if (parked.contains(record) && control(record).generation() == generation && honoured(record, pages)) held.add(record);
  });
  pins_.read += pins_.last_scan = pins;
}

// Those whose pins have gone are victims again. Looked at once enough pins have gone, or if `all`. In slices.
void Store::unpark(bool all) {
  if (pins_.parked.empty()) return;
  const uint64_t gone = releases();
  if (!all && !worth_a_scan(pins_.parked_scanned_at, gone)) return;
  pins_.parked_scanned_at = gone;
  RecordSet held;
  held.resize(index_.max_blocks());
  Slice slice(kUnparkedAtOnce, 64);
  mark_held(held, slice);
  // What is parked meanwhile comes back to the queue, and is parked again when it is tried.
  for (size_t place = 0; place < pins_.parked.size();) {
    if (slice.over()) mutex_.give_way(), slice.again();
    if (place >= pins_.parked.size()) break;
    const uint32_t record = pins_.parked[place];
    if (held.contains(record))
      ++place;
    else
      leave_parking(record), policy_.insert(class_of(record), record, worth(record));
  }
}

// Where there are many pins, a scan makes room for more than was asked for: what it costs is shared by the creates that follow.
size_t Store::room_for_more(uint64_t length) const {
  const uint64_t words = pins_.last_scan + kSessionWords * sessions_.size();
  return std::min({words / kPinsPerBlock, pool_.capacity() / kScanDivisor / std::max<uint64_t>(length, 1),
                   uint64_t{index_.max_blocks()} / kScanDivisor});
}

}  // namespace kv
