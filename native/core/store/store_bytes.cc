// Bytes copied in and out for those without shared memory, and the checksums' upkeep. A read in flight counts as a pin; the pool
// is touched only through Pool::read and Pool::write, which answer false where a client has truncated it.

#include <time.h>

#include <algorithm>
#include <cstring>

#include "core/base/atomics.h"
#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/store/pieces.h"
#include "core/store/store.h"

namespace kv {
namespace {
constexpr uint64_t kPiece = 1ull << 20;
constexpr uint64_t kSuspectBytesPerS = 64ull << 20;
constexpr uint64_t kLookUs = 1000;  // at several blocks, where the kernel cannot wait for them together

struct WaitingHere {  // counted before the last look at the record, as in a client's page
  explicit WaitingHere(std::atomic<uint32_t>& count) : count(count) { count.fetch_add(1), fence_full(); }
  ~WaitingHere() { count.fetch_sub(1); }
  std::atomic<uint32_t>& count;
};

timespec in_us(uint64_t us) {
  const uint64_t end_ns = monotonic_ns() + us * 1000;
  return {static_cast<time_t>(end_ns / 1'000'000'000), static_cast<long>(end_ns % 1'000'000'000)};
}
}  // namespace

// Holds a block against reuse while the daemon itself reads it, outside the lock: lets go of it and takes it again.
class SCOPED_CAPABILITY Store::Reading {
 public:
  Reading(Store& store, uint32_t record) RELEASE(store.mutex_)
      : store_(store), block_{record, store.control(record).generation()}, bytes_(store.extent_of(record).length) {
    store_.own_pins_.take(PinOwner::Client, block_, bytes_);
    store_.mutex_.unlock();
  }
  ~Reading() RELEASE() {
    store_.mutex_.lock();
    store_.pins_.gone += 1;
    store_.own_pins_.drop(PinOwner::Client, block_, bytes_);
    store_.scan_zombies(store_.control(block_.record).state() == State::Zombie);
  }
  Reading(const Reading&) = delete;

