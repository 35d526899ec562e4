// A file into memory. First its header with the beginning of its bytes, then the rest in pieces at once. They are read into
// buffers; each layer is copied from there and verified on the way as soon as it and all before it are there, and published, so
// that a reader that follows the block starts while the rest is still being read. In a pool of huge pages the pieces behind the
// first are read where they belong and verified there. So nothing that was not verified is ever in a sealed block.

#include <time.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/disk/tier_steps.h"

namespace kv {
namespace {

constexpr size_t kFewLoads = 4;    // this many in any case, so that the device always has work
constexpr size_t kManyLoads = 16;  // and more of small blocks
constexpr uint64_t kBytesInFlight = 16ull << 20;
constexpr size_t kMaxInVain = 4096;
constexpr uint64_t kInVainMs = 250;  // a load that failed for want of memory is not tried again at once

uint32_t realtime_s() { return static_cast<uint32_t>(::time(nullptr)); }

}  // namespace

// The next one that waits for a directory. False if none does.
bool DiskTier::take_load(uint8_t directory, Load& load) {
  std::lock_guard lock(mutex_);
  for (Queue& queue = queues_[directory]; !queue.empty();) {
    load.key = queue.begin()->second.key;
    load.waiting_bytes = queue.begin()->second.bytes;
    queue.erase(queue.begin());
    queued_.erase(load.key);
    // Not what was deleted since: its file may still be there. Nor what was deleted while it was being loaded, and wanted again.
    if (!deleted(load.key, index_.find(load.key)) && loading_.insert(load.key).second) return true;
    waiting_bytes_.fetch_sub(load.waiting_bytes, std::memory_order_relaxed);
  }
  return false;
}

void DiskTier::start_loads(uint8_t directory) {
  const Volume& volume = volumes_[directory];
  while (volume.reads.empty() && !stop_.load() && answers(directory) &&
         (volume.loads < kFewLoads || (volume.loads < kManyLoads && volume.load_bytes < kBytesInFlight))) {
    auto load = std::make_unique<Load>();
    if (!take_load(directory, *load)) return;
    load->begun_ns = monotonic_ns();
    if (loads_.empty()) speed_.tell(load->begun_ns, true);
    for (auto& [key, other] : loads_) other->alone = load->alone = false;
    Load& started = *load;
    loads_.emplace(started.key, std::move(load));
    started.fd = open_file(started.key, &started.directory, &started.file_bytes);
    volumes_[started.directory].loads += 1, volumes_[started.directory].load_bytes += started.file_bytes;
    if (started.fd == -ENOENT || started.fd == -ELOOP || started.fd == -ENXIO) {
      end_load(started, Outcome::Missing);
    } else if (started.fd < 0) {
      if (started.fd != -EAGAIN)  // somebody has a lease on that file, which says nothing of the directory
        went_wrong(started.directory, -started.fd, false, "opening a file");
      end_load(started, Outcome::Failed);
    } else if (started.file_bytes <= kBlockFileHeaderBytes || started.file_bytes % kPageBytes) {
      end_load(started, Outcome::Corrupt);
    } else {
      read_first(started);
    }
  }
}

// A descriptor, or -errno. Before the directories are listed a file may be in any of them; its home is the likeliest.
int DiskTier::open_file(const Key& key, uint8_t* directory, uint64_t* bytes) {
  const std::string path = path_of(key, fanout_);
  bool known;
  {
    std::lock_guard lock(mutex_);
    const FileIndex::Entry* entry = index_.find(key);
    known = entry != nullptr;
    *directory = known ? entry->directory : home(key);
  }
  int fd = volumes_[*directory].at.files->open_read(path, bytes);
  for (uint8_t d = 0; !known && fd == -ENOENT && d < volumes_.size(); ++d)
    if (fd = volumes_[d].at.files->open_read(path, bytes); fd != -ENOENT) *directory = d;
  const uint32_t flushed_s = flushed_s_.load();
  if (known || fd < 0 || !flushed_s) return fd;
  Files& files = *volumes_[*directory].at.files;
  if (files.written_s(fd, 0) > flushed_s) return fd;
  files.close(fd);
  return -ENOENT;
}

// A pool of huge pages is as few pieces for the device as a buffer.
void DiskTier::read_in_place(Load& load, Step& step) {
  if (!huge_pool_) return;
  step.in_place = true;
  step.buffer = pool_.data() + load.extent.offset + (step.transfer.offset - kBlockFileHeaderBytes);
  step.transfer.parts[0].iov_base = step.buffer;
}

DiskTier::Step& DiskTier::plan_read(Load& load, uint64_t from, uint64_t to) {
  Step& step = load.steps.emplace_back();
  step.load = &load;
  step.transfer.fd = load.fd;
  step.transfer.offset = from;
  step.transfer.parts[0].iov_len = to - from;
  step.transfer.count = 1;
  load.in_flight += 1;
  return step;
}

// The header and, in the same piece, as much as is no multiple of a piece, so that the last one is whole: what is behind the
// layers is in it.
void DiskTier::read_first(Load& load) {
  const uint64_t data = load.file_bytes - kBlockFileHeaderBytes;
  submit(plan_read(load, 0, kBlockFileHeaderBytes + (data - 1) % Staging::kPieceBytes + 1), load.directory);
}

// The rest, once the header said how much of the file is believed. The last piece first: who follows the block wants its token
// ids before its first layer.
void DiskTier::read_rest(Load& load) {
  for (uint64_t at = load.steps.front().transfer.bytes(); at < load.file_bytes; at += Staging::kPieceBytes)
    read_in_place(load, plan_read(load, at, at + Staging::kPieceBytes));
  if (load.steps.size() == 1) return;
  submit(load.steps.back(), load.directory);
  for (auto step = std::next(load.steps.begin()); &*step != &load.steps.back(); ++step) submit(*step, load.directory);
}

void DiskTier::load_step_done(Step& step) {
  Load& load = *step.load;
  load.in_flight -= 1;
  step.done = true;
  const auto wanted = static_cast<int64_t>(step.transfer.bytes());
  if (step.transfer.result < 0) {
    load.wrong = step.transfer.result == -ECANCELED ? Outcome::Cancelled : Outcome::Failed;
    if (load.wrong == Outcome::Failed && step.transfer.result != -EFAULT)  // of the pool, not of the disk
      went_wrong(load.directory, static_cast<int>(-step.transfer.result), false, "reading a file");
  } else if (step.transfer.result != wanted && load.wrong == Outcome::Loaded) {
    load.wrong = Outcome::Corrupt;  // shorter than it was when it was opened
  }
  if (load.wrong == Outcome::Loaded && !load.header && stop_.load()) load.wrong = Outcome::Cancelled;  // the rest would take long
  if (load.wrong == Outcome::Loaded && !load.header && take_header(load) && take_memory(load)) read_rest(load);
  if (load.wrong == Outcome::Loaded) take_in(load);
  if (load.wrong != Outcome::Loaded)
    for (Step& each : load.steps)
      if (each.done) give_back(load, each);
  if (load.in_flight) return;
  if (load.wrong == Outcome::Loaded) finish_data(load);
  end_load(load, load.wrong);
}

// Believes the header, or says in load.wrong why not.
bool DiskTier::take_header(Load& load) {
  std::memcpy(load.page->bytes, load.steps.front().buffer, kBlockFileHeaderBytes);
  const Decoded decoded = decode(std::span<const std::byte, kBlockFileHeaderBytes>(load.page->bytes), load.file_bytes);
  if (!decoded) return load.wrong = Outcome::Corrupt, false;
  load.layout = store_.find_layout(decoded.header->layout);
  if (!load.layout) {
    // A block of a model that nobody registered here. Whoever asked for this key has registered another.
    load.wrong = decoded.header->key == load.key ? Outcome::Unknown : Outcome::Corrupt;
    return false;
  }
  if (!mismatch(*decoded.header, load.key, load.layout->layout, load.layout->digest, Key{}).empty())
    return load.wrong = Outcome::Corrupt, false;
  const uint32_t expiry_s = decoded.header->expiry_s, now_s = realtime_s();  // once: at the next second nothing may be left
  if (expiry_s && expiry_s <= now_s) return load.wrong = Outcome::Expired, false;
  load.ttl_s = expiry_s ? expiry_s - now_s : 0;
  load.header = decoded.header;
  load.tokens = load.header->tokens;
  std::lock_guard lock(mutex_);
  if (FileIndex::Entry* entry = index_.find(load.key)) entry->expiry_s = load.header->expiry_s, entry->tokens = load.tokens;
  return true;
}

// Memory for the block. False if there is none, or the block is in memory by now.
bool DiskTier::take_memory(Load& load) {
  const FileHeader& h = *load.header;
  const CreateItem item{h.key, h.fingerprint, h.tokens, h.base_position, h.parent};
  Granted granted;
  try {
    granted = store_.create({owner_, load.layout->id, std::min(h.priority, kMaxPriority), load.ttl_s, {&item, 1}, true})[0];
  } catch (const Error&) {  // fenced, or not a block this pool can hold
    return load.wrong = Outcome::Failed, false;
  }
  if (granted.status != Grant::Granted) {
    load.wrong = granted.status == Grant::NoSpace ? Outcome::NoSpace : Outcome::Needless;
    return false;
  }
  load.created = true;
  load.handle = granted.handle, load.extent = granted.extent;
  fault_in(load.extent);
  // Who follows the block finds it from here on; all of a short one is there and about to be sealed.
  if (load.file_bytes > load.steps.front().transfer.bytes()) store_.load_ended();
  return true;
}

// What arrived, as far as its place in the file lets it: the layers in their order, so that who follows the block starts while
// the rest is still being read; what is behind them before the first.
void DiskTier::take_in(Load& load) {
  const uint32_t before = load.layers_taken;
  const bool tail_before = load.tail_taken;
  if (load.steps.back().done && !load.tail_taken && !take_tail(load, load.steps.back())) return (void)(load.wrong = differing());
  for (Step& step : load.steps) {
    if (!step.done) break;
    if (!step.buffer) continue;
    if (!take_layers(load, step)) return (void)(load.wrong = differing());
    give_back(load, step);
  }
  if (pool_hit_.load()) return (void)(load.wrong = Outcome::Failed);
  const bool whole = load.layers_taken == load.layout->layout.num_layers();  // the seal tells of the last layer
  if (load.tail_taken && !whole && load.layers_taken > (tail_before ? before : 0) &&
      !accepted([&] { store_.mark_layer(load.handle, load.layers_taken); }))
    load.wrong = Outcome::Failed;
}

// What it means that bytes do not match. Those of a pool that a client cut under us are no file's.
DiskTier::Outcome DiskTier::differing() const { return pool_hit_.load() ? Outcome::Failed : Outcome::Corrupt; }

// What is behind the layers, where it is whole in the last piece. False if it does not match.
bool DiskTier::take_tail(Load& load, const Step& last) {
  const uint64_t tail = load.layout->layout.layers_bytes(load.tokens);
  const uint64_t in_file = kBlockFileHeaderBytes + tail;
  if (last.transfer.offset > in_file) return true;  // with the layers, in their order
  const std::byte* bytes = last.buffer + (in_file - last.transfer.offset);
  if (!tail_matches(*load.header, bytes)) return false;
  if (!last.in_place) std::memcpy(pool_.data() + load.extent.offset + tail, bytes, load.header->data_bytes - tail);
  return load.tail_taken = true;
}

// The piece's part of each layer, copied and summed up in one pass, and of what is behind them if that was not taken yet. False
// if one that ends here does not match.
bool DiskTier::take_layers(Load& load, const Step& step) {
  const Layout& layout = load.layout->layout;
  const uint64_t skip = step.transfer.offset == 0 ? kBlockFileHeaderBytes : 0;
  const uint64_t begin = load.taken_bytes, end = begin + step.transfer.bytes() - skip;
  const std::byte* from = step.buffer + skip;
  std::byte* to = pool_.data() + load.extent.offset + begin;
  for (uint64_t at = begin; at < end;) {
    const uint32_t layer = load.layers_taken;
    const bool in_tail = layer == layout.num_layers();
    const uint64_t starts = layout.layer_offset(layer, load.tokens);
    if (in_tail && at >= starts && load.tail_taken) break;
    const uint64_t ends = in_tail ? load.header->data_bytes : starts + layout.layer_bytes(layer, load.tokens);
    const uint64_t until = std::min(at < starts ? starts : ends, end);
    if (step.in_place)
      load.crc = at < starts ? 0 : crc32c(to + (at - begin), until - at, load.crc);
    else if (at < starts)  // padding
      std::memcpy(to + (at - begin), from + (at - begin), until - at);
    else
      load.crc = crc32c_stream(to + (at - begin), from + (at - begin), until - at, load.crc);
    at = until;
    if (at < ends) continue;
    if (std::exchange(load.crc, 0) != (in_tail ? load.header->tail_checksum : load.header->layer_checksums[layer])) return false;
    load.layers_taken += !in_tail;
    load.tail_taken |= in_tail;
  }
  load.taken_bytes = end;
  return true;
}

void DiskTier::give_back(Load& load, Step& step) {
  if (step.buffer && !step.in_place) volumes_[load.directory].staging.give(step.buffer);
  step.buffer = nullptr;
}

// All is there and verified: the checksums that the header has go where a client looks for them, and the block is sealed.
void DiskTier::finish_data(Load& load) {
  const Layout& layout = load.layout->layout;
  std::byte* block = pool_.data() + load.extent.offset;
  KV_INVARIANT(load.tail_taken && load.layers_taken == layout.num_layers());
  std::memcpy(block + layout.checksums_offset(load.tokens), load.header->layer_checksums, 4 * layout.num_layers());
  {
    std::lock_guard lock(mutex_);
    if (cancelled_.contains(load.key)) return (void)(load.wrong = Outcome::Cancelled);
    if (FileIndex::Entry* entry = index_.find(load.key)) entry->used_s = use_s();
  }
  const Seal seal{load.handle, true};
  store_.keep_loaded({&seal, 1});
  if (!accepted([&] { store_.seal(owner_, {&seal, 1}); })) return (void)(load.wrong = Outcome::Failed);
  load.created = false;
}

void DiskTier::end_load(Load& load, Outcome outcome) {
  if (load.fd >= 0) volumes_[load.directory].at.files->close(load.fd);
  const bool gone = outcome == Outcome::Corrupt || outcome == Outcome::Expired || outcome == Outcome::Missing;
  bool cancelled;
  {
    std::lock_guard lock(mutex_);
    cancelled = cancelled_.contains(load.key);
    // A file that cannot be trusted is found by nobody from here on. One that is deleted anyway is in that list already.
    if (FileIndex::Entry* entry = index_.find(load.key); entry && gone) entry->doomed = true;
  }
  if (gone || cancelled) store_.drop_disk(load.key);
  if (cancelled && outcome == Outcome::Loaded)
    accepted([&] { store_.remove_here(load.key); });  // deleted in the moment it was sealed
  if (load.created) accepted([&] { store_.abort(owner_, load.handle), store_.settle(); });
  if (gone && outcome == Outcome::Corrupt && keep_corrupt_) volumes_[load.directory].at.files->aside(path_of(load.key, fanout_));
  if (gone) remove_file(load.key, load.directory);
  if (outcome == Outcome::Loaded) {
    went_well(load.directory, false);
    loaded_.fetch_add(1), load_bytes_.fetch_add(load.file_bytes);
    speed_.add(load.file_bytes);
    const uint64_t took_ns = monotonic_ns() - load.begun_ns;
    load_latency_.add(took_ns);
    if (const uint64_t before_us = latency_us_.load(std::memory_order_relaxed); load.alone)
      latency_us_.store(before_us ? (7 * before_us + took_ns / 1000) / 8 : took_ns / 1000, std::memory_order_relaxed);
  }
  corrupt_ += outcome == Outcome::Corrupt, expired_ += outcome == Outcome::Expired, load_misses_ += outcome == Outcome::Missing;
  load_no_space_ += outcome == Outcome::NoSpace;
  load_errors_ += outcome == Outcome::Failed || outcome == Outcome::Unknown;
  {
    std::lock_guard lock(mutex_);
    loading_.erase(load.key);
    if (outcome == Outcome::NoSpace || outcome == Outcome::Failed || outcome == Outcome::Unknown) {
      if (in_vain_.size() >= kMaxInVain) in_vain_.clear();
      in_vain_[load.key] = monotonic_ms() + kInVainMs;
    }
    if (!writing_.contains(load.key)) cancelled_.erase(load.key);
    waiting_bytes_.fetch_sub(load.waiting_bytes, std::memory_order_relaxed);
  }
  volumes_[load.directory].loads -= 1, volumes_[load.directory].load_bytes -= load.file_bytes;
  const Key key = load.key;
  loads_.erase(key);  // `load` is gone
  store_.load_ended();
}

}  // namespace kv
