#include "core/files/timed_files.h"

#include <pthread.h>

#include <cerrno>
#include <chrono>

#include "core/base/polling.h"

namespace kv {
namespace {

// A file that was made, or lost its block's name, for somebody who has gone on without it.
void drop_temp(Files& files, int fd, const std::string& temp) {
  files.close(fd);
  files.remove(temp);
}

}  // namespace

TimedFiles::TimedFiles(std::unique_ptr<Files> files, const std::atomic<uint64_t>& timeout_ms)
    : files_(std::move(files)), timeout_ms_(timeout_ms), thread_([this] { work(); }) {}

TimedFiles::~TimedFiles() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  more_.notify_all();
  thread_.join();
}

void TimedFiles::work() {
  ::pthread_setname_np(::pthread_self(), "kv-directory");
  std::unique_lock lock(mutex_);
  for (;;) {
    more_.wait(lock, [this] { return stopping_ || !calls_.empty(); });
    if (calls_.empty()) return;
    const std::shared_ptr<Call> call = calls_.front();
    if (!call->given_up) {
      lock.unlock();
      const int result = call->make(*files_, *call);
      lock.lock();
      call->result = result;
      if (call->given_up && call->undo && result >= 0) {
        lock.unlock();
        call->undo(*files_, *call);
        lock.lock();
      }
    }
    call->done = true;
    calls_.pop_front();
    if (calls_.empty()) overdue_since_ms_.store(0);
    done_.notify_all();
  }
}

int TimedFiles::call(const std::shared_ptr<Call>& call) {
  const uint64_t began_ms = monotonic_ms();
  std::unique_lock lock(mutex_);
  if (overdue_since_ms_.load() != 0) return -ETIMEDOUT;
  calls_.push_back(call);
  more_.notify_one();
  if (done_.wait_for(lock, std::chrono::milliseconds(timeout_ms_.load()), [&] { return call->done; })) return call->result;
  call->given_up = true;
  overdue_since_ms_.store(began_ms);
  return -ETIMEDOUT;
}

int TimedFiles::open_read(const std::string& path, uint64_t* bytes) {
  const auto made = std::make_shared<Call>();
  made->make = [path](Files& files, Call& call) { return files.open_read(path, &call.bytes); };
  made->undo = [](Files& files, Call& call) { files.close(call.result); };
  const int result = call(made);
  if (result >= 0) *bytes = made->bytes;
  return result;
}

int TimedFiles::create_temp(uint64_t bytes, std::string* temp) {
  const auto made = std::make_shared<Call>();
  made->make = [bytes](Files& files, Call& call) { return files.create_temp(bytes, &call.temp); };
  made->undo = [](Files& files, Call& call) { drop_temp(files, call.result, call.temp); };
  const int result = call(made);
  if (result >= 0) *temp = made->temp;
  return result;
}

int TimedFiles::take_over(const std::string& path, uint64_t bytes, std::string* temp) {
  const auto made = std::make_shared<Call>();
  made->make = [path, bytes](Files& files, Call& call) { return files.take_over(path, bytes, &call.temp); };
  made->undo = [](Files& files, Call& call) { drop_temp(files, call.result, call.temp); };
  const int result = call(made);
  if (result >= 0) *temp = made->temp;
  return result;
}

int TimedFiles::publish(const std::string& temp, const std::string& path) {
  const auto made = std::make_shared<Call>();
  made->make = [temp, path](Files& files, Call&) { return files.publish(temp, path); };
  made->undo = [path](Files& files, Call&) { files.remove(path); };
  return call(made);
}

int TimedFiles::remove(const std::string& path) {
  const auto made = std::make_shared<Call>();
  made->make = [path](Files& files, Call&) { return files.remove(path); };
  return call(made);
}

int TimedFiles::aside(const std::string& path) {
  const auto made = std::make_shared<Call>();
  made->make = [path](Files& files, Call&) { return files.aside(path); };
  return call(made);
}

// Nobody waits for it, and it cannot be refused: as many wait here as files are open.
void TimedFiles::close(int fd) {
  const auto made = std::make_shared<Call>();
  made->make = [fd](Files& files, Call&) { return files.close(fd), 0; };
  std::lock_guard lock(mutex_);
  calls_.push_back(made);
  more_.notify_one();
}

int TimedFiles::keep_deleted(std::span<const Key> keys) {
  const auto made = std::make_shared<Call>();
  made->make = [kept = std::vector<Key>(keys.begin(), keys.end())](Files& files, Call&) { return files.keep_deleted(kept); };
  return call(made);
}

uint32_t TimedFiles::written_s(int fd, uint32_t after_s) {
  const auto made = std::make_shared<Call>();
  made->make = [fd, after_s](Files& files, Call& call) { return call.bytes = files.written_s(fd, after_s), 0; };
  return call(made) < 0 ? 0 : static_cast<uint32_t>(made->bytes);
}

int TimedFiles::count_written(const Written& written) {
  const auto made = std::make_shared<Call>();
  made->make = [written](Files& files, Call&) { return files.count_written(written); };
  return call(made);
}

int TimedFiles::in_place() {
  const auto made = std::make_shared<Call>();
  made->make = [](Files& files, Call&) { return files.in_place(); };
  return call(made);
}

}  // namespace kv
