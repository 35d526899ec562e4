// The sessions of a store: clients' with their locked pages, and writers' inside this process. Plain state; the store's lock
// guards it, but for the flag that a signal handler sets.
//
// Invariants: no session has the number 0; `ended` has those whose processes may still map their pages, and each once.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/format/segment.h"
#include "core/format/session_file.h"
#include "core/store/layout_table.h"
#include "core/store/pin_owners.h"

namespace kv {

struct SessionState {
  uint32_t id = 0;
  std::optional<SessionFile> file;  // none: an owner inside this process
  std::atomic<bool> truncated{false};
  Guard guard;
  bool attached = false, ended = false, resumed = false;
  uint32_t pid = 0, uid = 0;
  SessionHolder holder;
  bool budgeted = false, asks = true;  // bounded by its user's budget; may be given more, and less
  PinAllowance allowance;              // no pin beyond it counts
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  PinTerms terms;
  PinAge age;
  uint64_t device = 0;                                   // the process whose device may write here; 0: none
  uint64_t drained = 0;                                  // entries of its ring seen
  bool is_left() const { return ended && file && pid; }  // counted among those that left
  uint32_t protocol = 0;                                 // that its client speaks; 0: not known
  LayoutTable::Held layouts;                             // that it has registered
  std::vector<uint32_t> unsealed;                        // records; Upkeep::link of each says where it stands here
};

class SessionTable {
 public:
  using Map = std::map<uint32_t, std::unique_ptr<SessionState>>;
  auto begin() const { return by_id_.begin(); }
  auto end() const { return by_id_.end(); }
  auto find(uint32_t id) const { return by_id_.find(id); }
  auto at_least(uint32_t id) const { return by_id_.lower_bound(id); }  // the first from there on
  bool contains(uint32_t id) const { return by_id_.contains(id); }
  const std::unique_ptr<SessionState>& at(uint32_t id) const { return by_id_.at(id); }
  size_t size() const { return by_id_.size(); }
  void add(std::unique_ptr<SessionState> session) {
    const uint32_t id = session->id;
    by_id_.emplace(id, std::move(session));
  }
  void erase(uint32_t id) { by_id_.erase(id); }
  std::unique_ptr<SessionState> take(uint32_t id) { return std::move(by_id_.extract(id).mapped()); }

  // Never 0, which asks for a new session, and never one that lives.
  uint32_t new_id() {
    while (next_id == 0 || by_id_.contains(next_id)) ++next_id;
    return next_id++;
  }
  // An earlier daemon gave this one out.
  void seen(uint32_t id) { next_id = std::max(next_id, id + 1); }

  std::vector<uint32_t> ended;  // whose processes may still map them, looked at in turn
  uint32_t next_id = 1;
  uint32_t next_ring = 0;  // the session whose uses are looked at next

 private:
  Map by_id_;
};

}  // namespace kv
