#include "core/files/files.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>

#include "core/base/error.h"

namespace kv {
namespace {

constexpr std::string_view kTempSuffix = ".tmp";
constexpr int kNameTries = 16;  // for a name nobody has
constexpr int kOpenTries = 256, kLeaseNaps = 60'000;
constexpr timespec kLeaseNap{0, 1'000'000};
constexpr ssize_t kWrittenBytes = 32;

// As create_temp() made it, and nobody has it by another name.
bool is_ours(const struct stat& about) {
  return about.st_mode == (S_IFREG | 0600) && about.st_nlink == 1 && about.st_uid == ::geteuid();
}

bool is_allocated(const struct stat& about, uint64_t bytes) {
  constexpr uint64_t kUnit = 512;  // of st_blocks
  return static_cast<uint64_t>(about.st_size) == bytes && static_cast<uint64_t>(about.st_blocks) * kUnit >= bytes;
}

int answer(long result) { return result < 0 ? -errno : static_cast<int>(result); }

}  // namespace

bool is_temp_name(std::string_view name) {
  return name.size() == 16 + kTempSuffix.size() && name.ends_with(kTempSuffix) &&
         name.find_first_not_of("0123456789abcdef") == 16;
}

bool is_note_name(std::string_view name) { return name == kFlushedFile || name == kDeletedFile || name == kWrittenFile; }

int lock_directory(const std::string& directory) {
  const int fd = answer(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd < 0 || ::flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  const int error = errno;
  ::close(fd);
  return -error;
}

RealFiles::RealFiles(const std::string& directory, bool direct, bool make) : path_(directory), direct_(direct ? O_DIRECT : 0) {
  if (make && ::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) throw Error(Code::Unavailable, errno_text(directory));
  root_.reset(::open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!root_) throw Error(Code::Unavailable, errno_text(directory));
  if (make && ::mkdirat(root_.get(), kTempDirectory, 0700) != 0 && errno != EEXIST)
    throw Error(Code::Unavailable, errno_text(directory + "/" + kTempDirectory));
  if (::getrandom(&next_temp_, sizeof next_temp_, 0) != sizeof next_temp_) next_temp_ = static_cast<uint64_t>(::getpid()) << 32;
}

int RealFiles::open_beneath(const std::string& path, int flags, bool patient) const {
  open_how how = {};
  how.flags = static_cast<uint64_t>(flags | O_CLOEXEC);
  how.mode = flags & O_CREAT ? 0600 : 0;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS;
  // RESOLVE_BENEATH answers EAGAIN while somebody renames directories; so does O_NONBLOCK for a file that somebody has a lease
  // on, for 45 s maybe.
  int fd = -EAGAIN;
  const int tries = kOpenTries + (patient ? kLeaseNaps : 0);
  for (int i = 0; i < tries && (fd == -EAGAIN || fd == -EINTR); ++i) {
    if (i >= kOpenTries) ::nanosleep(&kLeaseNap, nullptr);
    fd = answer(::syscall(SYS_openat2, root_.get(), path.c_str(), &how, sizeof how));
  }
  return fd;
}

// In DIR/tmp, which somebody may have tidied up.
int RealFiles::open_temp(const std::string& path, int flags) const {
  const int fd = open_beneath(path, flags | O_CREAT | O_NOFOLLOW);
  if (fd != -ENOENT || (::mkdirat(root_.get(), kTempDirectory, 0700) != 0 && errno != EEXIST)) return fd;
  return open_beneath(path, flags | O_CREAT | O_NOFOLLOW);
}

// The directory of a path, made level by level if asked.
int RealFiles::open_parent(const std::string& path, bool make) const {
  const size_t slash = path.rfind('/');
  const std::string parent = slash == path.npos ? "." : path.substr(0, slash);
  int fd = open_beneath(parent, O_PATH | O_DIRECTORY);
  if (fd != -ENOENT || !make) return fd;
  for (size_t end = parent.find('/');; end = parent.find('/', end + 1)) {
    const std::string level = parent.substr(0, end);
    const size_t cut = level.rfind('/');
    const Fd above(open_beneath(cut == level.npos ? "." : level.substr(0, cut), O_PATH | O_DIRECTORY));
    if (!above) return -ENOENT;
    if (::mkdirat(above.get(), std::string(last_name(level)).c_str(), 0700) != 0 && errno != EEXIST) return -errno;
    if (end == parent.npos) break;
  }
  return open_beneath(parent, O_PATH | O_DIRECTORY);
}

int RealFiles::open_read(const std::string& path, uint64_t* bytes) {
  // O_NONBLOCK: a FIFO of that name would wait for its writer.
  constexpr int kFlags = O_RDONLY | O_NONBLOCK | O_NOFOLLOW;
  int fd = open_beneath(path, kFlags | O_NOATIME | direct_, false);
  if (fd == -EPERM) fd = open_beneath(path, kFlags | direct_, false);  // only its owner may read a file without a trace
  if (fd == -EINVAL) {                                                 // no direct I/O on a directory or a FIFO
    struct stat other;
    const Fd named(open_beneath(path, O_PATH | O_NOFOLLOW));
    if (named && ::fstat(named.get(), &other) == 0 && !S_ISREG(other.st_mode)) return -ENXIO;
  }
  if (fd < 0) return fd;
  struct stat about;
  const int problem = ::fstat(fd, &about) != 0 ? -errno : S_ISREG(about.st_mode) ? 0 : -ENXIO;
  if (problem != 0) {
    ::close(fd);
    return problem;
  }
  *bytes = static_cast<uint64_t>(about.st_size);
  return fd;
}

std::string RealFiles::new_temp_name() {
  char name[32];
  std::snprintf(name, sizeof name, "%s/%016llx.tmp", kTempDirectory, static_cast<unsigned long long>(next_temp_++));
  return name;
}

int RealFiles::create_temp(uint64_t bytes, std::string* temp) {
  int fd = -EEXIST;
  for (int i = 0; i < kNameTries && fd == -EEXIST; ++i) {
    *temp = new_temp_name();
    fd = open_temp(*temp, O_RDWR | O_EXCL | direct_);
  }
  if (fd < 0) return fd;
  int problem;
  do problem = answer(::fallocate(fd, 0, 0, static_cast<off_t>(bytes)));
  while (problem == -EINTR);
  if (problem == -EOPNOTSUPP) problem = answer(::ftruncate(fd, static_cast<off_t>(bytes)));
  if (problem == 0) return fd;
  ::close(fd);
  remove(*temp);
  return problem;
}

int RealFiles::move(const std::string& from, const std::string& to, unsigned flags) {
  const Fd source(open_parent(from, false));
  if (!source) return -ENOENT;
  const int parent = open_parent(to, true);
  if (parent < 0) return parent;
  const Fd target(parent);
  return answer(
      ::renameat2(source.get(), std::string(last_name(from)).c_str(), target.get(), std::string(last_name(to)).c_str(), flags));
}

int RealFiles::take_over(const std::string& path, uint64_t bytes, std::string* temp) {
  const int fd = open_beneath(path, O_RDWR | O_NONBLOCK | O_NOFOLLOW | direct_, false);
  if (fd < 0) return fd;
  int problem = -ESTALE;
  struct stat about;
  if (::fstat(fd, &about) == 0 && is_ours(about) && is_allocated(about, bytes)) {
    *temp = new_temp_name();
    problem = move(path, *temp, RENAME_NOREPLACE);
  }
  // A link made meanwhile is seen here. One whose maker found the name before the move and links after this look is not, and no
  // call could see it: that name then holds the block that is written, as its header says.
  if (problem == 0 && (::fstat(fd, &about) != 0 || !is_ours(about))) {
    remove(*temp);
    problem = -ESTALE;
  }
  if (problem == 0) return fd;
  ::close(fd);
  return problem;
}

int RealFiles::publish(const std::string& temp, const std::string& path) { return move(temp, path, 0); }

void RealFiles::make_directories(Fanout fanout) {
  const uint32_t bits = 4 * fanout.levels * fanout.digits;
  if (bits >= 32 || 1u << bits > kMostMade) return;
  for (uint32_t i = 0; i < 1u << bits; ++i) {
    Key key{};
    key.words[0] = __builtin_bswap64(uint64_t{i} << (64 - bits - (bits == 0)));  // a key's text begins with its first byte
    const Fd made(open_parent(path_of(key, fanout), true));
  }
}

int RealFiles::remove(const std::string& path) {
  const int parent = open_parent(path, false);
  if (parent < 0) return parent;
  const Fd directory(parent);
  return answer(::unlinkat(directory.get(), std::string(last_name(path)).c_str(), 0));
}

int RealFiles::aside(const std::string& path) {
  int result = -EEXIST;
  for (int i = 0; i < kNameTries && result == -EEXIST; ++i)
    result =
        move(path, std::string(kAsideDirectory) + "/" + std::string(last_name(path)) + "." + std::to_string(i), RENAME_NOREPLACE);
  // Kept already as often as anybody will look at it.
  return result == -EEXIST ? remove(path) : result;
}

void RealFiles::close(int fd) { ::close(fd); }

uint32_t RealFiles::flushed_s() {
  const int opened = open_beneath(kFlushedFile, O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
  if (opened == -ENOENT) return 0;
  const Fd fd(opened);
  char text[16];
  const ssize_t got = fd ? ::read(fd.get(), text, sizeof text) : -1;
  uint32_t second = 0;
  const auto [end, error] = std::from_chars(text, text + std::max<ssize_t>(got, 0), second);
  return got > 0 && error == std::errc() && end == text + got - 1 && *end == '\n' ? second : UINT32_MAX;
}

int RealFiles::keep_flushed(uint32_t second) {
  const std::string temp = std::string(kTempDirectory) + "/" + kFlushedFile, text = std::to_string(second) + "\n";
  const int opened = open_temp(temp, O_WRONLY | O_TRUNC | O_NONBLOCK);
  if (opened < 0) return opened;
  const Fd fd(opened);
  const ssize_t written = ::write(fd.get(), text.data(), text.size());
  if (written != static_cast<ssize_t>(text.size())) return written < 0 ? -errno : -ENOSPC;
  if (::fsync(fd.get()) != 0) return -errno;
  if (const int error = move(temp, kFlushedFile, 0); error != 0) return error;
  const int directory = open_beneath(".", O_RDONLY | O_DIRECTORY);
  return directory < 0 ? directory : answer(::fsync(Fd(directory).get()));
}

int RealFiles::deleted(uint32_t most, std::vector<Key>* keys) {
  const int opened = open_beneath(kDeletedFile, O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
  if (opened < 0) return opened == -ENOENT ? 0 : opened;
  const Fd fd(opened);
  struct stat about;
  if (::fstat(fd.get(), &about) != 0) return -errno;
  keys->resize(std::min<uint64_t>(most, static_cast<uint64_t>(about.st_size) / kKeyBytes));
  const ssize_t got = ::read(fd.get(), keys->data(), keys->size() * kKeyBytes);
  const int error = answer(std::min<ssize_t>(got, 0));
  keys->resize(error == 0 ? static_cast<size_t>(got) / kKeyBytes : 0);
  return error;
}

int RealFiles::keep_deleted(std::span<const Key> keys) {
  if (keys.empty()) {
    const int error = remove(kDeletedFile);
    return error == -ENOENT ? 0 : error;
  }
  const int opened = open_beneath(kDeletedFile, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOFOLLOW);
  if (opened < 0) return opened;
  const Fd fd(opened);
  const ssize_t written = ::write(fd.get(), keys.data(), keys.size_bytes());
  return written == static_cast<ssize_t>(keys.size_bytes()) ? 0 : written < 0 ? -errno : -ENOSPC;
}

uint32_t RealFiles::written_s(int fd, uint32_t after_s) {
  struct stat about;
  const uint32_t written = ::fstat(fd, &about) == 0 ? static_cast<uint32_t>(about.st_mtim.tv_sec) : 0;
  if (written > after_s || after_s == 0) return written;
  const timespec times[2] = {{0, UTIME_OMIT}, {static_cast<time_t>(after_s) + 1, 0}};
  return ::futimens(fd, times) == 0 ? after_s + 1 : written;
}

Written RealFiles::written() {
  const Fd fd(open_beneath(kWrittenFile, O_RDONLY | O_NONBLOCK | O_NOFOLLOW));
  char text[kWrittenBytes + 1] = {};
  unsigned day = 0;
  unsigned long long bytes = 0;
  if (!fd || ::read(fd.get(), text, kWrittenBytes) != kWrittenBytes || std::sscanf(text, "%10u %20llu", &day, &bytes) != 2)
    return {};
  return {day, bytes};
}

// Always as long, over itself: nothing is allocated, and a process that is killed leaves the one or the other.
int RealFiles::count_written(const Written& written) {
  const int opened = open_beneath(kWrittenFile, O_WRONLY | O_CREAT | O_NONBLOCK | O_NOFOLLOW);
  if (opened < 0) return opened;
  const Fd fd(opened);
  char text[kWrittenBytes + 1];
  std::snprintf(text, sizeof text, "%010u %020llu\n", written.day, static_cast<unsigned long long>(written.bytes));
  const ssize_t done = ::pwrite(fd.get(), text, kWrittenBytes, 0);
  return done == kWrittenBytes ? 0 : done < 0 ? -errno : -ENOSPC;
}

int RealFiles::in_place() {
  struct stat there, ours;
  if (::stat(path_.c_str(), &there) != 0 || ::fstat(root_.get(), &ours) != 0) return -errno;
  return there.st_dev == ours.st_dev && there.st_ino == ours.st_ino ? 0 : -ESTALE;
}

}  // namespace kv
