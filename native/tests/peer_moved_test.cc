// Goal: the second half of a block is asked for where the first comes from, and not of whom the peer's name has moved to
// meanwhile; one that stands still is counted. Method: two hosts that the test plays, at the old address and the new; who fetches
// is held where it waits for the store's lock.
#include <arpa/inet.h>
#include <sys/socket.h>

#include <list>
#include <mutex>
#include <thread>

#include "core/peer/handshake.h"
#include "core/peer/tier.h"
#include "tests/peer_answers.h"

using namespace kv;
using namespace kv::test;
using peer::Channel;

namespace {

constexpr uint32_t kSix = 6, kMiddle = 3;
const peer::Secret kSalt{7, 7, 7};

// A host called a. Each connection has a thread, which hears what is asked on it.
class Played {
 public:
  struct Visit {
    explicit Visit(int socket) : channel(Fd(socket)) {}
    Channel channel;
    bool pinged = false;  // it is of the peer's first stream
    std::jthread thread;
  };
  using Answer = std::function<void(Visit& visit, const Frame& head, const Key& key)>;

  explicit Played(Answer answer) : answer_(std::move(answer)) {
    sockaddr_in at{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t size = sizeof at;
    KV_INVARIANT(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&at), size) == 0 && ::listen(listener_.get(), 64) == 0 &&
                 ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
    port = ntohs(at.sin_port);
    accepting_ = std::jthread([this] {
      for (int socket; (socket = ::accept(listener_.get(), nullptr, nullptr)) >= 0;) {
        const std::lock_guard lock(mutex_);
        Visit& visit = visits_.emplace_back(socket);
        accepted += 1;
        if (!mute) visit.thread = std::jthread([this, &visit] { serve(visit); });
      }
    });
  }
  ~Played() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    accepting_.join();
    for (Visit& visit : visits_) visit.channel.cut();
  }
  void hang_up_on_all_but(const Visit& stays) {
    const std::lock_guard lock(mutex_);
    for (Visit& visit : visits_)
      if (&visit != &stays) visit.channel.cut();
  }

  uint16_t port = 0;
  std::atomic<bool> mute{false};  // who connects from here on hears nothing
  std::atomic<uint32_t> accepted{0}, heard{0}, seconds{0};

 private:
  void serve(Visit& visit) {
    try {
      peer::admit(visit.channel, "a", [](const std::string&, const std::string&) { return std::optional(kSalt); });
      for (;;) {
        const Frame head = visit.channel.take_head(-1);
        Key key{};
        if (head.kind == static_cast<uint16_t>(Kind::Fetch)) {
          visit.channel.take_checked(head, reinterpret_cast<std::byte*>(&key));
          seconds += head.item == 1 && head.layer, heard += 1;
          answer_(visit, head, key);
        } else {
          {
            const std::lock_guard lock(mutex_);
            visit.pinged = true;
          }
          heard += 1;
          visit.channel.put({.kind = static_cast<uint16_t>(Kind::Pong), .request = head.request}, {});
          visit.channel.flush();
        }
      }
    } catch (const peer::Broken&) {
      // It hung up, or was cut off.
    }
  }

  const Answer answer_;
  const Fd listener_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::mutex mutex_;
  std::list<Visit> visits_;
  std::jthread accepting_;
};

// Of the answer, from one frame to another: what comes before the layers, as of a first half; and the first layer.
Bytes part_of_answer(AnswerHost& host, uint32_t request, bool first_layer) {
  std::vector<Piece> said;
  for (Piece piece : pieces_of(record(host))) {
    const bool layer = piece.head.kind == static_cast<uint16_t>(Kind::Layer);
    if (layer && (!first_layer || piece.head.layer)) break;
    if (piece.head.kind == static_cast<uint16_t>(Kind::Head)) piece.head.layer = kMiddle;
    piece.head.request = request;
    if (layer == first_layer) said.push_back(piece);
  }
  return joined(said);
}

