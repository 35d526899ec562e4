#include "core/client/page_tables.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <system_error>

namespace kv {
namespace {
constexpr uint64_t kStep = 4ull << 20;        // of one call: small, so that stop() is prompt
constexpr uint64_t kMostAhead = 64ull << 20;  // of what is written next, and never more than was written so far
constexpr size_t kMostReads = 4096;           // extents that wait for the thread: what comes later is read without it
}  // namespace

template <class F>
void PopulatedChunks::each_word(Extent extent, F&& f) const {
  const uint64_t end = (extent.end() + kChunk - 1) / kChunk;
  for (uint64_t chunk = extent.offset / kChunk; chunk < end;) {
    const uint64_t until = std::min(end, (chunk / 64 + 1) * 64), count = until - chunk;
    const uint64_t mask = (count == 64 ? ~0ull : (1ull << count) - 1) << chunk % 64;
    f(words_[chunk / 64], mask);
    chunk = until;
  }
}

uint64_t PopulatedChunks::missing(Extent extent) const {
  uint64_t chunks = 0;
  each_word(extent, [&](std::atomic<uint64_t>& word, uint64_t mask) {
    chunks += static_cast<uint64_t>(std::popcount(~word.load(std::memory_order_relaxed) & mask));
  });
  return chunks * kChunk;
}

uint64_t PopulatedChunks::set(Extent extent) {
  uint64_t chunks = 0;
  each_word(extent, [&](std::atomic<uint64_t>& word, uint64_t mask) {
    chunks += static_cast<uint64_t>(std::popcount(~word.fetch_or(mask, std::memory_order_relaxed) & mask));
  });
  set_.fetch_add(chunks * kChunk, std::memory_order_relaxed);
  return chunks * kChunk;
}

void PopulatedChunks::clear(Extent extent) {
  uint64_t chunks = 0;
  each_word(extent, [&](std::atomic<uint64_t>& word, uint64_t mask) {
    chunks += static_cast<uint64_t>(std::popcount(word.fetch_and(~mask, std::memory_order_relaxed) & mask));
  });
  set_.fetch_sub(chunks * kChunk, std::memory_order_relaxed);
}

PageTables::PageTables(const Mapping& readable, const Mapping& writable, const std::atomic<uint64_t>& frontier)
    : readable_(readable),
      writable_(writable),
      frontier_(frontier),
      read_(readable.size()),
      written_(writable.size()),
      recent_(readable.size()) {}

PageTables::~PageTables() {
  if (!ahead_) return;
  stop();
  if (ahead_->thread.joinable()) ahead_->thread.join();
}

void PageTables::stop() {
  {
    std::lock_guard lock(ahead_->mutex);
    ahead_->stop = true;
  }
  ahead_->wanted.notify_all();
}

// The thread exists only in the parent, and the fork may have copied its mutex and its wait half-way: neither can be destroyed.
void PageTables::abandon() { static_cast<void>(ahead_.release()); }

// False: there is no thread to be had, and nothing was changed. It would only have been faster, and a view's end must not fail.
template <class F>
bool PageTables::ask(F&& change) {
  std::lock_guard lock(ahead_->mutex);
  if (ahead_->stop) return true;
  try {
    if (!ahead_->thread.joinable()) ahead_->thread = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    return false;
  }
  change(*ahead_);
  ahead_->wanted.notify_one();
  return true;
}

void PageTables::watch() {
  if (recent_.bytes() < kWorthDropping || watching_.exchange(true)) return;
  if (!ask([](Ahead&) {})) watching_ = false;  // the next use tries again
}

// Of shared memory only the tables' entries go.
void PageTables::drop_idle() {
  recent_.sweep([&](Extent idle) {
    for (const Mapping* mapping : {&readable_, &writable_})
      if (*mapping) ::madvise(mapping->data() + idle.offset, idle.length, MADV_DONTNEED);
    read_.clear(idle);
    if (writable_) written_.clear(idle);
  });
  watching_ = recent_.bytes() > 0;
  watch();  // what was used just now saw that somebody looks
}

// What comes next if blocks are used in the order of their memory, and no more than was used so far.
Extent PageTables::behind(Extent extent, const Mapping& mapping, const PopulatedChunks& there) const {
  const uint64_t end = std::min<uint64_t>(frontier_.load(std::memory_order_relaxed), mapping.size());
  const Extent next{extent.end(), std::min({kMostAhead, there.bytes(), end - std::min(end, extent.end())})};
  return next.length < kWorthAThread || there.missing(next) < next.length / 2 ? Extent{0, 0} : next;
}

void PageTables::reading(std::span<const Extent> extents) {
  uint64_t missing = 0;
  for (const Extent& extent : extents) missing += read_.missing(extent);
  if (missing < kWorthAThread) return;
  ask([&](Ahead& ahead) {
    const Extent next = behind(extents.back(), readable_, read_);
    if (next.length && read_.set(next)) ahead.reads.push_back(next);
    for (const Extent& extent : extents)
      if (ahead.reads.size() < kMostReads && read_.set(extent)) ahead.reads.push_back(extent);
  });
}

// One call for the extent costs half of a fault for each of its pages.
void PageTables::writing(Extent extent) {
  if (!writable_ || !written_.missing(extent)) return;
  written_.set(extent);
  ::madvise(writable_.data() + extent.offset, extent.length, MADV_POPULATE_WRITE);  // what fails here, touching will tell
  const Extent next = behind(extent, writable_, written_);
  if (next.length == 0) return;
  ask([&](Ahead& ahead) { ahead.write = next; });
}

void PageTables::run() {
  ::pthread_setname_np(::pthread_self(), "kv-populate");
  std::unique_lock lock(ahead_->mutex);
  const auto now = std::chrono::steady_clock::now;
  const auto asked = [&] { return ahead_->stop || !ahead_->reads.empty() || ahead_->write.length; };
  for (auto look_at = now();;) {
    if (watching_) {
      ahead_->wanted.wait_until(lock, look_at, asked);
    } else {
      ahead_->wanted.wait(lock, [&] { return asked() || watching_; });
      look_at = now() + std::chrono::milliseconds(idle_ms);
    }
    if (ahead_->stop) return;
    if (watching_ && now() >= look_at) {
      lock.unlock();
      drop_idle();
      lock.lock();
      look_at = now() + std::chrono::milliseconds(idle_ms);
    }
    if (!asked()) continue;
    const bool reads = !ahead_->reads.empty();
    Extent& next = reads ? ahead_->reads.back() : ahead_->write;
    const Extent step{next.offset, std::min(next.length, kStep)};
    next.offset += step.length, next.length -= step.length;
    if (reads && next.length == 0) ahead_->reads.pop_back();
    lock.unlock();
    used(step);
    // What fails was cut by another client: touching it will tell.
    if (reads)
      ::madvise(readable_.data() + step.offset, step.length, MADV_POPULATE_READ);
    else if (written_.set(step))
      ::madvise(writable_.data() + step.offset, step.length, MADV_POPULATE_WRITE);
    lock.lock();
  }
}

}  // namespace kv
