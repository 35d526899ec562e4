// libFuzzer: what a client may send. One input is a few packets (u16 length, bytes) to a real session socket over an in-memory
// store; each is answered in its turn or ends the connection. Every thousand inputs the store checks itself.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "tests/session_fixture.h"

namespace {

using kv::protocol::Op;

constexpr size_t kMaxPackets = 16;
constexpr uint64_t kCheckEvery = 1000;

struct Session {
  explicit Session(const std::string& path) {
    socket.reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    KV_INVARIANT(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  }

  void attach() {
    std::vector<uint8_t> packet;
    kv::protocol::append(packet, kv::protocol::Request{kv::protocol::kMagic, static_cast<uint16_t>(Op::Attach), 0, 1, 1});
    kv::protocol::Attach body = {};
    body.version = kv::protocol::kVersion;
    body.max_pins = 16;
    std::memcpy(body.name, "test", 4);
    kv::protocol::append(packet, body);
    KV_INVARIANT(speak(packet));
  }

  // False if the connection is over. A server that neither answers nor hangs up is wrong.
  bool speak(const std::vector<uint8_t>& packet) {
    if (::send(socket.get(), packet.data(), packet.size(), MSG_NOSIGNAL) < 0) return false;
    pollfd event{socket.get(), POLLIN, 0};
    KV_INVARIANT(::poll(&event, 1, 20'000) == 1);
    static uint8_t reply[kv::protocol::kMaxMessage + 1];
    char control[CMSG_SPACE(8 * sizeof(int))];
    iovec part{reply, sizeof reply};
    msghdr message = {};
    message.msg_iov = &part, message.msg_iovlen = 1, message.msg_control = control, message.msg_controllen = sizeof control;
    const ssize_t got = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
    if (got <= 0) return false;
    for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr; each = CMSG_NXTHDR(&message, each))
      for (size_t at = 0; at + sizeof(int) <= each->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(each) + at, sizeof fd);
        ::close(fd);
      }
    KV_INVARIANT(static_cast<size_t>(got) >= sizeof(kv::protocol::Reply));
    kv::protocol::Reply head;
    std::memcpy(&head, reply, sizeof head);
    kv::protocol::Request request;
    std::memcpy(&request, packet.data(), sizeof request);
    KV_INVARIANT(head.op == request.op && head.tag == request.tag);
    return true;
  }

  kv::Fd socket;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static kv::test::Daemon daemon;
  static std::optional<Session> session;
  static uint64_t inputs = 0;
  for (size_t packets = 0; size >= 2 && packets < kMaxPackets; ++packets) {
    const size_t length = std::min<size_t>(data[0] | data[1] << 8, size - 2);
    // An empty packet cannot be told from an end.
    const std::vector<uint8_t> packet(data + 2, data + 2 + length);
    data += 2 + length, size -= 2 + length;
    if (packet.size() < sizeof(kv::protocol::Request)) continue;
    if (!session) {
      session.emplace(daemon.path);
      session->attach();
    }
    if (!session->speak(packet)) session.reset();
  }
  if (++inputs % kCheckEvery == 0) daemon.rig.store->check_integrity();  // throws what is wrong
  return 0;
}
