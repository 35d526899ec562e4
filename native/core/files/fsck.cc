#include "core/files/fsck.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <optional>
#include <unordered_set>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/files/block_file.h"
#include "core/files/files.h"
#include "core/files/scan.h"

namespace kv {
namespace {

constexpr uint64_t kWindowBytes = 4 << 20;  // read at a time; a multiple of any alignment of direct I/O
constexpr size_t kMaxIdentities = 1024;     // counted by name; a directory has a handful
constexpr auto kProgressEvery = std::chrono::milliseconds(250);

std::string text(int error) { return std::strerror(-error); }

// A file's bytes, read forwards through one window.
class Reader {
 public:
  Reader() : window_(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, kWindowBytes)), std::free) {
    if (!window_) throw std::bad_alloc();
  }

  void open(int fd, uint64_t bytes) { fd_ = fd, bytes_ = bytes, begin_ = end_ = read_ = 0, error = 0; }
  uint64_t read_bytes() const { return read_; }

  // What is at `offset`, at least a byte. Empty at an error, which is then in `error`, or where the file ends too early.
  std::span<const std::byte> at(uint64_t offset) {
    while (offset >= end_) {
      begin_ = end_;
      const ssize_t got = ::pread(fd_, window_.get(), kWindowBytes, static_cast<off_t>(begin_));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        error = got < 0 ? -errno : 0;
        return {};
      }
      end_ = begin_ + static_cast<uint64_t>(got);
      read_ += static_cast<uint64_t>(got);
      if (end_ % kPageBytes != 0 && end_ < bytes_) end_ -= end_ % kPageBytes;  // direct reads go on at a multiple
      if (end_ == begin_) return {};
    }
    return {window_.get() + (offset - begin_), end_ - offset};
  }

  int error = 0;

 private:
  const std::unique_ptr<std::byte, void (*)(void*)> window_;
  int fd_ = -1;
  uint64_t bytes_ = 0, begin_ = 0, end_ = 0, read_ = 0;
};

class Check {
 public:
  Check(const std::string& directory, const FsckOptions& options, const FsckVisitor& visitor)
      : directory_(directory),
        options_(options),
        visitor_(visitor),
        direct_(directory, true, false),
        buffered_(directory, false, false) {
    std::vector<Key> deleted;
    if (const int error = buffered_.deleted(UINT32_MAX, &deleted); error != 0)
      throw Error(Code::Unavailable, errno_text(directory + "/" + kDeletedFile, -error));
    deleted_.insert(deleted.begin(), deleted.end());
    if (!options.repair) return;
    const int lock = lock_directory(directory);
    if (lock == -EWOULDBLOCK)
      throw Error(Code::FailedPrecondition, directory + " is in use by a daemon: stop it first, or check without repairing");
    if (lock < 0) throw Error(Code::Unavailable, errno_text(directory, -lock));
    lock_.reset(lock);
  }

  FsckReport run() {
    // What this moves aside is not to be counted as having been there.
    std::error_code none;
    for (std::filesystem::directory_iterator at(directory_ + "/" + kAsideDirectory, none), end; !none && at != end;
         at.increment(none))
      ++report_.aside;
    // A file is checked, and removed, while its directory is being listed; the listing goes on behind it.
    Visitor visitor;
    visitor.each = [this](const std::string& path, const FoundFile& found) { block(path, found); };
    visitor.stray = [this](Stray kind, const std::string& path, uint64_t) { stray(kind, path); };
    report_.errors = scan(directory_, std::nullopt, visitor).errors;
    return report_;
  }

 private:
  void block(const std::string& path, const FoundFile& found) {
    ++report_.files;
    report_.bytes += found.bytes;
    if (found.written_s <= flushed_s_) return report(Finding::Leftover, path, "flushed, and not removed yet");
    if (deleted_.contains(found.key)) return report(Finding::Leftover, path, "deleted, and not removed yet");
    Wrong wrong = wrong_with(path, found.key);
    if (!wrong.why.empty() && !lock_) {  // a running daemon may have written over what was read
      const uint64_t read = report_.read_bytes;
      wrong = wrong_with(path, found.key);
      report_.read_bytes = read;  // once
    }
    if (!wrong.why.empty()) report(wrong.kind, path, wrong.why);
    const auto now = std::chrono::steady_clock::now();
    if (!visitor_.progress || now - last_progress_ < kProgressEvery) return;
    last_progress_ = now;
    visitor_.progress(report_);
  }

  // Of a block; nothing is where `why` is empty.
  struct Wrong {
    Finding kind = Finding::Corrupt;
    std::string why;
  };

  Wrong wrong_with(const std::string& path, const Key& key) {
    uint64_t bytes = 0;
    int opened = direct_.open_read(path, &bytes);
    if (opened == -EINVAL) opened = buffered_.open_read(path, &bytes);
    if (opened == -ENOENT || opened == -EAGAIN) return {};  // a running daemon removed it, or somebody has a lease on it
    if (opened < 0) return {Finding::Unopened, "cannot be opened: " + text(opened)};
    const Fd fd(opened);
    reader_.open(fd.get(), bytes);
    std::string why = wrong_bytes(key, bytes);
    report_.read_bytes += reader_.read_bytes();
    // A file system of the network fails for a while: the block may be good.
    return {reader_.error == 0 ? Finding::Corrupt : Finding::Unreadable, std::move(why)};
  }

