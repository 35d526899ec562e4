#include "core/peer/channel.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/base/processor.h"

namespace kv::peer {
namespace {

constexpr size_t kInBytes = 64 << 10;
constexpr size_t kOutBytes = 64 << 10;
constexpr size_t kMaxParts = 256;
constexpr uint64_t kFlushBytes = 512 << 10;
constexpr size_t kEncryptBytes = 128 << 10;      // at a time, and sent while they are in the cache
constexpr uint64_t kDirectBytes = 16 << 10;      // what is larger is received where it belongs
constexpr uint64_t kAloneBytes = 128 << 10;      // and of what is larger nothing else, nor of what is behind it, but a head
constexpr uint64_t kLookNs = 20'000;             // for more, before it sleeps
constexpr uint64_t kPieceBytes = 256 << 10;      // summed up while it is in the cache
constexpr uint64_t kSlowestBytesPerS = 4 << 20;  // who sends slower is as good as frozen

bool wait_for(int fd, short events, int timeout_ms) {
  pollfd polled{fd, events, 0};
  int ready;
  while ((ready = ::poll(&polled, 1, timeout_ms)) < 0 && errno == EINTR) continue;
  return ready > 0;
}

void set(int fd, int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof value); }

}  // namespace

Channel::Channel(Fd socket) : socket_(std::move(socket)), in_(kInBytes) {
  out_.reserve(kOutBytes), parts_.reserve(kMaxParts);
  ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  set(socket_.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  set(socket_.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket_.get(), IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(socket_.get(), IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(socket_.get(), IPPROTO_TCP, TCP_KEEPCNT, 3);
}

Channel Channel::connect(const std::string& address, uint16_t port, int timeout_ms) {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw Broken(Broken::Why::Gone, errno_text("socket"));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  if (::inet_pton(AF_INET, address.c_str(), &to.sin_addr) != 1) throw Broken(Broken::Why::Gone, address + " is no IPv4 address");
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) < 0) {
    if (errno != EINPROGRESS) throw Broken(Broken::Why::Gone, errno_text("connect"));
    if (!wait_for(socket.get(), POLLOUT, timeout_ms)) throw Broken(Broken::Why::Stalled, "connect: no answer");
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) throw Broken(Broken::Why::Gone, errno_text("connect", error));
  }
  return Channel(std::move(socket));
}

// ---------------------------------------------------------------- out

void Channel::append(Frame head, std::span<const std::byte> payload) {
  head.head_crc = crc32c(&head, offsetof(Frame, head_crc));
  const size_t at = out_.size();
  out_.resize(at + sizeof head);
  std::memcpy(out_.data() + at, &head, sizeof head);
  parts_.push_back({out_.data() + at, sizeof head});
  if (!payload.empty()) parts_.push_back({const_cast<std::byte*>(payload.data()), payload.size()});
  queued_ += sizeof head + payload.size();
}

void Channel::put(Frame head, std::span<const std::byte> payload, bool copy) {
  head.bytes = payload.size();
  head.payload_crc = crc32c(payload.data(), payload.size());
  if (!copy || payload.empty()) return put_summed(head, payload);
  KV_INVARIANT(payload.size() + 2 * sizeof head <= kOutBytes);
  if (out_.size() + payload.size() + sizeof head > kOutBytes || parts_.size() + 2 > kMaxParts) flush();
  const size_t at = out_.size();
  out_.resize(at + payload.size());
  std::memcpy(out_.data() + at, payload.data(), payload.size());
  append(head, {out_.data() + at, payload.size()});
}

void Channel::put_summed(Frame head, std::span<const std::byte> payload) {
  head.bytes = payload.size();
  if (out_.size() + sizeof head > kOutBytes || parts_.size() + 2 > kMaxParts || queued_ > kFlushBytes) flush();
  append(head, payload);
}

void Channel::flush() {
  const uint64_t end_ns = monotonic_ns() + (uint64_t{2000} + queued_ * 1000 / kSlowestBytesPerS) * kNsPerMs;
  if (!tls_) {
    send(parts_, end_ns);
  } else {
    for (const iovec& part : parts_) {
      std::span left(static_cast<const std::byte*>(part.iov_base), part.iov_len);
      while (!left.empty()) {
        const size_t n = std::min(left.size(), kEncryptBytes);
        tls_->encrypt(left.first(n));
        left = left.subspan(n);
        if (tls_->out().size() >= kEncryptBytes) send_encrypted(end_ns);
      }
    }
    tls_->finish();
    send_encrypted(end_ns);
  }
  parts_.clear(), out_.clear();
  queued_ = 0;
}

