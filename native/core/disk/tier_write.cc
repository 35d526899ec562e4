// A block into a file, behind its seal. The store says which block is worth it; here is decided when: after the reads that wait,
// within the quota and the day's budget, and only where the directory is well.

#include <time.h>

#include <algorithm>

#include "core/checksum.h"
#include "core/disk/tier_steps.h"
#include "core/error.h"
#include "core/meta.h"
#include "core/polling.h"

namespace kv {
namespace {
constexpr size_t kWritesAtOnce = 4;  // what it takes to keep the device busy
constexpr uint64_t kDayS = 86'400;
}  // namespace

bool DiskTier::may_write() const {
  const auto today = static_cast<uint64_t>(::time(nullptr)) / kDayS;
  const bool spent = daily_write_bytes_ && today == day_ && written_today_.load(std::memory_order_relaxed) >= daily_write_bytes_;
  bool any_well = false;
  for (uint8_t d = 0; d < places_.size(); ++d) any_well |= well(d);
  std::lock_guard lock(mutex_);
  return scanned_ && !unlisted_ && queue_.empty() && any_well && !spent && !sweep_;
}

void DiskTier::start_writes() {
  while (writes_.size() < kWritesAtOnce && waiting_steps_.empty() && !stop_.load() && may_write()) {
    std::optional<WriteJob> job;
    starting_.store(1);  // before it leaves the store's queue: whoever counts sees it in one place at least
    try {
      job = store_.begin_write();
    } catch (const Error&) {  // fenced: nothing of this namespace is written any more
    }
    if (job) start_write(*job);
    starting_.store(0);
    if (!job) return;
  }
}

// Every way out of here ends the store's part as well.
void DiskTier::start_write(const WriteJob& job) {
  auto write = std::make_unique<Write>();
  write->job = job;
  write->begun_ns = monotonic_ns();
  write->bytes = kBlockFileHeaderBytes + job.extent.length;
  write->directory = home(job.key);
  while (!well(write->directory)) write->directory = static_cast<uint8_t>((write->directory + 1) % places_.size());
  bool there, doomed;
  {
    std::lock_guard lock(mutex_);
    const FileIndex::Entry* entry = index_.find(job.key);
    there = entry && !entry->doomed, doomed = entry && entry->doomed;
  }
  if (there || doomed || writes_.contains(job.key)) {  // it lies there since it was in memory before, or is just being removed
    store_.end_write(job.handle, there);
    return;
  }
  const KnownLayout* known = known_layout(job.shape.layout);
  if (!known || !describe_block(*write, job, *known) || !make_quota_room(write->bytes)) {
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
  writes_.emplace(job.key, std::move(write));
  started.fd = places_[started.directory].at.files->create_temp(started.bytes, &started.temp);
  if (started.fd < 0) {
    started.temp.clear();
    places_[started.directory].probe_bytes = started.bytes;
    went_wrong(started.directory, -started.fd, true, "making a file");
    write_errors_ += 1;
    return end_write(started, false);
  }
  started.step.write = &started;
  started.step.transfer.fd = started.fd;
  started.step.transfer.write = true;
  started.step.transfer.parts[0] = {started.page->bytes, kBlockFileHeaderBytes};
  started.step.transfer.parts[1] = {pool_.data() + job.extent.offset, job.extent.length};
  started.step.transfer.count = 2;
  submit(started.step, started.directory);
}

// The header, with the checksums the writer left or those of the bytes as they are. False if no file can hold such a block.
bool DiskTier::describe_block(Write& write, const WriteJob& job, const KnownLayout& known) {
  const Layout& layout = known.layout;
  const uint32_t tokens = job.shape.tokens;
  const std::byte* block = pool_.data() + job.extent.offset;
  FileHeader header{};
  if (!describe(header, layout, tokens)) return false;
  header.key = job.key;
  header.layout = known.digest;
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
  }
  const uint64_t tail = layout.layers_bytes(tokens);
  header.tail_checksum = crc32c(block + tail, header.data_bytes - tail);
  encode(header, std::span<std::byte, kBlockFileHeaderBytes>(write.page->bytes));
  return !pool_hit_.load();  // a client cut the pool under us: zeroes, not the block's bytes
}

// Written whole, the file gets its name; then the store says whether the block is still wanted.
void DiskTier::write_done(Write& write) {
  const int64_t result = write.step.transfer.result;
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
  if (const int error = places_[write.directory].at.files->publish(write.temp, path_of(write.job.key, fanout_)); error != 0) {
    if (error != -EISDIR) went_wrong(write.directory, -error, true, "naming a file");  // that name only is taken
    write_errors_ += 1;
    return end_write(write, false);
  }
  write.temp.clear();
  went_well(write.directory, true);
  end_write(write, true);
}

void DiskTier::end_write(Write& write, bool written) {
  Files& files = *places_[write.directory].at.files;
  const WriteJob job = write.job;
  if (write.fd >= 0) files.close(write.fd);
  if (written) {
    const auto today = static_cast<uint64_t>(::time(nullptr)) / kDayS;
    if (std::exchange(day_, today) != today) written_today_.store(0);
    written_today_ += write.bytes;
    written_ += 1, write_bytes_ += write.bytes;
    write_latency_.add(monotonic_ns() - write.begun_ns);
  }
  bool keep;
  {
    std::lock_guard lock(mutex_);
    keep = written && !cancelled_.contains(job.key);
    if (keep) {
      const auto now = static_cast<uint32_t>(::time(nullptr));
      FileIndex::Entry* entry = index_.add(job.key, static_cast<uint32_t>(write.bytes / kPageBytes), write.directory, now);
      KV_INVARIANT(entry != nullptr);  // make_quota_room() left a place
      entry->expiry_s = job.expiry_s;
    }
    if (write.temp.empty()) reserved_bytes_ -= write.bytes;
    writing_.erase(job.key);
    if (!loading_.contains(job.key)) cancelled_.erase(job.key);
  }
  const uint8_t directory = write.directory;
  if (!write.temp.empty()) remove_leftover({write.temp, directory, write.bytes});
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
