// Which engine a directory gets: the file system is asked (STATX_DIOALIGN), and whatever it says is tried on a file of ours.

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "core/base/error.h"
#include "core/files/engine.h"
#include "core/files/files.h"
#include "core/format/block.h"

namespace kv {
namespace {

// What the file system says of direct I/O: the alignment, 0 for none, nothing if it does not say.
std::optional<uint32_t> said(int fd) {
#ifdef STATX_DIOALIGN
  struct statx about = {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &about) == 0 && about.stx_mask & STATX_DIOALIGN)
    return std::max(about.stx_dio_offset_align, about.stx_dio_mem_align);
#else
  (void)fd;
#endif
  return std::nullopt;
}

// Writes and reads a page of the file directly. The finest alignment that works, 0 if none does.
uint32_t tried(int fd) {
  if (::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_DIRECT) != 0) return 0;
  const std::unique_ptr<void, void (*)(void*)> page(std::aligned_alloc(kPageBytes, kPageBytes), std::free);
  std::memset(page.get(), 0, kPageBytes);
  if (::pwrite(fd, page.get(), kPageBytes, 0) != static_cast<ssize_t>(kPageBytes)) return 0;
  auto* bytes = static_cast<std::byte*>(page.get());
  for (const uint32_t alignment : {static_cast<uint32_t>(kLayerAlign), static_cast<uint32_t>(kPageBytes)})
    if (::pread(fd, bytes + alignment % kPageBytes, alignment, alignment % kPageBytes) == alignment) return alignment;
  return 0;
}

// Some file systems accept direct I/O and do it with the processor, inside the submission.
const char* copying(int fd) {
  struct statfs about;
  if (::fstatfs(fd, &about) != 0) return nullptr;
  if (about.f_type == TMPFS_MAGIC) return "a tmpfs copies inside the submission";
  if (about.f_type == RAMFS_MAGIC) return "a ramfs has no direct I/O";
  return nullptr;
}

Choice threads(uint32_t depth, const std::string& why) {
  return {std::make_unique<ThreadEngine>(depth), false, 1, "threads: " + why};
}

}  // namespace

Choice choose_engine(const std::string& directory, uint32_t depth) {
  RealFiles files(directory, false);
  std::string temp;
  const int made = files.create_temp(kPageBytes, &temp);
  if (made == -ENOSPC || made == -EDQUOT || made == -EROFS || made == -EIO) {
    Choice choice = threads(depth, errno_text("direct I/O could not be tried", -made));
    choice.problem = -made;
    return choice;
  }
  if (made < 0) throw Error(Code::Unavailable, errno_text(directory + ": no file can be made there", -made));
  const Fd fd(made);
  files.remove(temp);
  if (const char* why = copying(fd.get())) return threads(depth, why);
  const std::optional<uint32_t> stated = said(fd.get());
  if (stated == 0u) return threads(depth, "the file system has no direct I/O");
  const uint32_t found = tried(fd.get());
  if (found == 0) return threads(depth, "direct I/O was refused");
  const uint32_t alignment = std::max(found, stated.value_or(0));
  if (alignment > kPageBytes) return threads(depth, "direct I/O in multiples of " + std::to_string(alignment) + " bytes only");
  try {
    return {std::make_unique<AioEngine>(depth), true, alignment,
            "aio: direct I/O in multiples of " + std::to_string(alignment) + " bytes" + (stated ? "" : ", found by trying")};
  } catch (const Error& error) {
    return threads(depth, error.what());
  }
}

}  // namespace kv
