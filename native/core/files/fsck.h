// Checks a directory of blocks without a daemon: the name, the header and every layer of every file; and repairs it, if asked, by
// removing what no daemon would ever serve. Never touches what has no name of ours, never makes anything in the directory
// but DIR/aside, never changes a file's bytes.
//
// Invariant: after a repair without errors, a second check finds nothing wrong but what a repair never removes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace kv {

struct FsckOptions {
  bool repair = false;        // needs the directory for itself: throws FailedPrecondition while a daemon has it
  bool keep_corrupt = false;  // repair moves blocks to DIR/aside instead of removing them
  bool layers = true;         // read the bytes too, not only names and headers
};

enum class Finding : uint32_t {
  Corrupt,     // a block whose header, layers or rest differ
  Misplaced,   // a block where nobody looks for it
  Leftover,    // a temporary file, or what was flushed or deleted and a running daemon may be removing, without `repair`
  Blocked,     // a link, FIFO, socket or device where a block should be
  Unusable,    // a directory where a block should be, or no directory where one should be: never removed
  Foreign,     // not ours: reported only, not wrong
  Unopened,    // a block that cannot be opened now (permissions, descriptors, memory): it may be good, and is never removed
  Unreadable,  // a block of which a read failed: on a file system of the network it may pass; never removed either
};
inline constexpr size_t kFindings = 8;
std::string_view name(Finding kind);

enum class Action : uint32_t { None, Removed, Kept, Failed };  // Kept: in DIR/aside
std::string_view name(Action action);

struct FsckReport {
  uint64_t files = 0;  // blocks, good or not
  uint64_t bytes = 0;  // their lengths
  uint64_t read_bytes = 0;
  uint64_t aside = 0;  // files in DIR/aside
  uint64_t found[kFindings] = {};
  uint64_t repaired = 0;
  uint64_t failed = 0;                         // repairs
  uint64_t errors = 0;                         // directories or files that could not even be listed
  std::map<std::string, uint64_t> identities;  // good blocks by the reuse identity in their header, as hexadecimal digits
  // What is wrong still.
  uint64_t wrong() const;
};

struct FsckVisitor {
  std::function<void(Finding, const std::string& path, const std::string& why, Action)> finding;
  std::function<void(const FsckReport& so_far)> progress;  // a few times a second
};

// Throws Unavailable if the directory cannot be read. What a visitor throws ends the check.
FsckReport fsck(const std::string& directory, const FsckOptions& options, const FsckVisitor& visitor);

}  // namespace kv
