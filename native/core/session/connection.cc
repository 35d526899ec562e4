#include "core/session/connection.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace kv {

void watch(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  KV_INVARIANT(::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
}

void unwatch(int epoll, const Connection& connection) {
  ::epoll_ctl(epoll, EPOLL_CTL_DEL, connection.socket.get(), nullptr);
  if (connection.process) ::epoll_ctl(epoll, EPOLL_CTL_DEL, connection.process.get(), nullptr);
}

std::optional<std::span<const uint8_t>> receive(int socket, std::vector<uint8_t>& buffer) {
  iovec data{buffer.data(), buffer.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;  // no control buffer: descriptors a client sends are discarded by the kernel
  const ssize_t received = ::recvmsg(socket, &message, MSG_DONTWAIT);
  if (received < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (received <= 0 || message.msg_flags & MSG_TRUNC) return std::span<const uint8_t>{};
  return std::span<const uint8_t>(buffer.data(), static_cast<size_t>(received));
}

bool send_reply(int socket, const protocol::Reply& reply, std::span<const uint8_t> body, std::span<const int> descriptors) {
  iovec parts[2] = {{const_cast<protocol::Reply*>(&reply), sizeof reply}, {const_cast<uint8_t*>(body.data()), body.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  return ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
}

uint16_t status_of(const Error& error) { return static_cast<uint16_t>(1 + static_cast<int>(error.code)); }

std::span<const uint8_t> text_of(const Error& error) {
  const auto* text = reinterpret_cast<const uint8_t*>(error.what());
  return {text, std::min<size_t>(std::strlen(error.what()), 1024)};
}

double cpu_of(const std::thread& thread) {
  clockid_t clock;
  timespec t{};
  if (thread.joinable() && ::pthread_getcpuclockid(const_cast<std::thread&>(thread).native_handle(), &clock) == 0)
    ::clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void need_few(const protocol::Request& request) {
  if (request.count > kMaxKeysPerMessage)
    throw Error(Code::InvalidArgument, "the message announces " + std::to_string(request.count) + " items, the limit is " +
                                           std::to_string(kMaxKeysPerMessage));
}

}  // namespace kv
