// The disk tier of one namespace: which blocks are written, loaded and removed, in what order, and how much of each at a time. It
// has one thread for all that it decides. Each directory has a thread that lists it at start, an engine that moves the bytes,
// and, where there are several, a thread that makes its calls (timed_files.h). Owns the files of its directories and the index
// of them; changes blocks only through the store's own operations.
//
// tier.cc: the thread, what the doors call. tier_load.cc: a file into memory, layer by layer. tier_write.cc: a block into a file.
// tier_remove.cc: files that go, for the quota too. tier_scan.cc: what lay there at start. tier_volumes.cc: how the directories
// fare. tier_pages.cc: the pool in the page tables.
//
// Invariants: a file has a block's name only when it was written whole; no file of a deleted key is read again; the bytes of all
// files, those being written included, never exceed the quota, where all directories have answered; nobody waits for this thread.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/base/latency.h"
#include "core/disk/speed.h"
#include "core/disk/staging.h"
#include "core/files/block_file.h"
#include "core/files/engine.h"
#include "core/files/file_index.h"
#include "core/files/files.h"
#include "core/files/scan.h"
#include "core/files/timed_files.h"
#include "core/store/store.h"

namespace kv {

#define KV_DISK_COUNTERS(X) \
  X(loaded)                 \
  X(load_bytes)             \
  X(load_errors)            \
  X(load_misses)            \
  X(load_no_space)          \
  X(corrupt)                \
  X(expired)                \
  X(written) X(write_bytes) X(write_errors) X(writes_cancelled) X(writes_too_large) X(removed) X(evicted) X(reused) X(strays)

class DiskTier final : public LowerTier {
 public:
  struct Directory {
    std::string path;
    std::unique_ptr<Files> files;
    std::unique_ptr<Engine> engine;
    int problem = 0;  // as of a Choice
  };
  struct Options {
    std::vector<Directory> directories;
    Fanout fanout;
    uint64_t quota_bytes = 0;
    uint32_t max_files = 1'000'000;
    uint64_t daily_write_bytes = 0;  // 0: no limit
    bool keep_corrupt = false;
    bool huge_pool = false;  // the pool is made of huge pages
  };
  struct Stats {
    uint64_t files, bytes, quota_bytes, loads_waiting, loads_in_flight, writes_in_flight, written_today_bytes, listed,
        load_bytes_per_s, indexing;
#define X(name) uint64_t name;
    KV_DISK_COUNTERS(X)
#undef X
  };
  struct Condition {                // of a directory that is not well
    std::string path, state, text;  // state: "full", "read_only", "failed"
  };

  DiskTier(Store& store, Options options);
  ~DiskTier() override;

  void start();  // all of what follows
  // Apart, for file systems that may not answer: attached, the tier knows of no file and keeps in mind what is deleted. open()
  // does I/O, on any thread, and leaves the store alone: each directory once, if the options only named them. begin() once one is
  // open: the others join when they are.
  void attach();
  void open(uint8_t directory, Directory opened);  // see above
  void begin();                                    // its thread
  void stop();                                     // what is in flight ends or is abandoned; no file is left half

  Presence promote(const Key& key, uint32_t priority) override;
  Below forget(const Key& key) override;
  void forget_all() override;
  void remember_flush() override;  // throws Unavailable: a restart may find again what was flushed
  Figures figures() override;

  void set_quota(uint64_t bytes);       // of all directories together; the thread makes room
  Stats stats();                        // counts since the start, bytes and files now
  std::vector<Condition> conditions();  // empty if all directories are well
  const LatencyHistogram& load_latency() const { return load_latency_; }
  const LatencyHistogram& write_latency() const { return write_latency_; }
  double thread_cpu_s() const;  // processor time of its thread since the start

 private:
  struct Step;
  struct Queued;
  enum class Doing : uint8_t { Reading, Writing, Listing, Lying, Answering };
  struct Breaker {        // a volume that fails again and again rests, for reads and for writes apart
    uint32_t errors = 0;  // in a row
    uint64_t paused_until_ms = 0;
    bool open = false;  // and told as a condition
  };
  struct Volume {  // a directory, and how it answers
    Directory at;
    TimedFiles* timed = nullptr;  // at.files, where there are several directories
    Breaker reading{}, writing{};
    uint64_t probe_bytes = kPageBytes;  // what it last had no room for
    uint64_t written_today = 0;
    bool in_place = true;  // its path leads to it
    uint64_t looked_ms = 0;
    uint64_t answered_ms = 0;             // when its engine last had nothing to do, or was done with something
    std::deque<Step*> reads{}, writes{};  // what its engine had no room for: a read waits for no write that is not under way
    size_t loads = 0, writing_now = 0;    // under way
    uint64_t load_bytes = 0;              // of the files of those loads
    Staging staging;                      // where they arrive
    std::vector<Key> unremoved{};         // files of deleted blocks that could not be removed yet
    uint64_t retry_removals_ms = 0;
  };
  struct Listing {  // of a directory at start: one that does not return holds up no other
    std::thread thread{};
    std::atomic<uint64_t> seen_ms{0};  // when it last came upon a name; 0: it is not under way
    bool tried = false, done = false;  // mutex_ guards them
  };
  struct alignas(kPageBytes) Page {
    std::byte bytes[kBlockFileHeaderBytes];
  };
  struct Load;
  struct Write;
  struct Step {  // one transfer of a load or a write
    Transfer transfer;
    Load* load = nullptr;
    Write* write = nullptr;
    std::byte* buffer = nullptr;  // of a load's, from its submission until its bytes are in the pool
    bool in_place = false;        // that is the block's memory
    bool done = false;
  };
  struct Leftover {  // a temporary file, or a block's where nobody looks for it
    std::string path;
    uint8_t directory;
    uint64_t bytes;
  };
  enum class Outcome { Loaded, Missing, Corrupt, Expired, Failed, NoSpace, Unknown, Needless, Cancelled };

