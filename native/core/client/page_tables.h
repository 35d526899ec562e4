// What of the pool this process has in its page tables: what it uses, and a little of what it will write next; never the whole
// pool, which would count as this process's memory (RssShmem) and take tens of milliseconds a client.
//
// Reading fills tables as it goes, sixteen pages a fault, which costs what asking for them costs: only for much at once a thread
// goes ahead of the reader. Writing has no such help: an extent is asked for whole, and what lies behind it ahead of its create.
//
// What was used and then not for idle_ms to twice that goes from the tables, unless it was always little: once, also under a view
// that is still held, and again behind its end. The memory stays: the next touch fills the tables again.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "core/client/recent_chunks.h"
#include "core/format/block.h"
#include "core/format/segment.h"

namespace kv {

// A bit for each 64 KiB of a mapping. Thread-safe; a bit that two threads find unset is asked for twice, which costs only time.
class PopulatedChunks {
 public:
  static constexpr uint64_t kChunk = 64 << 10;
  explicit PopulatedChunks(uint64_t bytes) : words_((bytes / kChunk + 64) / 64) {}
  uint64_t missing(Extent extent) const;  // bytes of its chunks that are not there
  uint64_t set(Extent extent);            // bytes that were not there before
  void clear(Extent extent);              // whole chunks
  uint64_t bytes() const { return set_.load(std::memory_order_relaxed); }

 private:
  template <class F>
  void each_word(Extent extent, F&& f) const;

  mutable std::vector<std::atomic<uint64_t>> words_;
  std::atomic<uint64_t> set_{0};
};

class PageTables {
 public:
  static constexpr uint64_t kWorthAThread = 1ull << 20;    // of one get: less is read before a thread wakes
  static constexpr uint64_t kWorthDropping = 16ull << 20;  // of all that was used: then it is looked at, until nothing is left
  static inline std::atomic<uint32_t> idle_ms{10'000};     // a test has no time
  // Of mappings that outlive it. `writable` may be empty. `bound`: that memory exists up to there.
  PageTables(const Mapping& readable, const Mapping& writable, const std::atomic<uint64_t>& frontier);
  ~PageTables();
  PageTables(const PageTables&) = delete;

  void reading(std::span<const Extent> extents);  // are about to be read
  void writing(Extent extent);                    // is about to be written
  // It is read or written now: when that was long ago it may go. What is in use and never told so stays.
  void used(Extent extent) { Uses(*this).add(extent); }
  class Uses {  // the same of many: whether somebody looks is asked once
   public:
    explicit Uses(PageTables& tables) : tables_(tables) {}
    ~Uses() {
      if (any_ || !tables_.watching_.load(std::memory_order_relaxed)) tables_.watch();
    }
    Uses(const Uses&) = delete;
    void add(Extent extent) { any_ |= tables_.recent_.use(extent); }

   private:
    PageTables& tables_;
    bool any_ = false;
  };
  void stop();     // prompt; what is not there by then comes with its first touch
  void abandon();  // in a forked child, where its thread is not
  uint64_t bytes() const { return read_.bytes() + written_.bytes(); }

 private:
  struct Ahead {  // the thread's work, and it
    std::mutex mutex;
    std::condition_variable wanted;
    std::vector<Extent> reads;
    Extent write{0, 0};
    bool stop = false;
    std::thread thread;
  };
  template <class F>
  bool ask(F&& change);
  void watch();
  void drop_idle();
  Extent behind(Extent extent, const Mapping& mapping, const PopulatedChunks& there) const;
  void run();

  const Mapping &readable_, &writable_;
  const std::atomic<uint64_t>& frontier_;
  PopulatedChunks read_, written_;
  RecentChunks recent_;
  std::atomic<bool> watching_{false};  // the thread looks at recent_ from time to time
  std::unique_ptr<Ahead> ahead_ = std::make_unique<Ahead>();
};

}  // namespace kv
