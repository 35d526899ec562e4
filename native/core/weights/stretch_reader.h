// Reads long stretches of files into memory, several parts of each at one time, and says the CRC32C of what came.
//
// Owns an engine and the one thread that keeps its queue full. Never computes a checksum on that thread, nor waits there for
// pages that the memory does not have yet: whoever waits for a stretch does both, part after part, while others are under way.
// Stretches are begun in the order in which they were asked for, so that the next one's reads stand in the queue before the last
// of this one are done. Any number of threads may read. Invariant: when read() returns, also with a failure, nothing writes into
// the memory any more.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include "core/files/engine.h"

namespace kv {

// length: of the read, whole pages for direct I/O; need: bytes of it that must be there, the others may lie behind the file's
// end. crc: of those bytes, after read().
struct Stretch {
  int fd = -1;
  uint64_t offset = 0;
  std::byte* memory = nullptr;
  uint64_t length = 0;
  uint64_t need = 0;
  uint32_t crc = 0;
};

struct StretchFailure {
  size_t stretch = 0;   // which
  uint64_t offset = 0;  // in the file
  int error = 0;        // errno; 0: the file ends there
};

class StretchReader {
 public:
  static constexpr uint64_t kPartBytes = 4 << 20;  // of one read

  explicit StretchReader(std::unique_ptr<Engine> engine);
  ~StretchReader();
  StretchReader(const StretchReader&) = delete;

  // Returns when all are there, or with the first failure. urgent: before what waits already. Throws Closed once close() was
  // called.
  std::optional<StretchFailure> read(std::span<Stretch> stretches, bool urgent = false);
  // Ends reads that run, with Closed, and the thread.
  void close();
  std::string engine() const { return engine_->name(); }

 private:
  struct Request;
  struct Part;

  void run();
  Part* next();  // to be submitted; under the lock
  void begin();
  void settle(Part& part);
  static void touch(const Part& part);
  void ring() const;

  std::unique_ptr<Engine> engine_;
  const pid_t process_;  // whose thread it is: a fork has none
  Fd bell_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request*> waiting_;  // with parts that were not begun
  std::deque<Part*> again_;       // refused by a full queue, or read in part; the thread's own
  bool closed_ = false;
  std::once_flag ended_;
  std::thread thread_;
};

}  // namespace kv
