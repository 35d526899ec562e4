// A block into a file, behind its seal. The store says which block is worth it; here is decided when: after the reads that wait,
// within the quota and the day's budget, and only where the directory is well.

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/disk/tier_steps.h"
#include "core/format/meta.h"

namespace kv {
namespace {
constexpr size_t kWritesAtOnce = 4;  // in a directory: what it takes to keep the device busy
constexpr uint64_t kPieceBytes = 1ull << 20;
constexpr uint64_t kPoliteBytes = 256ull << 10;  // the processor is the kernel's while it takes a piece: 10 to 50 µs then
constexpr uint64_t kAloneNs = 3'000;             // giving way takes less when nobody wants the processor
constexpr uint64_t kRestNs = 24'000'000;

// As Store::file_lives_for(), of a file and a block that ends then. One that was loaded from it ends a second later.
bool lives_until(const FileIndex::Entry& file, uint32_t expiry_s) {
  if (file.tokens == 0) return false;  // it was only listed
  if (!file.expiry_s || !expiry_s) return file.expiry_s == expiry_s;
  const auto now_s = std::min(static_cast<uint32_t>(::time(nullptr)), expiry_s);
  return file.expiry_s <= expiry_s && file.expiry_s - std::min(now_s, file.expiry_s) >= (expiry_s - now_s) / 2;
}
}  // namespace

// Between two steps of writing, while sessions send request upon request: whoever wants this processor has it first, or a put
// would wait for all that is done for four blocks. If somebody did want it, the next block is begun a little later. So what puts
// at the speed of memory meets a step of ours rarely, and at least a block every kRestNs is written all the same: most of what
// comes that fast leaves memory before any disk could take it.
void DiskTier::give_way() {
  if (!loads_.empty() || !store_.streaming()) return;
  const uint64_t before = monotonic_ns();
  ::sched_yield();
  const uint64_t now = monotonic_ns();
  if (now - before > kAloneNs) rest_until_ns_ = now + kRestNs;
}

bool DiskTier::may_write() const {
  if (monotonic_ns() < rest_until_ns_) return false;
  const auto today = static_cast<uint64_t>(::time(nullptr)) / kDayS;
  const bool used_up = today == day_ && written_today_.load(std::memory_order_relaxed) >= daily_write_bytes_;
  const bool spent = daily_write_bytes_ && (used_up || today == spent_day_);
  bool room = false;
  for (uint8_t d = 0; d < volumes_.size() && !room; ++d) room = takes_a_write(d);
  std::lock_guard lock(mutex_);
  const bool shrinking = index_.bytes() + reserved_bytes_ > quota_bytes_;
  return room && counted() && !spent && !sweep_ && !shrinking;
}

// As far as this thread alone decides.
bool DiskTier::has_room(uint8_t directory) const {
  const Volume& volume = volumes_[directory];
  return volume.in_place && well(directory) && !is_silent(directory) && volume.writing_now < kWritesAtOnce &&
         volume.reads.empty() && volume.writes.empty();
}

// A directory that is slow, or busy with reading, or ill gets less of what is written: the others take it.
bool DiskTier::takes_a_write(uint8_t directory) const {
  if (!has_room(directory)) return false;
  std::lock_guard lock(mutex_);
  return queues_[directory].empty();
}

// The key's own directory, or the next one that takes a write. Once around: reads that were asked for since may_write() looked
// wait for this very thread.
uint8_t DiskTier::directory_for(const Key& key) const {
  const auto after = [&](uint8_t d) { return static_cast<uint8_t>((d + 1) % volumes_.size()); };
  uint8_t directory = home(key);
  for (size_t i = 0; i < volumes_.size() && !takes_a_write(directory); ++i) directory = after(directory);
  for (size_t i = 0; i < volumes_.size() && !has_room(directory); ++i) directory = after(directory);
  return directory;
}

void DiskTier::start_writes() {
  while (!stop_.load() && may_write()) {
    std::optional<WriteJob> job;
    starting_.store(1);  // before it leaves the store's queue: whoever counts sees it in one place at least
    try {
      job = store_.begin_write();
    } catch (const Error&) {  // fenced: nothing of this namespace is written any more
    }
    if (job) start_write(*job);
    starting_.store(0);
    if (!job) return;
    give_way();
  }
}

// Every way out of here ends the store's part as well.
void DiskTier::start_write(const WriteJob& job) {
  auto write = std::make_unique<Write>();
  write->job = job;
  write->begun_ns = monotonic_ns();
  write->bytes = kBlockFileHeaderBytes + job.extent.length;
  write->directory = directory_for(job.key);
  bool there, doomed, ends_otherwise = false;
  uint8_t where = 0;
  {
    std::lock_guard lock(mutex_);
    FileIndex::Entry* entry = index_.find(job.key);
    there = entry && !entry->doomed,
    doomed = entry ? entry->doomed : doomed_unknown_.contains(job.key) || gone_later_.contains(job.key);
    // A file says until when its block lives, and this one, for all that is known of it, longer or less long than was asked for.
    if (there && !lives_until(*entry, job.expiry_s)) {
      there = false, doomed = loading_.contains(job.key);  // by its next use it is not loaded any more
      if (!doomed) entry->doomed = ends_otherwise = true, where = entry->directory;
    }
  }
  if (ends_otherwise) doomed = !remove_file(job.key, where);
  if (there || doomed || writes_.contains(job.key)) {  // it lies there since it was in memory before, or is just being removed
    store_.end_write(job.handle, there);
    return;
  }
  if (!within_budget(write->bytes) || !describe_block(*write, job) || !make_quota_room(write->bytes, write.get())) {
    writes_too_large_ += 1;
    store_.end_write(job.handle, false);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    reserved_bytes_ += write->bytes;
    writing_.insert(job.key);
  }
  Write& started = *write;
  volumes_[started.directory].writing_now += 1;
  writes_.emplace(job.key, std::move(write));
  give_way();
  if (started.fd < 0) started.fd = volumes_[started.directory].at.files->create_temp(started.bytes, &started.temp);
  give_way();
  if (started.fd < 0) {
    started.temp.clear();
    volumes_[started.directory].probe_bytes = started.bytes;
    went_wrong(started.directory, -started.fd, true, "making a file");
    write_errors_ += 1;
    return end_write(started, false);
  }
  if (const int error = count_written(started); error != 0) {
    went_wrong(started.directory, -error, true, "counting what is written");
    write_errors_ += 1;
    return end_write(started, false);
  }
  plan_pieces(started);
  for (Step& step : started.steps) {
    submit(step, started.directory);
    give_way();
  }
}

// What does not fit any more today ends the day's writing; what fits into no day is refused.
bool DiskTier::within_budget(uint64_t bytes) {
  const auto today = static_cast<uint64_t>(::time(nullptr)) / kDayS;
  if (day_.exchange(today) != today) {
    written_today_.store(0);
    for (Volume& volume : volumes_) volume.written_today = 0;
  }
  if (!daily_write_bytes_ || written_today_.load() + bytes <= daily_write_bytes_) return true;
  if (bytes <= daily_write_bytes_) spent_day_ = today;
  return false;
}

// Before its first byte goes to the disk, and whatever becomes of it: a daemon that is killed has written it all the same.
int DiskTier::count_written(Write& write) {
  Volume& volume = volumes_[write.directory];
  volume.written_today += write.bytes;
  written_today_ += write.bytes;
  if (!daily_write_bytes_) return 0;
  return volume.at.files->count_written({static_cast<uint32_t>(day_.load()), volume.written_today});
}

// Of one in pieces a copy that goes with the write; null: there is no memory for it.
const std::byte* DiskTier::block_of(Write& write) const {
  const WriteJob& job = write.job;
  if (job.pieces.size() == 1) return pool_.data() + job.pieces[0].offset;
  if (!write.gathered) {
    write.gathered.reset(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, job.extent.length)));
    if (!write.gathered) return nullptr;
    uint64_t done = 0;
    for (const Extent& piece : job.pieces) {
      std::memcpy(write.gathered.get() + done, pool_.data() + piece.offset, piece.length);
      done += piece.length;
    }
  }
  return write.gathered.get();
}