void say(const Channel& channel, const Bytes& bytes) {
  KV_INVARIANT(::send(channel.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
}

}  // namespace

TEST(a_half_that_was_offered_before_its_peer_moved_is_not_asked_for_at_the_new_address) {
  AnswerHost here, there;
  there.fill(kSix);
  std::atomic<const Played::Visit*> fetching{nullptr};
  std::atomic<uint32_t> request{0};
  Played* also_old = nullptr;
  Played old([&](Played::Visit& visit, const Frame& head, const Key&) {
    if (visit.pinged || !head.item) {  // the stream that is to speak to the new address has other work; or no other is idle yet
      visit.channel.put({.kind = static_cast<uint16_t>(Kind::Missing), .request = head.request}, {});
      return visit.channel.flush();
    }
    CHECK_EQ(head.layer, 0u);
    also_old->mute = true;
    also_old->hang_up_on_all_but(visit);  // so whoever is to bring the other half has to connect
    request = head.request, fetching = &visit;
  });
  also_old = &old;
  Played moved([&](Played::Visit& visit, const Frame& head, const Key& key) {
    peer::Admission admission;
    peer::ServedSums sums;
    peer::BlockSender(*there.store, there.window, admission, sums, visit.channel, "b")
        .answer(head.request, {&key, 1}, head.layer);
  });
  const Key wanted = key(kNumber);
  peer::Tier tier(*here.store, "b", kSalt, {{.node = "a", .host = "127.0.0.1", .port = old.port, .tells = false}});
  tier.start();
  CHECK(eventually([&] { return old.heard > 0; }));
  CHECK(eventually([&] {
    here.store->promote({&wanted, 1}, kDefaultPriority);
    return fetching != nullptr;
  }));
  const uint32_t known = old.accepted;
  say(fetching.load()->channel, part_of_answer(there, request, false));
  CHECK(eventually([&] { return old.accepted > known; }));  // by who would bring it
  auto held = StoreTest::hold(*here.store);
  say(fetching.load()->channel, part_of_answer(there, request, true));
  CHECK(eventually([&] { return StoreTest::waiting(*here.store) > 0; }));
  CHECK(tier.join({.node = "a", .host = "127.0.0.1", .port = moved.port, .tells = false}));
  CHECK(eventually([&] { return moved.heard > 0; }));
  held.unlock();
  CHECK(eventually([&] { return here.store->promote({&wanted, 1}, kDefaultPriority)[0] == Presence::Resident; }));
  CHECK_EQ(moved.seconds, 0u);
  CHECK(here.content() == there.content());
  tier.stop();
  here.store->check_integrity();
}

// Fails if nobody is told that a second half did not come, because the block did all the same.
TEST(a_second_half_that_stands_still_is_counted) {
  AnswerHost here, there;
  there.fill(kSix);
  Played* host = nullptr;
  Played still([&](Played::Visit& visit, const Frame& head, const Key& key) {
    if (head.item == 1 && head.layer) return;  // nothing comes of the second half
    if (head.item == 0) {
      peer::Admission admission;
      peer::ServedSums sums;
      peer::BlockSender sender(*there.store, there.window, admission, sums, visit.channel, "b");
      return void(sender.answer(head.request, {&key, 1}, head.layer));
    }
    const uint32_t seconds = host->seconds;
    std::vector<Piece> before, layers;
    for (Piece piece : pieces_of(record(there))) {
      const auto kind = static_cast<Kind>(piece.head.kind);
      if (kind == Kind::Layer && piece.head.layer >= kMiddle) continue;
      if (kind == Kind::Head) piece.head.layer = kMiddle;
      if (kind == Kind::Whole) piece.head.kind = static_cast<uint16_t>(Kind::Half);
      piece.head.request = head.request;
      (kind == Kind::Layer || kind == Kind::Whole ? layers : before).push_back(piece);
    }
    say(visit.channel, joined(before));
    CHECK(eventually([&] { return host->seconds > seconds || visit.channel.hung_up(); }));
    if (!visit.channel.hung_up()) say(visit.channel, joined(layers));
  });
  host = &still;
  const Key wanted = key(kNumber);
  peer::Tier tier(*here.store, "b", kSalt, {{.node = "a", .host = "127.0.0.1", .port = still.port, .tells = false}});
  tier.start();
  CHECK(eventually([&] { return still.heard > 0; }));
  CHECK(eventually([&] {
    here.store->remove(wanted);
    here.store->settle();
    CHECK(eventually([&] { return here.store->promote({&wanted, 1}, kDefaultPriority)[0] == Presence::Resident; }));
    CHECK(here.content() == there.content());
    return tier.stats()[0].taken_over > 0;
  }));
  tier.stop();
  here.store->check_integrity();
}
