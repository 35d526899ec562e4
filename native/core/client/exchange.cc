#include "core/client/exchange.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "core/base/atomics.h"
#include "core/base/error.h"
#include "core/base/polling.h"

namespace kv {
namespace {

// An answer comes in microseconds, but a processor that fell asleep waiting for it takes tens to wake: look for that long, giving
// way to whoever wants the processor, before sleeping. (docs/design.md, "Decisions that differ": 58 us a round trip become 5.)
constexpr uint64_t kAnswerPollNs = 100'000;

constexpr int kAnswerLooks = 128;  // into the mailbox, before giving way
thread_local Polling answer_polling;

template <class Head>
void send(int socket, Head head, std::span<const uint8_t> body) {
  iovec out[2] = {{&head, sizeof head}, {const_cast<uint8_t*>(body.data()), body.size()}};
  msghdr message{};
  message.msg_iov = out;
  message.msg_iovlen = 2;
  ssize_t sent;
  do sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  if (sent >= 0) return;
  if (errno == EAGAIN) throw Error(Code::DeadlineExceeded, "the daemon does not take requests");
  throw Error(Code::Detached, errno_text("the daemon is gone"));
}

// The next message, looked for until then before sleeping. Valid until the next one in this thread.
std::span<const uint8_t> receive(int socket, uint64_t poll_until, std::vector<Fd>* descriptors) {
  thread_local std::vector<uint8_t> in(protocol::kMaxMessage);
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  iovec part{in.data(), in.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  int wait = poll_until ? MSG_DONTWAIT : 0;
  for (;;) {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | wait);
    if (got >= 0 || (errno != EINTR && (errno != EAGAIN || !wait))) break;
    if (monotonic_ns() >= poll_until || !answer_polling.give_way()) wait = 0;
  }
  if (got < 0 && errno == EAGAIN) throw Error(Code::DeadlineExceeded, "the daemon did not answer in time");
  if (got <= 0) throw Error(Code::Detached, got == 0 ? "the daemon closed the session" : errno_text("the daemon is gone"));
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t number = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < number; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      Fd owned(fd);
      if (descriptors) descriptors->push_back(std::move(owned));
    }
  }
  if (message.msg_flags & MSG_CTRUNC)  // of a daemon that is well: what it hands out found no number here
    throw Error(Code::Unavailable, "this process has no descriptor left for the daemon's memory (ulimit -n)");
  return {in.data(), static_cast<size_t>(got)};
}

std::vector<uint8_t> read_reply(const protocol::Request& request, std::span<const uint8_t> bytes) {
  protocol::Reader reader(bytes);
  const auto reply = reader.take<protocol::Reply>();
  if (!reader.ok() || reply.magic != protocol::kMagic || reply.op != request.op || reply.tag != request.tag)
    throw Error(Code::Detached, "the daemon's reply does not fit the request");
  const auto rest = reader.rest();
  if (reply.status != protocol::kOk) throw Error(static_cast<Code>(reply.status - 1), std::string(rest.begin(), rest.end()));
  return {rest.begin(), rest.end()};
}

// A knock that came too late to wake anybody is passed over.
std::vector<uint8_t> next_reply(int socket, const protocol::Request& request, uint64_t poll_until, std::vector<Fd>* descriptors) {
  for (;;) {
    const auto bytes = receive(socket, poll_until, descriptors);
    if (!protocol::is_knock(bytes)) return read_reply(request, bytes);
  }
}

}  // namespace

protocol::Request request_of(protocol::Op op, uint32_t count, uint32_t tag) {
  return {protocol::kMagic, static_cast<uint16_t>(op), 0, count, tag};
}

std::vector<uint8_t> exchange(int socket, const protocol::Request& request, std::span<const uint8_t> body,
                              std::vector<Fd>* descriptors, const std::function<void()>& meanwhile) {
  send(socket, request, body);
  if (meanwhile) meanwhile();
  const uint64_t now = monotonic_ns();
  return next_reply(socket, request, answer_polling.worthwhile(now) ? now + kAnswerPollNs : 0, descriptors);
}

// Whoever is turned away finds the reason here, perhaps behind the news that the request was lost.
std::vector<uint8_t> first_exchange(int socket, const protocol::Request& request, std::span<const uint8_t> body,
                                    std::vector<Fd>* descriptors) {
  const auto unless_gone = [](auto&& step) {
    try {
      step();
      return true;
    } catch (const Error& error) {
      if (error.code != Code::Detached) throw;
      return false;
    }
  };
  unless_gone([&] { send(socket, request, body); });
  std::span<const uint8_t> bytes;
  if (!unless_gone([&] { bytes = receive(socket, 0, descriptors); })) bytes = receive(socket, 0, descriptors);
  return read_reply(request, bytes);
}

std::optional<std::vector<uint8_t>> exchange_by_mailbox(Mailbox& box, int socket, const protocol::Request& request,
                                                        std::span<const uint8_t> body, const std::function<void()>& meanwhile) {
  if (sizeof request + body.size() > kMailboxBytes || request.tag == 0 || !box.attended.load(std::memory_order_acquire) ||
      !answer_polling.worthwhile(monotonic_ns()))
    return std::nullopt;
  std::memcpy(box.bytes, &request, sizeof request);
  if (!body.empty()) std::memcpy(box.bytes + sizeof request, body.data(), body.size());
  box.request_bytes.store(static_cast<uint32_t>(sizeof request + body.size()), std::memory_order_relaxed);
  box.asked.store(request.tag, std::memory_order_release);
  fence_full();
  if (!box.attended.load(std::memory_order_relaxed)) send(socket, protocol::Knock{}, {});
  if (meanwhile) meanwhile();
  const auto answered = [&] { return box.answered.load(std::memory_order_acquire) == request.tag; };
  for (const uint64_t until = monotonic_ns() + kAnswerPollNs;;) {
    for (int look = 0; look < kAnswerLooks && !answered(); ++look) relax();
    if (answered() || monotonic_ns() >= until || !answer_polling.give_way()) break;
  }
  if (!answered()) {
    box.asleep.store(request.tag, std::memory_order_relaxed);
    fence_full();
    while (!answered())
      if (const auto bytes = receive(socket, 0, nullptr); !protocol::is_knock(bytes)) return read_reply(request, bytes);
  }
  const size_t bytes = std::min<size_t>(box.answer_bytes.load(std::memory_order_relaxed), kMailboxBytes);
  return bytes == 0 ? next_reply(socket, request, 0, nullptr) : read_reply(request, {box.bytes, bytes});
}

}  // namespace kv
