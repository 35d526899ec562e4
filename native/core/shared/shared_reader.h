// The blocks that other daemons keep in one shared directory, as a tier of one namespace: DIR/<node>/<namespace>/a/b/<key>.kv.
// Two threads look for a key in the other nodes' directories, in an order of the key's own, and read its file into the pool,
// layer by layer, each verified before it is published. Nothing is locked, written or removed there: a file that goes, shrinks or
// changes while it is read is a miss.
//
// Invariants: a key is looked for once at a time; what waits is bounded; a directory is believed only if it is this user's and
// nobody else may write to it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/files/block_file.h"
#include "core/files/files.h"
#include "core/store/pool_window.h"
#include "core/store/store.h"

namespace kv {

#define KV_SHARED_COUNTERS(X) X(loaded) X(load_bytes) X(missing) X(corrupt) X(gone) X(no_space) X(failed)

class SharedReader final : public Fetcher {
 public:
  struct Options {
    std::string directory, node, space;  // of all; this daemon's own name, which is left out; the namespace
    Fanout fanout{};
  };
  struct Stats {
    uint64_t nodes, waiting;
#define X(name) uint64_t name;
    KV_SHARED_COUNTERS(X)
#undef X
  };

  // `next` is asked for what nobody keeps here, if there is one; it outlives this.
  SharedReader(Store& store, Options options, Fetcher* next);
  ~SharedReader() override { stop(); }
  void start();
  void stop();
  Presence fetch(const Key& key, uint32_t priority, Wanting wanting) override;
  void also_wanted(const Key& key, Wanting wanting) override;
  void let_go_of_all(Waiter waiter) override;
  void go() override {
    if (next_) next_->go();
  }
  bool known(const Key& key) const override { return next_ && next_->known(key); }  // of files there is no list
  double estimate_s(uint64_t bytes) const override { return next_ ? next_->estimate_s(bytes) : -1; }
  uint64_t named(const std::string& node) const override { return next_ ? next_->named(node) : 0; }
  const std::string& node() const override { return options_.node; }
  Stats stats();

 private:
  enum class Outcome { Loaded, Needless, Missing, Gone, Corrupt, NoSpace, Failed };
  struct Node {
    std::string name;
    std::unique_ptr<RealFiles> files;
    uint32_t flushed_s;  // its daemon's word that what is older is no block any more
  };
  using Nodes = std::vector<Node>;
  struct Wanted {
    Key key;
    uint32_t priority;
  };

  void run();
  std::shared_ptr<const Nodes> nodes();
  std::shared_ptr<const Nodes> list() const;
  Outcome look(const Key& key);
  Outcome load(const Key& key, int fd, uint64_t file_bytes);
  Outcome read_block(int fd, const FileHeader& header, const Layout& layout, const Granted& granted);
  void count(Outcome outcome);

  Store& store_;
  const Options options_;
  Fetcher* const next_;
  Window window_;
  uint32_t owner_ = 0;
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;

  std::mutex listing_;  // held by a reader's thread while it lists the directory
  std::mutex mutex_;    // guards what follows; never held over I/O or a call of the store
  std::condition_variable work_;
  std::deque<Wanted> queue_;
  std::unordered_map<Key, Wanting, KeyHash> flights_;   // queued or being read, and by whom
  std::unordered_map<Key, uint64_t, KeyHash> in_vain_;  // key -> until when it is not looked for again (ms)
  std::shared_ptr<const Nodes> nodes_ = std::make_shared<Nodes>();
  uint64_t listed_ms_ = 0;

#define X(name) std::atomic<uint64_t> name##_{0};
  KV_SHARED_COUNTERS(X)
#undef X
};

}  // namespace kv
