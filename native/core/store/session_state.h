// A session as the store knows it: a client's, with its locked page, or a writer's inside this process. Plain state; the store's
// lock guards it, but for the flag that a signal handler sets.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/format/segment.h"
#include "core/format/session_file.h"
#include "core/store/layout_table.h"

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
  uint64_t drained = 0;                                  // entries of its ring seen
  bool is_left() const { return ended && file && pid; }  // counted among those that left
  uint32_t protocol = 0;                                 // that its client speaks; 0: not known
  LayoutTable::Held layouts;                             // that it has registered
  std::vector<uint32_t> unsealed;                        // records; Upkeep::link of each says where it stands here
};

}  // namespace kv