 private:
  Store& store_;
  const Handle block_;
  const uint64_t bytes_;
};

std::optional<std::vector<uint8_t>> Store::read(const Key& key, uint64_t offset, uint64_t length) {
  const Entry entry(*this);
  Snapshot found;
  if (index_.find(key, found) != Find::Hit || found.control.state() != State::Sealed || expired(found.expiry_s)) {
    counters_.misses += 1;
    return std::nullopt;
  }
  counters_.hits += 1;
  use(found.record, use_now());
  const uint64_t layers = layout_of(found.shape.layout).layers_bytes(found.shape.tokens);
  if (offset > layers)
    throw Error(Code::InvalidArgument,
                "offset is " + std::to_string(offset) + ", the block has " + std::to_string(layers) + " bytes");
  std::vector<uint8_t> out;
  bool good;
  const std::vector<Extent> pieces = pieces_of(found.record);
  {
    Reading reading(*this, found.record);
    out.resize(std::min(length, layers - offset));  // zeroed outside the lock
    good = read_pieces(pool_, pieces, offset, out.data(), out.size());
  }
  if (!good) check_pool();
  if (!good) throw Error(Code::Fenced, "the pool's memory cannot be read");
  return out;
}

std::optional<std::vector<uint8_t>> Store::read_at(Handle handle, uint64_t offset, uint64_t length) {
  const Entry entry(*this);
  if (handle.record >= index_.max_blocks()) throw Error(Code::InvalidArgument, "no such block");
  const Control now = control(handle.record);
  if (now.generation() != handle.generation || (now.state() != State::Created && now.state() != State::Sealed))
    return std::nullopt;
  const Shape shape = shape_of(handle.record);
  const uint64_t layers = layout_of(shape.layout).layers_bytes(shape.tokens);
  if (offset > layers)
    throw Error(Code::InvalidArgument,
                "offset is " + std::to_string(offset) + ", the block has " + std::to_string(layers) + " bytes");
  const std::vector<Extent> pieces = pieces_of(handle.record);
  std::vector<uint8_t> out;
  bool good;
  {
    Reading reading(*this, handle.record);
    out.resize(std::min(length, layers - offset));
    good = read_pieces(pool_, pieces, offset, out.data(), out.size());
  }
  if (!good) check_pool();
  if (!good) throw Error(Code::Fenced, "the pool's memory cannot be read");
  // A quarantined writer may have changed the bytes under the copy.
  if (control(handle.record).generation() != handle.generation) return std::nullopt;
  return out;
}

// The word before the record: what changes behind that load wakes who sleeps on it. The record decides, the word only hints.
LayersNow Store::layers_now(Handle handle) {
  if (handle.record >= index_.max_blocks()) throw Error(Code::InvalidArgument, "no such block");
  const uint64_t word = progress_[handle.record].load(std::memory_order_acquire);
  const Entry entry(*this);
  const Control now = control(handle.record);
  if (now.generation() != handle.generation || (now.state() != State::Created && now.state() != State::Sealed))
    throw Error(Code::BlockLost, "its writer gave the block up");
  const uint32_t limit = layout_of(shape_of(handle.record).layout).num_layers();
  const bool sealed = now.state() == State::Sealed;
  const uint32_t ready = progress_generation(word) == handle.generation ? std::min(progress_layers(word), limit) : 0;
  return {sealed ? limit : ready, sealed, word};
}

uint32_t Store::wait_layers(Handle handle, uint32_t layers, uint32_t timeout_ms) {
  const timespec deadline = in_us(uint64_t{timeout_ms} * 1000);
  const WaitingHere waiting(waiting_here_);
  for (;;) {
    const LayersNow now = layers_now(handle);
    if (now.sealed || now.layers >= layers || passed(deadline)) return now.layers;
    futex_wait(progress_[handle.record], static_cast<uint32_t>(now.word), deadline);
  }
}

void Store::wait_any(std::span<const Awaited> blocks, uint64_t timeout_us) {
  const timespec deadline = in_us(timeout_us);
  const WaitingHere waiting(waiting_here_);
  std::vector<FutexWord> words;
  words.reserve(blocks.size());
  for (const Awaited& block : blocks) {
    const LayersNow now = layers_now(block.handle);
    if (now.sealed || now.layers > block.layers) return;
    words.push_back({static_cast<uint32_t>(now.word), reinterpret_cast<uint64_t>(futex_word(progress_[block.handle.record]))});
  }
  if (!words.empty() && futex_wait_any(words, deadline)) return;
  const timespec soon = in_us(words.empty() ? timeout_us : std::min(timeout_us, kLookUs));
  ::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &soon, nullptr);
}

void Store::write(Handle handle, uint64_t offset, std::span<const uint8_t> data) {
  const Entry entry(*this);
  if (handle.record >= index_.max_blocks()) throw Error(Code::InvalidArgument, "no such block");
  const Control now = control(handle.record);
  if (now.generation() != handle.generation || now.state() != State::Created)
    throw Error(Code::BlockLost, "the block is not being written");
  const Shape shape = shape_of(handle.record);
  const Layout& layout = layout_of(shape.layout);
  const uint64_t limit = layout.meta_offset(shape.tokens) + layout.meta_bytes(shape.tokens);
  if (offset > limit || data.size() > limit - offset)
    throw Error(Code::InvalidArgument, "bytes " + std::to_string(offset) + " to " + std::to_string(offset + data.size()) +
                                           " of a block of " + std::to_string(limit));
  // Its owner is inside this process and does not seal or abort while it writes: the extent stays.
  const uint64_t at = extent_of(handle.record).offset + offset;
  bool good;
  {
    Reading writing(*this, handle.record);
    good = pool_.write(at, data.data(), data.size());
  }
  if (!good) check_pool();
  if (!good) throw Error(Code::Fenced, "the pool's memory cannot be written");
}

// The checksums of a block's layers as its bytes are now. Empty if they cannot be read. Called without the lock.
std::vector<uint32_t> Store::layer_checksums(const Layout& layout, std::span<const Extent> pieces, uint32_t tokens) const {
  std::vector<uint32_t> sums(layout.num_layers());
  std::vector<uint8_t> buffer(kPiece);
  for (uint32_t layer = 0; layer < sums.size(); ++layer) {
    const uint64_t begin = layout.layer_offset(layer, tokens);
    const uint64_t bytes = layout.layer_bytes(layer, tokens);
    for (uint64_t done = 0; done < bytes;) {
      const uint64_t piece = std::min(kPiece, bytes - done);
      if (!read_pieces(pool_, pieces, begin + done, buffer.data(), piece)) return {};
      sums[layer] = crc32c(buffer.data(), piece, sums[layer]);
      done += piece;
    }
  }
  return sums;
}

