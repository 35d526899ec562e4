// The tier below a store, as the store and its doors see it: what may be asked of it without waiting for a disk.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/polling.h"
#include "core/format/store_types.h"

namespace kv {

// The tier below, as the doors see it. Calls are made without the store's lock, take microseconds and do no I/O, but for one.
class LowerTier {
 public:
  struct Figures {  // for clients: its files now, and blocks since the daemon began
    uint64_t files = 0, bytes = 0, quota_bytes = 0, loaded = 0, written = 0;
  };
  virtual ~LowerTier() = default;
  virtual Presence promote(const Key& key, uint32_t priority) = 0;
  enum class Below { Nothing, Unsure, Known };  // whether there was a file. Unsure: told once of each key
  virtual Below forget(const Key& key) = 0;
  virtual void forget_all() = 0;
  virtual void remember_flush() = 0;  // does I/O, before a flush is answered: it outlives memory. Throws Unavailable
  virtual Figures figures() = 0;
};

// Who wants a block: a session, by its number, or calls that have none.
using Waiter = uint64_t;
inline constexpr Waiter kNobody = 0;
inline constexpr Waiter kCalls = 1ull << 32;  // beyond all sessions
struct Wanting {
  Waiter who = kNobody;   // of nobody it is brought whoever waits
  uint64_t until_ms = 0;  // by monotonic_ms()
  uint64_t first = 0;     // hosts that are asked first, as Fetcher::named() has them
  static Wanting of(Waiter who, uint32_t for_ms) { return for_ms ? Wanting{who, monotonic_ms() + for_ms} : Wanting{}; }
};

// The daemons of other hosts, asked for what neither memory nor disk has. As cheap as the calls above.
class Fetcher {
 public:
  virtual ~Fetcher() = default;
  // Pending: it is being fetched, or will be with the next go(). Missing: no peer has it, or none can be reached.
  // What nobody wants any more, and nobody reads yet, is not brought.
  virtual Presence fetch(const Key& key, uint32_t priority, Wanting wanting) = 0;
  virtual void also_wanted(const Key& key, Wanting wanting) = 0;  // if it is being fetched
  virtual void let_go_of_all(Waiter waiter) = 0;                  // it wants nothing any more
  virtual void go() = 0;                                          // behind the last key of many: they are asked for together
  // Whether one is known to have it now, by what it told; asks nobody.
  virtual bool known(const Key& key) const = 0;
  // Seconds until so many bytes would be here, by what was measured. Below 0: nothing was measured.
  virtual double estimate_s(uint64_t bytes) const = 0;
  // For Wanting::first: the host of that name, which is asked before any other, also where it told nothing. 0: there is none.
  virtual uint64_t named(const std::string& node) const = 0;
  virtual const std::string& node() const = 0;  // this host's own name
};

}  // namespace kv
