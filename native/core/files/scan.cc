#include "core/files/scan.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <vector>

#include "core/base/error.h"
#include "core/files/files.h"
#include "core/format/segment.h"

namespace kv {
namespace {

constexpr size_t kBufferBytes = 32 << 10;  // of directory entries, per level

struct Entry {  // linux_dirent64; the name follows, ending in 0
  uint64_t inode;
  int64_t offset;
  uint16_t length;
  uint8_t type;
};
constexpr size_t kNameAt = offsetof(Entry, type) + 1;

struct alignas(8) Buffer : std::array<char, kBufferBytes> {};

bool hexadecimal(std::string_view text) { return !text.empty() && text.find_first_not_of("0123456789abcdef") == text.npos; }

class Walk {
 public:
  Walk(std::optional<Fanout> fanout, const Visitor& visitor) : fanout_(fanout), visitor_(visitor) { batch_.reserve(kScanBatch); }

  void run(int root) {
    directory(root, "", 0, true);
    flush();
  }

  Scanned result;

 private:
  // Calls entry(name, type) for each but "." and "..".
  template <class Each>
  void list(int fd, Each each) {
    const auto buffer = std::make_unique<Buffer>();
    while (result.complete) {
      const long got = ::syscall(SYS_getdents64, fd, buffer->data(), buffer->size());
      if (got < 0) return failed(errno);
      if (got == 0) return;
      for (long at = 0; at < got && result.complete;) {
        const auto* entry = reinterpret_cast<const Entry*>(buffer->data() + at);
        const std::string_view name(buffer->data() + at + kNameAt);
        at += entry->length;
        if (name == "." || name == "..") continue;
        if (visitor_.over && visitor_.over()) return void(result.complete = false);
        each(name, entry->type);
      }
    }
  }

  // `path` is relative to the root, with a "/" at its end; its directories' names together are the key's first digits.
  // `placed` where all of them have as many digits as the fan-out says.
  void directory(int fd, const std::string& path, uint32_t level, bool placed) {
    ++result.directories;
    list(fd, [&](std::string_view name, uint8_t type) {
      if (level == 0 && is_note_name(name)) return;
      struct stat about;
      const bool directory_name = names_level(name, level) || (level == 0 && (name == kTempDirectory || name == kAsideDirectory));
      // A directory on the way needs no stat: that is most of the work where there are many directories.
      if (type != DT_DIR || !directory_name) {
        if (::fstatat(fd, name.data(), &about, AT_SYMLINK_NOFOLLOW) != 0) {
          if (errno != ENOENT) failed(errno);  // else it went meanwhile
          return;
        }
        if (!S_ISDIR(about.st_mode) || !directory_name)
          return file(path, name, placed && (!fanout_ || level == fanout_->levels), about);
      }
      const Fd below(::openat(fd, name.data(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (!below) return errno == ENOENT ? void() : failed(errno);
      const std::string next = path + std::string(name) + "/";
      if (names_level(name, level))
        directory(below.get(), next, level + 1, placed && (!fanout_ || name.size() == fanout_->digits));
      else
        side(below.get(), next, name == kTempDirectory);
    });
  }

  // DIR/tmp or DIR/aside.
  void side(int fd, const std::string& path, bool temp) {
    ++result.directories;
    list(fd, [&](std::string_view name, uint8_t) {
      if (temp && name == kFlushedFile) return;
      struct stat about;
      if (::fstatat(fd, name.data(), &about, AT_SYMLINK_NOFOLLOW) != 0) return errno == ENOENT ? void() : failed(errno);
      if (!S_ISREG(about.st_mode)) return stray(kind_of(about), path, name, about);
      stray(!temp ? Stray::Aside : is_temp_name(name) ? Stray::Temp : Stray::Foreign, path, name, about);
    });
  }

  static bool names_level(std::string_view name, uint32_t level) {  // of any fan-out
    return hexadecimal(name) && level < kMaxFanoutLevels && name.size() <= kMaxFanoutDigits;
  }

  static Stray kind_of(const struct stat& about) {
    return S_ISLNK(about.st_mode) ? Stray::Link : S_ISDIR(about.st_mode) ? Stray::Directory : Stray::Special;
  }

  void file(const std::string& path, std::string_view name, bool placed, const struct stat& about) {
    if (!S_ISREG(about.st_mode)) return stray(kind_of(about), path, name, about);
    const std::optional<Key> key = key_of(name);
    if (!key) return stray(Stray::Foreign, path, name, about);
    size_t digits = 0;
    for (const char c : path)
      if (c != '/') placed &= c == name[digits++];
    if (!placed) return stray(Stray::Misplaced, path, name, about);
    ++result.files;
    result.bytes += static_cast<uint64_t>(about.st_size);
    const FoundFile found{*key, static_cast<uint64_t>(about.st_size), static_cast<uint32_t>(about.st_mtim.tv_sec)};
    if (visitor_.each) return visitor_.each(path + std::string(name), found);
    batch_.push_back(found);
    if (batch_.size() == kScanBatch) flush();
  }

  void stray(Stray kind, const std::string& path, std::string_view name, const struct stat& about) {
    ++result.strays;
    if (visitor_.stray) visitor_.stray(kind, path + std::string(name), static_cast<uint64_t>(about.st_size));
  }

  void flush() {
    if (batch_.empty() || !result.complete) return;
    if (visitor_.blocks && !visitor_.blocks(batch_)) result.complete = false;
    batch_.clear();
  }

  void failed(int error) {
    if (++result.errors == 1) result.first_error = error;
  }

  const std::optional<Fanout> fanout_;
  const Visitor& visitor_;
  std::vector<FoundFile> batch_;
};

}  // namespace

std::string_view name(Stray kind) {
  switch (kind) {
    case Stray::Temp: return "temporary";
    case Stray::Aside: return "aside";
    case Stray::Misplaced: return "misplaced";
    case Stray::Foreign: return "foreign";
    case Stray::Link: return "link";
    case Stray::Directory: return "directory";
    case Stray::Special: return "special";
  }
  return "?";
}

Scanned scan(const std::string& directory, std::optional<Fanout> fanout, const Visitor& visitor) {
  const Fd root(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!root) throw Error(Code::Unavailable, errno_text(directory));
  Walk walk(fanout, visitor);
  walk.run(root.get());
  return walk.result;
}

}  // namespace kv
