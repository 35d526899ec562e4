// Lists a directory of blocks by name and stat. Never reads a file, follows a link or changes anything.
//
// Bounded memory however many files there are: one buffer per level, and a batch of what was found. Directories and files may
// come and go meanwhile; what changes during a scan may be seen or not.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "core/files/block_file.h"

namespace kv {

inline constexpr size_t kScanBatch = 1024;

struct FoundFile {
  Key key;
  uint64_t bytes;
  uint32_t written_s;  // CLOCK_REALTIME
};

enum class Stray : uint32_t {
  Temp,       // one of our temporary names in DIR/tmp: a leftover, unless it is being written
  Aside,      // kept on purpose in DIR/aside
  Misplaced,  // named like a block, in a directory where nobody looks for it: another fan-out's, say
  Foreign,    // a name that is no block's
  Link,       // a symbolic link, whatever its name
  Directory,  // a directory in place of a file
  Special,    // a FIFO, socket or device in place of a file
};
std::string_view name(Stray kind);

struct Visitor {
  std::function<bool(std::span<const FoundFile>)> blocks = {};  // false ends the scan
  std::function<void(Stray, const std::string& path, uint64_t bytes)> stray = {};
  std::function<void(const std::string& path, const FoundFile&)> each = {};  // instead of `blocks`, for who needs the path
  std::function<bool()> over = {};                                           // true ends the scan; asked for every name
};

struct Scanned {
  uint64_t files = 0;  // blocks
  uint64_t bytes = 0;  // of blocks
  uint64_t strays = 0;
  uint64_t directories = 0;
  uint64_t errors = 0;   // directories or files that could not be read
  int first_error = 0;   // errno
  bool complete = true;  // false if the visitor ended it
};

// Without a fan-out, a block may lie at any depth below directories whose names are the key's first digits.
// Throws Unavailable if the directory itself cannot be read.
Scanned scan(const std::string& directory, std::optional<Fanout> fanout, const Visitor& visitor);

}  // namespace kv
