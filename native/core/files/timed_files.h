// The calls of one directory on a thread of its own, for a tier that has several: who calls waits a moment and no longer, so that
// a file system which does not return from a call holds up its own directory only.
//
// A call that takes longer answers -ETIMEDOUT, and so does every one after it, at once, until it has returned. Then what it did
// is undone, before any other call begins: a descriptor is closed, a file it made or named is removed. One that had not begun is
// not made. Invariant: of a call that answered -ETIMEDOUT nothing stays but a removal.
//
// What takes long by its nature (listing, what is read at start, a flush) goes through on the thread that asks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/files/files.h"

namespace kv {

class TimedFiles final : public Files {
 public:
  // The timeout is read at each call.
  TimedFiles(std::unique_ptr<Files> files, const std::atomic<uint64_t>& timeout_ms);
  ~TimedFiles() override;                                                 // waits for what has begun
  uint64_t overdue_since_ms() const { return overdue_since_ms_.load(); }  // 0: it answers. From any thread

  int open_read(const std::string& path, uint64_t* bytes) override;
  int create_temp(uint64_t bytes, std::string* temp) override;
  int take_over(const std::string& path, uint64_t bytes, std::string* temp) override;
  int publish(const std::string& temp, const std::string& path) override;
  int remove(const std::string& path) override;
  int aside(const std::string& path) override;
  void close(int fd) override;  // later, perhaps
  int keep_deleted(std::span<const Key> keys) override;
  uint32_t written_s(int fd, uint32_t after_s) override;  // 0 where it takes too long
  int count_written(const Written& written) override;
  int in_place() override;

  void make_directories(Fanout fanout) override { files_->make_directories(fanout); }
  uint32_t flushed_s() override { return files_->flushed_s(); }
  int keep_flushed(uint32_t second) override { return files_->keep_flushed(second); }
  int deleted(uint32_t most, std::vector<Key>* keys) override { return files_->deleted(most, keys); }
  Written written() override { return files_->written(); }

 private:
  // A call, with all it needs and all it says: who made it may be gone when it ends.
  struct Call {
    std::function<int(Files&, Call&)> make;
    std::function<void(Files&, Call&)> undo;  // of one that succeeded too late
    bool done = false, given_up = false;
    int result = 0;
    uint64_t bytes = 0;
    std::string temp;
  };
  int call(const std::shared_ptr<Call>& call);
  void work();

  const std::unique_ptr<Files> files_;
  const std::atomic<uint64_t>& timeout_ms_;
  std::mutex mutex_;
  std::condition_variable more_, done_;
  std::deque<std::shared_ptr<Call>> calls_;  // the first is being made
  bool stopping_ = false;
  std::atomic<uint64_t> overdue_since_ms_{0};
  std::thread thread_;
};

}  // namespace kv