struct Store::Verdict {
  uint64_t bytes;
  bool known, corrupt;  // there were checksums to compare with; they did not match
};

// Under the lock, and not behind the back of a write that has begun: the file's header has a checksum of these bytes. False: the
// pool's memory is gone.
bool Store::put_checksums(uint32_t record, std::span<const uint32_t> sums) {
  if (control(record).flags() & (kFlagQueued | kFlagChecksummed)) return true;
  const Shape shape = shape_of(record);
  const uint64_t where = layout_of(shape.layout).checksums_offset(shape.tokens);
  if (!write_pieces(pool_, pieces_of(record), where, sums.data(), 4 * sums.size())) return false;
  set_flags(record, kFlagChecksummed, 0);
  return true;
}

void Store::keep_checksums(Handle block, std::span<const uint32_t> sums) {
  const Entry entry(*this);
  const Control now = control(block.record);
  if (now.generation() != block.generation || now.state() != State::Sealed) return;
  KV_INVARIANT(sums.size() == layout_of(shape_of(block.record).layout).num_layers());
  if (!put_checksums(block.record, sums)) check_pool();
}

// Verifies a sealed block, or computes its checksums where the writer did not; drops it if its bytes do not match. The lock is
// let go meanwhile.
Store::Verdict Store::verify_one(uint32_t record) {
  const Control before = control(record);
  const Shape shape = shape_of(record);
  const std::vector<Extent> pieces = pieces_of(record);
  const Layout layout = layout_of(shape.layout);
  const uint64_t where = layout.checksums_offset(shape.tokens);
  const bool known = before.flags() & kFlagChecksummed;
  bool good = true;
  std::vector<uint32_t> sums;
  {
    Reading reading(*this, record);
    sums = layer_checksums(layout, pieces, shape.tokens);
    std::vector<uint32_t> stored(sums.size());
    if (sums.empty())
      good = false;
    else if (known)
      good = read_pieces(pool_, pieces, where, stored.data(), 4 * stored.size()) && stored == sums;
  }
  const Verdict verdict{layout.layers_bytes(shape.tokens), known, false};
  if (control(record).generation() != before.generation()) return verdict;  // it went meanwhile
  if (good && !known) good = put_checksums(record, sums);
  if (good) return verdict;
  check_pool();
  to_zombie(record, Event::Delete);  // and with it the file: every tier forgets it
  counters_.corrupt += 1;
  return {verdict.bytes, known, true};
}

ScrubResult Store::scrub(uint32_t from, uint64_t limit_bytes) {
  ScrubResult result{.next = from};
  const Entry entry(*this);
  while (result.bytes < limit_bytes) {
    if (result.next >= index_.max_blocks()) {
      result.done = true;
      return result;
    }
    const uint32_t record = result.next++;
    const Control now = control(record);
    // A block on its way to disk is passed over this time: its file says what is behind its layers.
    if (now.state() != State::Sealed || (!(now.flags() & kFlagChecksummed) && now.flags() & kFlagQueued)) continue;
    const Verdict verdict = verify_one(record);
    result.bytes += verdict.bytes;
    (verdict.known ? result.verified : result.computed) += 1;
    result.corrupt += verdict.corrupt;
    if (verdict.corrupt) scan_zombies();
  }
  return result;
}

// A client found a block's checksums wrong. It is not believed: this looks itself. At most so many bytes a second, because it is
// the session thread that looks, and others wait for it; what is more is left to `scrub`.
bool Store::drop_if_corrupt(const Key& key) {
  const Entry entry(*this);
  const uint32_t record = index_.find_exclusive(key);
  if (record == Index::kAbsent || control(record).state() != State::Sealed || !(control(record).flags() & kFlagChecksummed))
    return false;
  const auto second = static_cast<uint64_t>(::time(nullptr));
  if (std::exchange(suspects_.second, second) != second) suspects_.bytes = 0;
  if (suspects_.bytes > kSuspectBytesPerS) return false;
  const Verdict verdict = verify_one(record);
  suspects_.bytes += verdict.bytes;
  return verdict.corrupt;
}

}  // namespace kv
