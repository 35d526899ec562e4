// What the disk tier's thread has under way: a load or a write with its transfers. Only tier*.cc includes this.
#pragma once

#include <list>

#include "core/base/error.h"
#include "core/disk/tier.h"

namespace kv {

inline constexpr uint64_t kDayS = 86'400;

// Runs what changes the store. False: it refused, because its namespace was fenced meanwhile; then nobody is waiting for this any
// more.
template <class F>
bool accepted(F&& change) {
  try {
    change();
    return true;
  } catch (const Error&) {
    return false;
  }
}

struct DiskTier::Load {
  Key key;
  uint8_t directory = 0;
  int fd = -1;
  uint64_t file_bytes = 0;
  uint64_t begun_ns = 0;
  uint64_t waiting_bytes = 0;  // what it counts in waiting_bytes_
  std::unique_ptr<Page> page = std::make_unique<Page>();
  const FileHeader* header = nullptr;  // in `page`, once it was read and believed
  std::shared_ptr<const KnownLayout> layout;
  uint32_t tokens = 0;
  uint32_t ttl_s = 0;  // 0: it never expires
  Handle handle{0, 0};
  Extent extent{0, 0};
  bool created = false;
  bool alone = true;      // no other load was under way beside it
  std::list<Step> steps;  // in the order of the file
  uint32_t in_flight = 0;
  uint64_t taken_bytes = 0;         // of the data, without a gap
  uint32_t layers_taken = 0;        // whole and verified
  uint32_t crc = 0;                 // of what was taken of the next layer
  bool tail_taken = false;          // what is behind the layers
  Outcome wrong = Outcome::Loaded;  // what the first thing that went wrong makes of it
};

struct DiskTier::Write {
  WriteJob job;
  uint8_t directory = 0;
  int fd = -1;
  std::string temp;
  uint64_t bytes = 0;
  uint64_t begun_ns = 0;
  std::unique_ptr<Page> page = std::make_unique<Page>();
  std::unique_ptr<std::byte, void (*)(void*)> gathered{nullptr, std::free};  // the block, if it lies in pieces
  std::list<Step> steps;
  uint32_t in_flight = 0;
  int64_t result = 0;  // bytes written, or -errno of the first step that failed
};

}  // namespace kv
