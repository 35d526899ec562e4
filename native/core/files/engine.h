// Moves bytes between memory and files, several transfers at once, each reported when it is done. Owns its queue; knows nothing
// of blocks, never opens or closes a file, never waits in submit() or completed().
//
// One thread uses an engine. Invariant: a transfer that submit() took comes back from completed() exactly once, and until then
// the engine, or the kernel for it, may touch its memory. The destructor waits for what is in flight.
#pragma once

#include <sys/uio.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/format/segment.h"

namespace kv {

// Up to two pieces of memory that lie in the file one after the other: a header and an extent. With an engine of direct I/O,
// offset, addresses and lengths are multiples of the alignment that choose_engine() named.
struct Transfer {
  int fd = -1;
  bool write = false;
  uint64_t offset = 0;
  iovec parts[2] = {};
  uint32_t count = 0;
  int64_t result = 0;  // bytes, possibly fewer than asked, or -errno
  void* user = nullptr;

  uint64_t bytes() const {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; ++i) sum += parts[i].iov_len;
    return sum;
  }
};

inline constexpr uint32_t kMaxDepth = 32;  // more in flight only adds latency

class Engine {
 public:
  virtual ~Engine() = default;
  // False if as many are in flight as may be: try again after a completion. A transfer that cannot even start is taken and comes
  // back from completed() with its error.
  virtual bool submit(Transfer* transfer) = 0;
  // Takes back what is done, and clears event_fd() unless more is done than fits.
  virtual size_t completed(std::span<Transfer*> done) = 0;
  virtual int event_fd() const = 0;  // readable when something is done
  virtual uint32_t depth() const = 0;
  virtual uint32_t in_flight() const = 0;
  virtual std::string name() const = 0;
};

// The kernel's own asynchronous I/O, for descriptors opened with O_DIRECT. Not io_uring: that goes on writing into the pool when
// its process is dead. Throws Unavailable if the host has no queue left, naming the limit.
class AioEngine final : public Engine {
 public:
  explicit AioEngine(uint32_t depth);
  ~AioEngine() override;
  bool submit(Transfer* transfer) override;
  size_t completed(std::span<Transfer*> done) override;
  int event_fd() const override { return event_.get(); }
  uint32_t depth() const override { return depth_; }
  uint32_t in_flight() const override { return in_flight_; }
  std::string name() const override { return "aio"; }

 private:
  void refuse(Transfer* transfer, int error);

  const uint32_t depth_;
  Fd event_;
  unsigned long context_ = 0;
  uint32_t in_flight_ = 0;             // with those refused
  Transfer* refused_[kMaxDepth] = {};  // what the kernel did not take
  uint32_t refused_count_ = 0;
};

// A few threads with the ordinary calls, for file systems without direct I/O. A transfer is short only at the file's end.
class ThreadEngine final : public Engine {
 public:
  explicit ThreadEngine(uint32_t depth);
  ~ThreadEngine() override;
  bool submit(Transfer* transfer) override;
  size_t completed(std::span<Transfer*> done) override;
  int event_fd() const override { return event_.get(); }
  uint32_t depth() const override { return depth_; }
  uint32_t in_flight() const override;
  std::string name() const override { return "threads"; }

 private:
  void work();

  const uint32_t depth_;
  Fd event_;
  mutable std::mutex mutex_;
  std::condition_variable more_;
  std::vector<Transfer*> waiting_;  // the next one last
  std::vector<Transfer*> done_;
  uint32_t in_flight_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

struct Choice {
  std::unique_ptr<Engine> engine;
  bool direct = false;     // whether files are to be opened with O_DIRECT
  uint32_t alignment = 1;  // of offsets, lengths and addresses
  std::string reason;      // for the log
  int problem = 0;         // why no file can be made there at present
};

// The engine for a directory of blocks, tried on a file made there. A disk that is full, read-only or failing is no reason to do
// without what lies on it, nor without memory: it gets threads. Throws Unavailable for any other error.
Choice choose_engine(const std::string& directory, uint32_t depth);

}  // namespace kv