  std::string wrong_bytes(const Key& key, uint64_t bytes) {
    if (bytes < kBlockFileHeaderBytes) return "shorter than a header";
    if (reader_.at(0).size() < kBlockFileHeaderBytes) return unreadable();
    std::memcpy(page_.data(), reader_.at(0).data(), kBlockFileHeaderBytes);  // the window moves on
    const Decoded decoded = decode(page_, bytes);
    if (!decoded) return std::string(decoded.wrong);
    const FileHeader& header = *decoded.header;
    if (header.key != key) return "of another block";
    if (!options_.layers) return count(header.identity), std::string();
    uint64_t at = kBlockFileHeaderBytes;
    for (uint32_t layer = 0; layer < header.layers; ++layer) {
      const std::optional<uint32_t> sum = checksum(at, header.layer_bytes(layer));
      if (!sum) return unreadable();
      if (*sum != header.layer_checksums[layer]) return "layer " + std::to_string(layer) + " differs";
      at += round_up(header.layer_bytes(layer), kLayerAlign);
    }
    const std::optional<uint32_t> sum = checksum(at, bytes - at);
    if (!sum) return unreadable();
    if (*sum != header.tail_checksum) return "the bytes behind the layers differ";
    count(header.identity);
    return {};
  }

  void count(const Key& identity) {
    const std::string name = identity == Key{} ? "unknown" : hex(identity);
    if (report_.identities.contains(name) || report_.identities.size() < kMaxIdentities) ++report_.identities[name];
  }

  std::optional<uint32_t> checksum(uint64_t at, uint64_t bytes) {
    uint32_t sum = 0;
    for (const uint64_t end = at + bytes; at < end;) {
      std::span<const std::byte> piece = reader_.at(at);
      if (piece.empty()) return std::nullopt;
      piece = piece.first(std::min<uint64_t>(piece.size(), end - at));
      sum = crc32c(piece.data(), piece.size(), sum);
      at += piece.size();
    }
    return sum;
  }

  std::string unreadable() const { return reader_.error == 0 ? "ends too early" : "cannot be read: " + text(reader_.error); }

  void stray(Stray kind, const std::string& path) {
    if (kind == Stray::Aside) return;
    if (kind == Stray::Temp) {
      if (!lock_ && (in_use() || ::access((directory_ + "/" + path).c_str(), F_OK) != 0)) return;  // it is being written
      return report(Finding::Leftover, path, "left over by a daemon that ended");
    }
    if (kind == Stray::Misplaced) return report(Finding::Misplaced, path, "its directory is not that of its key");
    const std::string why = kind == Stray::Link        ? "a symbolic link"
                            : kind == Stray::Directory ? "a directory"
                            : kind == Stray::Special   ? "no regular file"
                                                       : "not a name of ours";
    const std::string_view name = last_name(path);
    const bool directory = kind == Stray::Directory;
    if (key_of(name) || is_temp_name(name)) return report(directory ? Finding::Unusable : Finding::Blocked, path, why);
    report(!directory && names_directory(name) ? Finding::Unusable : Finding::Foreign, path, why);
  }

  // By a daemon, which has removed what lay in DIR/tmp before it began. Asked when such a file was seen: one that ends then takes
  // its own with it. The lock is held for this moment only.
  bool in_use() const {
    const int lock = lock_directory(directory_);
    if (lock >= 0) ::close(lock);
    return lock == -EWOULDBLOCK;
  }

  // Whether a directory of ours could have that name.
  static bool names_directory(std::string_view name) {
    return name == kTempDirectory || name == kAsideDirectory ||
           (name.size() <= kMaxFanoutDigits && name.find_first_not_of("0123456789abcdef") == name.npos);
  }

  void report(Finding kind, const std::string& path, const std::string& why) {
    ++report_.found[static_cast<size_t>(kind)];
    Action action = Action::None;
    const bool stays =
        kind == Finding::Unusable || kind == Finding::Foreign || kind == Finding::Unopened || kind == Finding::Unreadable;
    if (options_.repair && !stays) {
      const bool keep = options_.keep_corrupt && (kind == Finding::Corrupt || kind == Finding::Misplaced);
      const int answer = keep ? buffered_.aside(path) : buffered_.remove(path);
      action = answer != 0 ? Action::Failed : keep ? Action::Kept : Action::Removed;
      ++(answer != 0 ? report_.failed : report_.repaired);
    }
    if (visitor_.finding) visitor_.finding(kind, path, why, action);
  }

  const std::string directory_;
  const FsckOptions options_;
  const FsckVisitor& visitor_;
  Fd lock_;
  RealFiles direct_, buffered_;
  const uint32_t flushed_s_ = buffered_.flushed_s();
  std::unordered_set<Key, KeyHash> deleted_;
  Reader reader_;
  alignas(8) std::array<std::byte, kBlockFileHeaderBytes> page_;
  FsckReport report_;
  std::chrono::steady_clock::time_point last_progress_ = std::chrono::steady_clock::now();
};

}  // namespace

std::string_view name(Finding kind) {
  switch (kind) {
    case Finding::Corrupt: return "corrupt";
    case Finding::Misplaced: return "misplaced";
    case Finding::Leftover: return "leftover";
    case Finding::Blocked: return "blocked";
    case Finding::Unusable: return "unusable";
    case Finding::Foreign: return "foreign";
    case Finding::Unopened: return "unopened";
    case Finding::Unreadable: return "unreadable";
  }
  return "?";
}

std::string_view name(Action action) {
  switch (action) {
    case Action::None: return "";
    case Action::Removed: return "removed";
    case Action::Kept: return "kept aside";
    case Action::Failed: return "not removed";
  }
  return "?";
}

uint64_t FsckReport::wrong() const {
  uint64_t wrong = errors;
  for (size_t i = 0; i < kFindings; ++i) wrong += i == static_cast<size_t>(Finding::Foreign) ? 0 : found[i];
  return wrong - repaired;
}

FsckReport fsck(const std::string& directory, const FsckOptions& options, const FsckVisitor& visitor) {
  return Check(directory, options, visitor).run();
}

}  // namespace kv