// The header goes with the first piece.
void DiskTier::plan_pieces(Write& write) {
  const Extent& extent = write.job.extent;
  const uint64_t piece = store_.streaming() ? kPoliteBytes : kPieceBytes;
  for (uint64_t at = 0; at < extent.length; at += piece) {
    Step& step = write.steps.emplace_back();
    step.write = &write;
    Transfer& transfer = step.transfer;
    transfer.fd = write.fd, transfer.write = true;
    if (at == 0)
      transfer.parts[transfer.count++] = {write.page->bytes, kBlockFileHeaderBytes};
    else
      transfer.offset = kBlockFileHeaderBytes + at;
    transfer.parts[transfer.count++] = {const_cast<std::byte*>(block_of(write)) + at, std::min(piece, extent.length - at)};
  }
  write.in_flight = static_cast<uint32_t>(write.steps.size());
}

// The header, with the checksums the writer left or those of the bytes as they are. False if no file can hold such a block.
bool DiskTier::describe_block(Write& write, const WriteJob& job) {
  const Layout& layout = job.layout->layout;
  const uint32_t tokens = job.shape.tokens;
  FileHeader header{};
  if (!describe(header, layout, tokens)) return false;
  const std::byte* block = block_of(write);
  if (!block) return false;
  header.key = job.key;
  header.layout = job.layout->digest;
  header.fingerprint = job.fingerprint;
  header.base_position = job.shape.base_position;
  header.priority = job.shape.priority;
  header.parent = job.parent;
  header.created_s = job.created_s, header.expiry_s = job.expiry_s;
  if (job.checksummed)
    std::memcpy(header.layer_checksums, block + layout.checksums_offset(tokens), 4 * layout.num_layers());
  else
    for (uint32_t layer = 0; layer < layout.num_layers(); ++layer)
      header.layer_checksums[layer] = crc32c(block + layout.layer_offset(layer, tokens), layout.layer_bytes(layer, tokens));
  if (layout.meta_bytes(tokens) >= sizeof(MetaHead)) {
    MetaHead meta;
    std::memcpy(&meta, block + layout.meta_offset(tokens), sizeof meta);
    if (meta.magic == kMetaMagic) header.content_key = meta.content;
    const bool known_size = meta.magic == kMetaMagic && meta.tokens == tokens && meta.extra_words <= 4 && meta.has_identity == 1;
    if (known_size && identity_offset(meta) + sizeof(Key) <= layout.meta_bytes(tokens))
      std::memcpy(&header.identity, block + layout.meta_offset(tokens) + identity_offset(meta), sizeof(Key));
  }
  const uint64_t tail = layout.layers_bytes(tokens);
  header.tail_checksum = crc32c(block + tail, header.data_bytes - tail);
  encode(header, std::span<std::byte, kBlockFileHeaderBytes>(write.page->bytes));
  return !pool_hit_.load();  // a client cut the pool under us: zeroes, not the block's bytes
}