void Channel::send_encrypted(uint64_t end_ns) {
  iovec all{tls_->out().data(), tls_->out().size()};
  if (all.iov_len) send({&all, 1}, end_ns);
  tls_->out().clear();
}

void Channel::send(std::span<iovec> parts, uint64_t end_ns) {
  while (!parts.empty()) {
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = std::min<size_t>(parts.size(), IOV_MAX);
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN) throw Broken(Broken::Why::Gone, errno_text("send"));
    if (sent < 0) {
      if (monotonic_ns() > end_ns || !wait_for(socket_.get(), POLLOUT, kStallMs))
        throw Broken(Broken::Why::Stalled, "it takes nothing");
      continue;
    }
    for (auto left = static_cast<size_t>(sent); left;) {
      iovec& part = parts.front();
      const size_t taken = std::min(left, part.iov_len);
      part.iov_base = static_cast<std::byte*>(part.iov_base) + taken;
      part.iov_len -= taken, left -= taken;
      if (!part.iov_len) parts = parts.subspan(1);
    }
  }
}

void Channel::secure(const TlsIdentity& identity, const std::string& node, int timeout_ms) {
  const uint64_t end_ns = monotonic_ns() + static_cast<uint64_t>(timeout_ms) * kNsPerMs;
  tls_ = std::make_unique<TlsStream>(socket_.get(), identity, node);
  for (bool done = false; !done;) {
    try {
      done = tls_->handshake();
    } catch (const Broken&) {
      iovec alert{tls_->out().data(), tls_->out().size()};
      if (alert.iov_len) send({&alert, 1}, 0);
      throw;
    }
    send_encrypted(end_ns);
    const uint64_t now_ns = monotonic_ns();
    const int left_ms = now_ns < end_ns ? static_cast<int>((end_ns - now_ns) / kNsPerMs) + 1 : 0;
    if (!done && !wait_for(socket_.get(), POLLIN, left_ms)) throw Broken(Broken::Why::Stalled, "no handshake in time");
  }
}

// ---------------------------------------------------------------- in

// Some bytes, at least one. `head_follows`: where more is there than these, the next frame's head, or its beginning, goes into
// in_, which is empty.
size_t Channel::receive(std::byte* to, size_t bytes, uint64_t end_ns, int stall_ms, bool head_follows) {
  for (uint64_t looks_until_ns = 0;;) {
    ssize_t got;
    if (tls_ || !head_follows) {
      got = tls_ ? tls_->receive(to, bytes) : ::recv(socket_.get(), to, bytes, 0);
    } else {
      iovec parts[] = {{to, bytes}, {in_.data(), sizeof(Frame)}};
      got = ::readv(socket_.get(), parts, 2);
      if (got > static_cast<ssize_t>(bytes))
        in_at_ = 0, in_end_ = static_cast<size_t>(got) - bytes, got = static_cast<ssize_t>(bytes);
    }
    if (got > 0) return static_cast<size_t>(got);
    if (got == 0) throw Broken(Broken::Why::Gone, "it hung up");
    if (errno == EINTR) continue;
    if (errno != EAGAIN) throw Broken(Broken::Why::Gone, errno_text("receive"));
    if (stall_ms >= 0 && monotonic_ns() > end_ns) throw Broken(Broken::Why::Stalled, "nothing came in time");
    if (stall_ms >= 0 && look_on(looks_until_ns)) continue;
    if (!wait_for(socket_.get(), POLLIN, stall_ms)) throw Broken(Broken::Why::Stalled, "nothing came in time");
  }
}

// Looks for more without sleeping, for a moment: to be woken takes longer, and of the sender's time too. Not where it would keep
// the sender from its processor. False: it is over.
bool Channel::look_on(uint64_t& until_ns) {
  uint64_t now_ns = monotonic_ns();
  if (!until_ns) until_ns = looks_.worthwhile(now_ns) && incoming() != this_processor() ? now_ns + kLookNs : now_ns;
  for (bool on = true; on && now_ns < until_ns;) {
    if (wait_for(socket_.get(), POLLIN, 0)) return true;
    relax();
    const uint64_t before_ns = std::exchange(now_ns, monotonic_ns());
    on = looks_.looked(before_ns, now_ns);
  }
  return false;
}

