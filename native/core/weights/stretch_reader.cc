// One thread between the readers' list and the engine.

#include "core/weights/stretch_reader.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/format/block.h"

namespace kv {

constexpr size_t kTouchedParts = 4;  // at one time, before they are begun

struct StretchReader::Part {
  Request* request = nullptr;
  size_t stretch = 0;
  uint64_t offset = 0;  // in the file
  std::byte* memory = nullptr;
  uint64_t length = 0, need = 0, done = 0;
  bool here = false;
  Transfer transfer = {};

  // The rest of it, from a page on: a direct read begins nowhere else.
  Transfer* aim(int fd) {
    const uint64_t from = done / kPageBytes * kPageBytes;
    transfer = Transfer{.fd = fd, .offset = offset + from, .count = 1, .user = this};
    transfer.parts[0] = {memory + from, length - from};
    return &transfer;
  }
};

struct StretchReader::Request {
  std::vector<Part> parts;
  std::span<Stretch> stretches;
  size_t touched = 0, begun = 0, under_way = 0, summed = 0;
  std::optional<StretchFailure> failure;
};

StretchReader::StretchReader(std::unique_ptr<Engine> engine) : engine_(std::move(engine)), process_(::getpid()) {
  bell_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell_) throw Error(Code::Unavailable, errno_text("eventfd"));
  thread_ = std::thread([this] { run(); });
}

StretchReader::~StretchReader() { close(); }

void StretchReader::close() {
  std::call_once(ended_, [this] {
    if (::getpid() != process_) {
      thread_.detach();
      static_cast<void>(engine_.release());
      return;
    }
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
    }
    ring();
    changed_.notify_all();
    thread_.join();
  });
}

std::optional<StretchFailure> StretchReader::read(std::span<Stretch> stretches, bool urgent) {
  Request request{.parts = {}, .stretches = stretches, .failure = {}};
  for (size_t i = 0; i < stretches.size(); ++i) {
    const Stretch& stretch = stretches[i];
    for (uint64_t at = 0; at < stretch.length; at += kPartBytes)
      request.parts.push_back({.request = &request,
                               .stretch = i,
                               .offset = stretch.offset + at,
                               .memory = stretch.memory + at,
                               .length = std::min(kPartBytes, stretch.length - at),
                               .need = std::min(kPartBytes, stretch.need - std::min(stretch.need, at))});
    stretches[i].crc = 0;
  }
  std::unique_lock lock(mutex_);
  if (closed_) throw Error(Code::Closed, "the reader was closed");
  waiting_.insert(urgent ? waiting_.begin() : waiting_.end(), &request);
  while (request.touched < request.parts.size() && !request.failure && !closed_) {
    const size_t from = request.touched, to = std::min(from + kTouchedParts, request.parts.size());
    lock.unlock();
    for (size_t i = from; i < to; ++i) touch(request.parts[i]);
    lock.lock();
    request.touched = to;
    ring();
  }
  for (Part& part : request.parts) {
    changed_.wait(lock, [&] { return part.here || request.failure || closed_; });
    if (request.failure || closed_) break;
    lock.unlock();
    Stretch& stretch = stretches[part.stretch];
    stretch.crc = crc32c(part.memory, part.need, stretch.crc);
    lock.lock();
    ++request.summed;
  }
  changed_.wait(lock, [&] { return request.under_way == 0; });
  std::erase(waiting_, &request);                                 // what was not begun never is
  if (!request.failure && request.summed < request.parts.size())  // also where all is here: a checksum is of all, or none
    throw Error(Code::Closed, "the reader was closed");
  return request.failure;
}

// New pages cost more than reading into them where a hypervisor brings them, and submit() would wait for them on the one thread
// that keeps the disk busy. Whatever the kernel answers: then the pages come as they are written.
void StretchReader::touch(const Part& part) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(part.memory) / kPageBytes * kPageBytes;
  const uintptr_t to = reinterpret_cast<uintptr_t>(part.memory + part.length) / kPageBytes * kPageBytes;
  if (to > from) static_cast<void>(::madvise(reinterpret_cast<void*>(from), to - from, MADV_POPULATE_WRITE));
}

void StretchReader::ring() const {
  const uint64_t wakeup = 1;
  KV_INVARIANT(::write(bell_.get(), &wakeup, sizeof wakeup) == sizeof wakeup);
}

// ---------------------------------------------------------------- the thread

void StretchReader::run() {
  for (;;) {
    begin();
    {
      std::lock_guard lock(mutex_);
      if (closed_ && engine_->in_flight() == 0 && again_.empty()) return;
    }
    pollfd events[] = {{engine_->event_fd(), POLLIN, 0}, {bell_.get(), POLLIN, 0}};
    if (::poll(events, 2, -1) < 0) KV_INVARIANT(errno == EINTR);
    uint64_t rung;
    if (::read(bell_.get(), &rung, sizeof rung) < 0) KV_INVARIANT(errno == EAGAIN || errno == EINTR);
    Transfer* done[kMaxDepth];
    const size_t count = engine_->completed(done);
    if (count == 0) continue;
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) settle(*static_cast<Part*>(done[i]->user));
    changed_.notify_all();
  }
}

StretchReader::Part* StretchReader::next() {
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    Request& request = **at;
    if (closed_ || request.failure || request.begun == request.parts.size()) {
      at = waiting_.erase(at);
      continue;
    }
    if (request.begun < request.touched) {
      ++request.under_way;
      return &request.parts[request.begun++];
    }
    ++at;
  }
  return nullptr;
}

// Without the lock, for the kernel may take its time.
void StretchReader::begin() {
  for (;;) {
    if (engine_->in_flight() == engine_->depth()) return;
    Part* part = nullptr;
    if (!again_.empty()) {
      part = again_.front(), again_.pop_front();
    } else {
      std::lock_guard lock(mutex_);
      if ((part = next()) == nullptr) return;
    }
    if (!engine_->submit(part->aim(part->request->stretches[part->stretch].fd))) {
      again_.push_front(part);
      return;
    }
  }
}

void StretchReader::settle(Part& part) {
  Request& request = *part.request;
  const int64_t got = part.transfer.result;
  const uint64_t from = part.transfer.offset - part.offset;
  const uint64_t before = part.done;
  if (got > 0) part.done = std::max(part.done, from + static_cast<uint64_t>(got));
  if (part.done >= part.need && got >= 0) {
    part.here = true;
    --request.under_way;
    return;
  }
  if (got < 0 || part.done == before || closed_ || request.failure) {
    if (!request.failure && !(closed_ && got > 0))
      request.failure = {part.stretch, part.offset + part.done, got < 0 ? static_cast<int>(-got) : 0};
    --request.under_way;
    return;
  }
  again_.push_back(&part);  // a short read: the rest of it, before anything else
}

}  // namespace kv