void DiskTier::write_step_done(Step& step) {
  Write& write = *step.write;
  if (step.transfer.result < 0)
    write.result = step.transfer.result;
  else if (write.result >= 0)
    write.result += step.transfer.result;
  if (--write.in_flight == 0) write_done(write);
}

// Written whole, the file gets its name; then the store says whether the block is still wanted.
void DiskTier::write_done(Write& write) {
  const int64_t result = write.result;
  if (result == -ECANCELED) return end_write(write, false);
  if (result != static_cast<int64_t>(write.bytes)) {
    if (result != -EFAULT) went_wrong(write.directory, result < 0 ? static_cast<int>(-result) : EIO, true, "writing a file");
    write_errors_ += 1;
    return end_write(write, false);
  }
  bool cancelled;
  {
    std::lock_guard lock(mutex_);
    cancelled = cancelled_.contains(write.job.key);
  }
  if (cancelled) return end_write(write, false);
  const uint32_t written_s = volumes_[write.directory].at.files->written_s(write.fd, flushed_s_.load());
  {
    std::lock_guard lock(mutex_);
    newest_s_ = std::max(newest_s_, written_s);
  }
  if (const int error = volumes_[write.directory].at.files->publish(write.temp, path_of(write.job.key, fanout_)); error != 0) {
    if (error != -EISDIR) went_wrong(write.directory, -error, true, "naming a file");       // that name only is taken
    if (error == -ETIMEDOUT) volumes_[write.directory].unremoved.push_back(write.job.key);  // until it is known to have no name
    write_errors_ += 1;
    return end_write(write, false);
  }
  give_way();
  write.temp.clear();
  went_well(write.directory, true);
  end_write(write, true);
}

void DiskTier::end_write(Write& write, bool written) {
  Files& files = *volumes_[write.directory].at.files;
  const WriteJob job = write.job;
  if (write.fd >= 0) files.close(write.fd);
  if (written) {
    written_ += 1, write_bytes_ += write.bytes;
    write_latency_.add(monotonic_ns() - write.begun_ns);
  }
  bool keep;
  {
    std::lock_guard lock(mutex_);
    keep = written && !cancelled_.contains(job.key);
    if (keep) {
      FileIndex::Entry* entry = index_.add(job.key, static_cast<uint32_t>(write.bytes / kPageBytes), write.directory, use_s());
      keep = entry != nullptr;  // make_quota_room() left a place; a directory that was listed meanwhile may have taken it
      if (keep) entry->expiry_s = job.expiry_s, entry->tokens = job.shape.tokens;
    }
    if (write.temp.empty()) reserved_bytes_ -= write.bytes;
    writing_.erase(job.key);
    if (!loading_.contains(job.key)) cancelled_.erase(job.key);
  }
  const uint8_t directory = write.directory;
  if (!write.temp.empty()) remove_leftover({write.temp, directory, write.bytes});
  volumes_[directory].writing_now -= 1;
  writes_.erase(job.key);  // `write` is gone
  if (store_.end_write(job.handle, keep)) return;
  if (written) {  // deleted meanwhile: gone before it can be found
    writes_cancelled_ += 1;
    forget(job.key);
    remove_file(job.key, directory);
  }
  tell_if_gone(job.key);
}

}  // namespace kv
