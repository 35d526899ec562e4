// The one seam to the file system below a directory of blocks. Every call answers 0 (or a descriptor) or -errno and is named by
// a path relative to that directory, as path_of() gives it. Never reads or writes a block's bytes: that is an Engine's work.
//
//   DIR/a/b/<key>.kv       blocks; a file has such a name only when it was written whole
//   DIR/tmp/<random>.tmp   files being written; whatever lies there at start is a leftover
//   DIR/aside/<name>.<n>   what was corrupt and is kept (--keep-corrupt)
//   DIR/flushed            up to which second all blocks were flushed, whatever files of them are left
//   DIR/deleted            keys of deleted blocks whose files a daemon that ended left to the next one
//   DIR/written            how much was written today, where a daily budget bounds it
//
// Invariant: no call leaves the directory, follows a symbolic link or waits for what is not a regular file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/files/block_file.h"
#include "core/format/segment.h"

namespace kv {

inline constexpr char kTempDirectory[] = "tmp";
inline constexpr char kAsideDirectory[] = "aside";
inline constexpr char kFlushedFile[] = "flushed";  // and while it is written tmp/flushed
inline constexpr char kDeletedFile[] = "deleted";
inline constexpr char kWrittenFile[] = "written";
bool is_note_name(std::string_view name);  // of one of these three
bool is_temp_name(std::string_view name);  // of a file in DIR/tmp
inline std::string_view last_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

struct Written {     // into a directory
  uint32_t day = 0;  // since 1970
  uint64_t bytes = 0;
};

// Holds a directory of blocks for one daemon, or for one repair: -EWOULDBLOCK while another holds it. Closing lets go.
int lock_directory(const std::string& directory);

class Files {
 public:
  virtual ~Files() = default;
  // A descriptor and the file's length. -ELOOP: a link; -ENXIO: no regular file (directory, FIFO, socket, device).
  virtual int open_read(const std::string& path, uint64_t* bytes) = 0;
  // A descriptor for a new file whose blocks are allocated and whose length is `bytes`: a direct write into it extends nothing,
  // so it does not block the submission. Its name goes to `temp`.
  virtual int create_temp(uint64_t bytes, std::string* temp) = 0;
  // The file of a block that is given up, for another block of the same length: it loses its name, so that nobody finds it, and
  // keeps its room on the disk, so that writing allocates nothing. -ESTALE if it is not wholly ours to write over: another
  // length, holes, a second name, another owner, others' permissions. It has its name still, then.
  virtual int take_over(const std::string& path, uint64_t bytes, std::string* temp) = 0;
  // Gives a temporary file its name, replacing what has it. Makes the directories it needs.
  virtual int publish(const std::string& temp, const std::string& path) = 0;
  // The directories that blocks will need, all at once and from any thread, so that naming a file makes none. A fanout of more
  // than kMostMade is left to publish(), as is what cannot be made now.
  virtual void make_directories(Fanout fanout) = 0;
  static constexpr uint32_t kMostMade = 4096;
  virtual int remove(const std::string& path) = 0;  // a file, temporary or not; never a directory
  virtual int aside(const std::string& path) = 0;   // moves a file where nobody looks for it
  virtual void close(int fd) = 0;
  // What was written up to that second is flushed: 0 if nothing ever was, all there is if what is there cannot be read. To be
  // kept it is on the disk when the call returns; from any thread, one at a time.
  virtual uint32_t flushed_s() = 0;
  virtual int keep_flushed(uint32_t second) = 0;
  // What keep_deleted() was given last, `most` of it. It outlives this process, not a loss of power. Of none there is no file.
  virtual int deleted(uint32_t most, std::vector<Key>* keys) = 0;
  virtual int keep_deleted(std::span<const Key> keys) = 0;
  // The second a file was last written in, made later than `after_s` where it is not: a clock may have been set back.
  virtual uint32_t written_s(int fd, uint32_t after_s) = 0;
  // What was counted last, nothing if that cannot be read. It outlives this process, not the machine.
  virtual Written written() = 0;
  virtual int count_written(const Written& written) = 0;
  // 0: the directory's path leads to it. -ESTALE: to another one, by a mount or a rename; or why it leads nowhere.
  virtual int in_place() = 0;
};

class RealFiles final : public Files {
 public:
  // Throws Unavailable that names the directory. `direct`: open with O_DIRECT. `make`: make the directory (0700) and DIR/tmp.
  RealFiles(const std::string& directory, bool direct, bool make = true);
  int open_read(const std::string& path, uint64_t* bytes) override;
  int create_temp(uint64_t bytes, std::string* temp) override;
  int take_over(const std::string& path, uint64_t bytes, std::string* temp) override;
  int publish(const std::string& temp, const std::string& path) override;
  void make_directories(Fanout fanout) override;
  int remove(const std::string& path) override;
  int aside(const std::string& path) override;
  void close(int fd) override;
  uint32_t flushed_s() override;
  int keep_flushed(uint32_t second) override;
  int deleted(uint32_t most, std::vector<Key>* keys) override;
  int keep_deleted(std::span<const Key> keys) override;
  uint32_t written_s(int fd, uint32_t after_s) override;
  Written written() override;
  int count_written(const Written& written) override;
  int in_place() override;

 private:
  // `patient`: waits for a lease that somebody has on the file, a minute at most. A thread that serves a disk has no such time.
  int open_beneath(const std::string& path, int flags, bool patient = true) const;
  int open_temp(const std::string& path, int flags) const;
  int open_parent(const std::string& path, bool make) const;
  std::string new_temp_name();
  int move(const std::string& from, const std::string& to, unsigned flags);

  const std::string path_;
  Fd root_;
  const int direct_;  // O_DIRECT or 0
  uint64_t next_temp_;
};

}  // namespace kv
