// The AIO engine: three system calls of the kernel and an eventfd that each completion rings.

#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "core/base/error.h"
#include "core/files/engine.h"

namespace kv {
namespace {

std::string line_of(const char* path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) ? line : "?";
}

std::string setup_text(uint32_t depth, int error) {
  std::string text = errno_text("asynchronous I/O, " + std::to_string(depth) + " requests", error);
  if (error == EAGAIN)
    text += ": all queues of the host are taken, fs.aio-nr is " + line_of("/proc/sys/fs/aio-nr") + " of fs.aio-max-nr " +
            line_of("/proc/sys/fs/aio-max-nr");
  return text;
}

}  // namespace

AioEngine::AioEngine(uint32_t depth) : depth_(std::clamp<uint32_t>(depth, 1, kMaxDepth)) {
  event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_) throw Error(Code::Unavailable, errno_text("eventfd"));
  if (::syscall(SYS_io_setup, depth_, &context_) != 0) throw Error(Code::Unavailable, setup_text(depth_, errno));
}

AioEngine::~AioEngine() {
  ::syscall(SYS_io_destroy, context_);  // waits until nothing is in flight
}

bool AioEngine::submit(Transfer* transfer) {
  if (in_flight_ == depth_) return false;
  iocb block = {};
  block.aio_data = reinterpret_cast<uint64_t>(transfer);
  block.aio_lio_opcode = transfer->write ? IOCB_CMD_PWRITEV : IOCB_CMD_PREADV;
  block.aio_fildes = static_cast<uint32_t>(transfer->fd);
  block.aio_buf = reinterpret_cast<uint64_t>(transfer->parts);
  block.aio_nbytes = transfer->count;
  block.aio_offset = static_cast<int64_t>(transfer->offset);
  block.aio_flags = IOCB_FLAG_RESFD;
  block.aio_resfd = static_cast<uint32_t>(event_.get());
  iocb* list = &block;
  long taken;
  do taken = ::syscall(SYS_io_submit, context_, 1L, &list);
  while (taken < 0 && errno == EINTR);
  if (taken == 1) {
    ++in_flight_;
    return true;
  }
  // No slot: another completion frees one. With none in flight nothing would, so it is an error then.
  if (errno == EAGAIN && in_flight_ > 0) return false;
  refuse(transfer, errno);
  return true;
}

void AioEngine::refuse(Transfer* transfer, int error) {
  transfer->result = -error;
  refused_[refused_count_++] = transfer;
  ++in_flight_;
  const uint64_t wakeup = 1;
  KV_INVARIANT(::write(event_.get(), &wakeup, sizeof wakeup) == sizeof wakeup);
}

size_t AioEngine::completed(std::span<Transfer*> done) {
  uint64_t rung;
  if (::read(event_.get(), &rung, sizeof rung) < 0 && errno != EAGAIN) KV_INVARIANT(errno == EINTR);
  size_t count = 0;
  while (refused_count_ > 0 && count < done.size()) done[count++] = refused_[--refused_count_];
  while (count < done.size()) {
    io_event events[kMaxDepth];
    timespec now = {};
    const long most = static_cast<long>(std::min<size_t>(done.size() - count, kMaxDepth));
    const long got = ::syscall(SYS_io_getevents, context_, 0L, most, events, &now);
    if (got < 0 && errno == EINTR) continue;
    KV_INVARIANT(got >= 0);
    for (long i = 0; i < got; ++i) {
      auto* transfer = reinterpret_cast<Transfer*>(events[i].data);
      transfer->result = events[i].res;
      done[count++] = transfer;
    }
    if (got < most) break;
  }
  in_flight_ -= static_cast<uint32_t>(count);
  if (count == done.size() && in_flight_ > 0) {  // more may be done than fitted
    const uint64_t wakeup = 1;
    KV_INVARIANT(::write(event_.get(), &wakeup, sizeof wakeup) == sizeof wakeup);
  }
  return count;
}

}  // namespace kv
