// A store's pool in this process's memory, under the guard that turns a client's truncation of it into a flag.
#pragma once

#include <atomic>

#include "core/store/store.h"

namespace kv {

class Window {
 public:
  Window(Store& store, bool writable)
      : pool_(store.options().pool_fd, store.options().capacity_bytes, writable), guard_(pool_, &hit_) {}
  std::byte* at(uint64_t offset) const { return pool_.data() + offset; }
  bool truncated() const { return hit_.load(); }

 private:
  std::atomic<bool> hit_{false};
  Mapping pool_;
  Guard guard_;
};

}  // namespace kv