  // tier.cc
  struct Arrival {  // a directory that was opened, and what it says of earlier daemons
    uint8_t directory;
    Directory opened;
    std::vector<Key> deleted;
    int error;  // reading those
    uint32_t flushed_s;
    Written written;
  };
  Arrival read_notes(uint8_t directory, Directory opened) const;
  void take_arrivals();
  void take(Arrival arrival);
  bool is_open(uint8_t directory) const { return open_.load(std::memory_order_acquire) >> directory & 1; }
  bool is_silent(uint8_t directory) const;
  uint64_t most_bytes() const;
  Presence raise(Queued& queued, uint32_t priority);
  void run();
  bool turn();
  bool deleted(const Key& key, const FileIndex::Entry* entry) const;
  int until_rested_ms();
  void wait(int timeout_ms);
  void reap();
  void submit(Step& step, uint8_t directory);
  bool try_submit(Step& step, Volume& volume);
  void submit_waiting();
  void cancel_waiting();
  uint8_t home(const Key& key) const { return static_cast<uint8_t>(key.words[2] % volumes_.size()); }
  void tell_speed();

  // tier_remove.cc
  void take_deleted();
  void keep_doomed();
  void remove_doomed(uint64_t until_ms = 0);
  void retry_removals();
  void list_doomed();
  bool more_goes() const { return sweep_ || !doomed_.empty() || more_leftovers_; }
  bool remove_next_leftover();
  bool remove_leftover(Leftover leftover);
  bool remove_everywhere(const Key& key);
  bool remove_file(const Key& key, uint8_t directory);  // false: it is tried again
  bool unlink(const Key& key, uint8_t directory);
  void file_is_gone(const Key& key);
  void tell_if_gone(const Key& key);
  void tell_gone(const Key& key);
  void tell_gone_later();
  bool make_quota_room(uint64_t bytes, Write* heir = nullptr);
  bool shrink();
  enum class Room { Fits, GaveUp, None };
  Room give_up_one(uint64_t bytes, Write* heir);
  bool reuse_file(const Key& key, Write& heir);

  // tier_load.cc: what arrives in a buffer goes into the block, in the order of the layers
  void start_loads(uint8_t directory);
  bool take_load(uint8_t directory, Load& load);
  int open_file(const Key& key, uint8_t* directory, uint64_t* bytes);
  void load_step_done(Step& step);
  Step& plan_read(Load& load, uint64_t from, uint64_t to);
  void read_in_place(Load& load, Step& step);
  void read_first(Load& load);
  void read_rest(Load& load);
  bool take_header(Load& load);
  bool take_memory(Load& load);
  void take_in(Load& load);
  Outcome differing() const;
  bool take_tail(Load& load, const Step& last);
  bool take_layers(Load& load, const Step& step);
  void give_back(Load& load, Step& step);
  void finish_data(Load& load);
  void end_load(Load& load, Outcome outcome);

  // tier_write.cc
  void start_writes();
  void give_way();
  bool may_write() const;
  bool has_room(uint8_t directory) const;
  bool takes_a_write(uint8_t directory) const;
  uint8_t directory_for(const Key& key) const;
  void start_write(const WriteJob& job);
  bool describe_block(Write& write, const WriteJob& job);
  const std::byte* block_of(Write& write) const;
  bool within_budget(uint64_t bytes);
  int count_written(Write& write);
  void plan_pieces(Write& write);
  void write_step_done(Step& step);
  void write_done(Write& write);
  void end_write(Write& write, bool written);

  // tier_volumes.cc
  bool answers(uint8_t directory) const;
  bool well(uint8_t directory) const;
  void went_wrong(uint8_t directory, int error, bool writing, const char* doing);
  void went_well(uint8_t directory, bool writing);
  void end_condition(uint8_t directory, bool writing);
  void probe();
  void look_whether_in_place(uint8_t directory);
  void look_whether_it_answers(uint8_t directory);
  void add_hanging(std::vector<Condition>& out) const;

  // tier_pages.cc
  void fault_in(const Extent& extent);
  void unmap_pool();

  // tier_scan.cc
  void scan(uint8_t directory);
  bool list(uint8_t directory);
  void all_listed();
  bool tried() const;
  bool counted() const;
  bool add_found(uint8_t directory, std::span<const FoundFile> found);
  void prune();

