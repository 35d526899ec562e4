// Goal: a block that comes layer by layer, over however many connections, is given up only when nothing more of it comes.
// Method: a peer that the test plays: it sends one layer more on each connection, and hangs up.
#include <arpa/inet.h>
#include <sys/socket.h>

#include <thread>

#include "core/peer/server.h"
#include "core/peer/tier.h"
#include "tests/peer_answers.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint32_t kManyLayers = 14;  // more than the waits for one that nobody sends on are good for
const peer::Secret kSalt{7, 7, 7};

// One layer a visit, then silence of the worst kind.
struct Stutterer {
  explicit Stutterer(std::vector<Piece> pieces) : honest(std::move(pieces)) {
    sockaddr_in at{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t size = sizeof at;
    KV_INVARIANT(::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), size) == 0 && ::listen(listener.get(), 64) == 0 &&
                 ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
    port = ntohs(at.sin_port);
    accepting = std::jthread([this] {
      for (int socket; (socket = ::accept(listener.get(), nullptr, nullptr)) >= 0;)
        visits.emplace_back([this, socket] { serve(socket); });
    });
  }
  ~Stutterer() {
    ::shutdown(listener.get(), SHUT_RDWR);
    accepting.join();
  }
  void serve(int socket) {
    try {
      peer::Channel channel{Fd(socket)};
      peer::admit(channel, "a", [](const std::string&, const std::string&) { return std::optional(kSalt); });
      for (;;) {
        const Frame head = channel.take_head(-1);
        channel.skip(head.bytes);
        if (head.kind == static_cast<uint16_t>(Kind::Fetch)) return answer(channel, head.request);
        channel.put({.kind = static_cast<uint16_t>(Kind::Pong), .request = head.request}, {});
        channel.flush();
      }
    } catch (const peer::Broken&) {
      // It hung up.
    }
  }
  void answer(peer::Channel& channel, uint32_t request) {
    const uint32_t most = ++asked;
    for (const Piece& piece : honest) {
      if (piece.head.kind == static_cast<uint16_t>(Kind::Layer) && piece.head.layer >= most) break;
      Frame head = piece.head;
      head.request = request;
      channel.put(head, piece.payload);
    }
    channel.flush();
  }

  std::vector<Piece> honest;
  std::atomic<uint32_t> asked{0};
  const Fd listener{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  uint16_t port = 0;
  std::vector<std::jthread> visits;
  std::jthread accepting;
};

}  // namespace

TEST(a_block_of_which_each_connection_brings_a_layer_comes_whole) {
  AnswerHost here, there;
  there.fill(kManyLayers);
  Stutterer peer(pieces_of(record(there)));
  peer::Tier tier(*here.store, "b", kSalt, {{.node = "a", .host = "127.0.0.1", .port = peer.port, .tells = false}});
  tier.start();
  const Key wanted = key(kNumber);
  CHECK(here.store->promote({&wanted, 1}, kDefaultPriority)[0] == Presence::Pending);
  const auto is_over = [&] { return here.resident(kNumber) || !here.store->stats().created; };
  CHECK(eventually([&] { return here.store->stats().created || here.resident(kNumber); }));
  CHECK(eventually(is_over));
  CHECK(here.content() == there.content());
  here.store->attach_peers(nullptr);
  tier.stop();
}