void Channel::take(std::byte* to, uint64_t bytes) { take_rest(to, bytes, false, false); }

void Channel::take_rest(std::byte* to, uint64_t bytes, bool direct, bool head_follows) {
  if (bytes <= in_end_ - in_at_) {  // the usual case of small frames: nothing to wait for, no clock to read
    std::memcpy(to, in_.data() + in_at_, bytes);
    in_at_ += bytes;
    return;
  }
  const uint64_t end_ns = monotonic_ns() + (uint64_t{2000} + bytes * 1000 / kSlowestBytesPerS) * kNsPerMs;
  while (bytes) {
    if (in_at_ == in_end_ && (direct || bytes >= kDirectBytes)) {
      const size_t got = receive(to, bytes, end_ns, kStallMs, head_follows);
      to += got, bytes -= got;
    } else {
      if (in_at_ == in_end_) in_at_ = 0, in_end_ = receive(in_.data(), in_.size(), end_ns, kStallMs);
      const size_t there = std::min<uint64_t>(bytes, in_end_ - in_at_);
      std::memcpy(to, in_.data() + in_at_, there);
      in_at_ += there, to += there, bytes -= there;
    }
    if (bytes && monotonic_ns() > end_ns) throw Broken(Broken::Why::Stalled, "it trickles");
  }
}

uint32_t Channel::take_summed(std::byte* to, uint64_t bytes, uint32_t crc) {
  const bool large = bytes >= kAloneBytes;
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t piece = std::min(kPieceBytes, bytes - done);
    take_rest(to + done, piece, large, large && done + piece == bytes);
    crc = crc32c(to + done, piece, crc);
    done += piece;
  }
  large_ = large;
  return crc;
}

void Channel::skip(uint64_t bytes) {
  std::vector<std::byte> nowhere(std::min(bytes, kPieceBytes));
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t piece = std::min(kPieceBytes, bytes - done);
    take(nowhere.data(), piece);
    done += piece;
  }
}

Frame Channel::take_head(int timeout_ms) {
  if (in_at_ == in_end_) {
    in_at_ = in_end_ = 0;
    const uint64_t end_ns = monotonic_ns() + static_cast<uint64_t>(std::max(timeout_ms, 0)) * kNsPerMs;
    in_end_ = receive(in_.data(), large_ ? sizeof(Frame) : in_.size(), end_ns, timeout_ms);
  }
  Frame head;
  take(reinterpret_cast<std::byte*>(&head), sizeof head);
  if (head.magic != kMagic || head.head_crc != crc32c(&head, offsetof(Frame, head_crc))) malformed("what came is no frame");
  return head;
}

void Channel::expect(const Frame& head, Kind kind, uint64_t bytes) {
  if (head.kind == static_cast<uint16_t>(Kind::Refused)) throw Broken(Broken::Why::Refused, "it refused");
  if (head.kind != static_cast<uint16_t>(kind) || head.bytes != bytes) malformed("a frame that does not belong here");
}

void Channel::take_checked(const Frame& head, std::byte* to) {
  if (take_summed(to, head.bytes) != head.payload_crc) throw Broken(Broken::Why::Corrupt, "a checksum differs");
}

bool Channel::hung_up() const {
  pollfd polled{socket_.get(), POLLIN | POLLRDHUP, 0};
  return in_at_ != in_end_ || (tls_ && tls_->buffered()) || ::poll(&polled, 1, 0) > 0;
}

void Channel::cut() const { ::shutdown(socket_.get(), SHUT_RDWR); }

void Channel::hear_no_more() const { ::shutdown(socket_.get(), SHUT_RD); }

// The processor that what comes is taken in on, plus 1: on one host it is that of who sends. 0: not known.
uint32_t Channel::incoming() const {
  int processor = -1;
  socklen_t size = sizeof processor;
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_INCOMING_CPU, &processor, &size) != 0) return 0;
  return static_cast<uint32_t>(processor + 1);
}

uint32_t Channel::beside() const {
  sockaddr_in here{}, there{};
  socklen_t size = sizeof here;
  if (::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&here), &size) != 0) return 0;
  size = sizeof there;
  if (::getpeername(socket_.get(), reinterpret_cast<sockaddr*>(&there), &size) != 0) return 0;
  return here.sin_family == AF_INET && here.sin_addr.s_addr == there.sin_addr.s_addr ? incoming() : 0;
}

}  // namespace kv::peer