  Store& store_;
  const Fanout fanout_;
  const uint32_t max_files_;
  const uint64_t daily_write_bytes_;
  const bool keep_corrupt_, huge_pool_;
  std::mutex flush_mutex_;  // guards flushing_
  std::condition_variable flush_ended_;
  bool flushing_ = false;               // one flush is remembered at a time
  std::atomic<uint32_t> flushed_s_{0};  // what was written up to this second is flushed
  Mapping pool_;
  std::atomic<bool> pool_hit_{false};
  Guard pool_guard_;
  uint32_t owner_ = 0;
  Fd wake_, epoll_;
  std::atomic<bool> stop_{false}, begun_{false};
  std::atomic<bool> table_full_{false};  // no record is left for what is found
  std::atomic<uint64_t> open_{0};        // a bit for each directory that its thread has taken
  std::atomic<uint64_t> turned_ms_{0};   // when the thread last began a round; 0: it makes none
  std::atomic<uint64_t> hangs_after_ms_{10'000};
  std::atomic<uint64_t> call_timeout_ms_{1'000};  // with a call of one directory while there are others
  std::thread thread_;
  std::vector<Listing> listings_;
  friend class DiskTierTest;

  // The thread's own.
  std::vector<Volume> volumes_;
  std::unordered_map<Key, std::unique_ptr<Load>, KeyHash> loads_;
  std::unordered_map<Key, std::unique_ptr<Write>, KeyHash> writes_;
  uint64_t rest_until_ns_ = 0;   // no write begins before
  bool more_leftovers_ = false;  // than were removed in the last turn
  bool kept_ = false;            // the daemon before left deleted blocks whose files are not all gone yet
  // Of files' uses: what the date was when this daemon began, and seconds since, whatever was done to the clock. What was written
  // by a clock that was ahead counts as used at the start: else it would stay, and new files go, until the date had come.
  uint32_t use_s() const { return begun_s_ + static_cast<uint32_t>((monotonic_ns() - begun_ns_) / 1'000'000'000); }
  const uint32_t begun_s_;
  const uint64_t begun_ns_ = monotonic_ns();
  std::atomic<uint64_t> day_;  // of written_today_
  uint64_t spent_day_ = 0;     // on which a block did not fit into what was left of the budget
  LoadSpeed speed_;

  mutable std::mutex mutex_;  // guards all that follows; never held over I/O or a call of the store
  FileIndex index_;
  struct Wanted {
    Key key;
    uint64_t bytes;
  };
  using Queue = std::map<std::pair<uint32_t, uint64_t>, Wanted>;  // (highest priority first, order of arrival) -> what to load
  std::vector<Queue> queues_;                                     // one per directory: a slow one holds up itself only
  struct Queued {
    uint8_t directory;
    Queue::key_type place;
  };
  std::unordered_map<Key, Queued, KeyHash> queued_;     // where each of them stands
  std::unordered_set<Key, KeyHash> loading_, writing_;  // keys of loads_ and writes_
  std::unordered_set<Key, KeyHash> cancelled_;          // of those, the ones that were deleted meanwhile
  std::vector<Key> doomed_;                             // to be removed
  std::unordered_set<Key, KeyHash> doomed_unknown_;     // of those, the ones not in the index (yet): max_files_ at most
  std::vector<Key> gone_unknown_;                       // of those, the ones whose files are gone
  std::unordered_set<Key, KeyHash> gone_later_;         // deleted, no file of it looked for: to be told; max_files_ at most
  std::deque<Leftover> leftovers_;                      // files to be removed; in reserved_bytes_ until they are
  std::unordered_multiset<Key, KeyHash> misplaced_;     // whose block such a file is
  std::unordered_map<Key, uint64_t, KeyHash> in_vain_;  // key -> until when asking again starts no load (ms)
  bool sweep_ = false;                                  // entries that are doomed and not listed stand anywhere in the index
  bool doom_what_is_found_ = false;
  size_t unlisted_ = listings_.size();  // directories that were not listed yet
  bool listed_ = false;                 // all of it: what is not in the index is not there
  uint64_t counted_ = 0;                // bytes of files when a directory had last been listed
  std::vector<Arrival> arrivals_;       // directories that were opened, for the thread
  std::condition_variable stopping_;
  uint32_t newest_s_ = 0;        // when the last file here was written, by the file system's clock
  uint64_t found_today_ = 0;     // bytes of files there that were written today
  uint64_t asked_ = 0;           // loads, so far
  uint64_t reserved_bytes_ = 0;  // of files being written, and leftovers
  uint64_t quota_bytes_;
  std::atomic<uint32_t> starting_{0};  // writes between the store's queue and writing_
  std::atomic<uint64_t> bytes_per_s_{0}, latency_us_{0}, waiting_bytes_{0}, written_today_{0}, names_{0};
  std::map<std::pair<uint8_t, Doing>, Condition> conditions_;  // of a directory
#define X(name) std::atomic<uint64_t> name##_{0};
  KV_DISK_COUNTERS(X)
#undef X
  LatencyHistogram load_latency_, write_latency_;
};

}  // namespace kv
