// Extents of this namespace that another process writes into: the pool's fabric, which brings a block from Mooncake straight to
// its place. Each loan has a number. Its extent is nobody else's, whatever becomes of its block, until that process has said that
// its transfer is over, or has ended: a transfer that stands still writes when it goes on, to nobody's bytes.
//
// Invariant: a loan ends once, and not before nothing writes there any more. Safe from all threads.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "core/store/store.h"

namespace kv {

class Quarantine {
 public:
  explicit Quarantine(Store& store) : store_(store) {}

  // Changes each time the process has ended. Who connects asks first: what comes over that connection then is of the process
  // that has not ended yet, or of none.
  uint64_t epoch() const;
  // The number of a loan of this block's memory; 0: there is none, for too much is lent, or that process has ended.
  uint64_t lend(const Key& key, Handle handle, uint64_t epoch);
  void over(uint64_t loan);  // its transfer; one that is not known is of a process before
  void process_ended();      // and what it had is over
  uint64_t lent() const;

 private:
  Store& store_;
  mutable std::mutex mutex_;  // guards what follows; taken before the store's
  uint64_t epoch_ = 1, last_ = 0;
  std::unordered_map<uint64_t, Handle> loans_;
};

}  // namespace kv
