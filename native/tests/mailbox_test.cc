// Goal: requests through a session's mailbox are answered once and right, whatever sleeps, dies or lies at either end. Method: a
// daemon and its clients in one process; for the lies a session's page that the test itself writes.
//
// Rules proven by removal (failed checks of one run): the client's knock, its fence, the daemon's fence: 2 each, a request is
// waited for in vain; the number that says a request was taken: thousands; what was asked of another daemon is passed over: 1.
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "core/client/exchange.h"
#include "core/session/mailbox.h"
#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

// A daemon's mailbox and a view of the page as its client has it.
struct Paper {
  Paper() : file(::memfd_create("page", 0)) {
    KV_INVARIANT(::ftruncate(file.get(), kPinsOffset) == 0);
    view = Mapping(file.get(), kPinsOffset, true);
  }
  Mailbox& box() { return *view.at<Mailbox>(kMailboxOffset); }
  DaemonMailbox daemon() { return DaemonMailbox(Mapping(file.get(), kPinsOffset, true)); }
  void ask(uint32_t number, const char* text, uint32_t bytes) {
    std::memcpy(box().bytes, text, std::min<size_t>(std::strlen(text), kMailboxBytes));
    box().request_bytes.store(bytes);
    box().asked.store(number);
  }
  Fd file;
  Mapping view;
};

protocol::Reply reply_to(uint16_t op, uint32_t number) { return {protocol::kMagic, op, protocol::kOk, 0, number}; }

std::span<const uint8_t> bytes_of(const protocol::Reply& reply) {
  return {reinterpret_cast<const uint8_t*>(&reply), sizeof reply};
}

// A session's socket.
struct Ends {
  Ends() {
    int both[2];
    KV_INVARIANT(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, both) == 0);
    client = Fd(both[0]), daemon = Fd(both[1]);
  }
  void say(uint16_t op, uint32_t number, const std::string& body) {
    std::vector<uint8_t> message;
    protocol::append(message, reply_to(op, number));
    message.insert(message.end(), body.begin(), body.end());
    CHECK(::send(daemon.get(), message.data(), message.size(), MSG_NOSIGNAL) >= 0);
  }
  void knock() {
    const protocol::Knock knock;
    CHECK(::send(daemon.get(), &knock, sizeof knock, MSG_NOSIGNAL) >= 0);
  }
  std::span<const uint8_t> hear(std::vector<uint8_t>& buffer) {
    const ssize_t got = ::recv(daemon.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    return {buffer.data(), got < 0 ? 0 : static_cast<size_t>(got)};
  }
  bool wait() {  // false: nothing has come for 20 s
    pollfd readable{daemon.get(), POLLIN, 0};
    return ::poll(&readable, 1, 20'000) == 1;
  }
  Fd client, daemon;
};

std::string text_of(std::span<const uint8_t> bytes) { return {bytes.begin(), bytes.end()}; }

// Requests one behind the other until the daemon looks into the mailbox. How many went by it.
uint64_t stream(Client& client, int requests) {
  for (int i = 0; i < requests; ++i) client.touch(std::vector<Key>{key(1)});
  return client.mailed();
}

}  // namespace

TEST(a_request_is_taken_once_and_answered_by_its_number) {
  Paper page;
  std::vector<uint8_t> buffer(kMailboxBytes);
  auto daemon = page.daemon();
  CHECK(daemon.take(buffer).empty());
  page.ask(1, "first", 5);
  CHECK(text_of(daemon.take(buffer)) == "first");
  CHECK(daemon.take(buffer).empty());
  const uint8_t head[] = {'a', 'b'}, body[] = {'c'};
  CHECK(daemon.answer(1, head, body));
  CHECK(page.box().answered.load() == 1 && page.box().answer_bytes.load() == 3 && std::memcmp(page.box().bytes, "abc", 3) == 0);
  CHECK(!daemon.asleep(1));
  page.box().asleep.store(1);
  CHECK(daemon.asleep(1) && !daemon.asleep(2));
  page.ask(2, "second", 6);
  CHECK(text_of(daemon.take(buffer)) == "second");
  CHECK(!daemon.answer(2, head, std::vector<uint8_t>(kMailboxBytes - 1)));  // a byte too long
  CHECK(page.box().answered.load() == 1);
  daemon.answered_by_socket(2);
  CHECK(page.box().answered.load() == 2 && page.box().answer_bytes.load() == 0);
}

TEST(what_was_asked_of_another_daemon_is_not_taken) {
  Paper page;
  std::vector<uint8_t> buffer(kMailboxBytes);
  page.box().attended.store(1);  // killed while it looked
  page.ask(7, "old", 3);
  auto daemon = page.daemon();
  CHECK_EQ(page.box().attended.load(), 0u);
  CHECK(daemon.take(buffer).empty());
  page.ask(8, "new", 3);
  CHECK(text_of(daemon.take(buffer)) == "new");
}

TEST(lies_about_the_length_and_a_cut_page_cost_nobody_but_their_teller) {
  Paper page;
  std::vector<uint8_t> buffer(kMailboxBytes);
  auto daemon = page.daemon();
  page.ask(1, "", ~0u);
  CHECK_EQ(daemon.take(buffer).size(), kMailboxBytes);
  page.ask(0, "none", 4);
  CHECK(daemon.take(buffer).empty());  // 0 is no number
  page.ask(2, "cut", 3);
  KV_INVARIANT(::ftruncate(page.file.get(), 0) == 0);
  CHECK(daemon.take(buffer).empty());  // zeros now
  daemon.attend(true);
  CHECK(daemon.take(buffer).empty());
}

TEST(a_stream_of_requests_goes_by_the_mailbox_and_long_ones_by_the_socket) {
  Daemon daemon;
  auto client = daemon.client();
  client->register_layout(layout_blob(1, kPageBytes, Rig::kMaxTokens));
  put(*client, key(1), 1);
  CHECK(eventually([&] { return stream(*client, 10) > 0; }));
  const std::vector<Key> many(kMailboxBytes / sizeof(Key), key(1));  // with their head a little too long
  uint64_t before = client->mailed();
  CHECK_EQ(client->touch(many), many.size());
  CHECK_EQ(client->mailed(), before);
  CHECK(eventually([&] { return stream(*client, 10) > before; }));  // and on
}

TEST(several_clients_that_stream_at_once_all_go_by_their_mailboxes) {
  Daemon daemon;
  constexpr int kClients = 4;
  std::atomic<int> there{0};
  std::vector<std::thread> threads;
  for (int c = 0; c < kClients; ++c)
    threads.emplace_back([&] {
      auto client = daemon.client();
      bool counted = false;
      CHECK(eventually([&] {
        if (stream(*client, 10) > 0 && !std::exchange(counted, true)) ++there;
        return there.load() == kClients;  // until the last is there: all stream as long as that
      }));
    });
  for (auto& thread : threads) thread.join();
  CHECK_EQ(there.load(), kClients);
}

// Each goes away as the one that asked last: whoever is looked for instead, the mailboxes are still looked into.
TEST(connections_that_come_and_go_hold_up_no_mailbox) {
  Daemon daemon;
  auto client = daemon.client();
  CHECK(eventually([&] { return stream(*client, 10) > 0; }));
  std::atomic<bool> stop{false};
  std::thread strangers([&] {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(daemon.path.begin(), daemon.path.end(), address.sun_path);
    while (!stop.load()) {
      const Fd stranger(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
      ::connect(stranger.get(), reinterpret_cast<sockaddr*>(&address), sizeof address);
    }
  });
  const uint64_t before = client->mailed();
  CHECK(!thrown([&] { stream(*client, 2000); }));
  CHECK(eventually([&] { return stream(*client, 10) > before; }));  // not at once: on a busy machine nobody polls for a while
  stop.store(true);
  strangers.join();
}

TEST(puts_and_gets_of_many_clients_are_right_by_whatever_way_they_went) {
  Daemon daemon(64 * kMiB, 4096);
  constexpr int kClients = 4, kRounds = 400;
  std::atomic<int> wrong{0};
  std::atomic<uint64_t> mailed{0};
  std::vector<std::thread> threads;
  {
    auto first = daemon.client();
    first->register_layout(layout_blob(1, kPageBytes, Rig::kMaxTokens));
  }
  for (int c = 0; c < kClients; ++c)
    threads.emplace_back([&, c] {
      auto client = daemon.client();
      for (int i = 0; i < kRounds; ++i) {
        const Key k = key(static_cast<uint64_t>(c * kRounds + i));
        put(*client, k, static_cast<uint8_t>(c * 31 + i));
        const auto batch = get(*client, k);
        wrong += batch->hits() != 1 || static_cast<uint8_t>(batch->bytes(0)[0]) != static_cast<uint8_t>(c * 31 + i);
        wrong += client->touch(std::vector<Key>{k}) != 1;
      }
      mailed += client->mailed();
    });
  for (auto& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(daemon.stats().seals, static_cast<uint64_t>(kClients * kRounds));
  std::printf("     %lu of %d requests by mailboxes\n", mailed.load(), 3 * kClients * kRounds);
}

// A peer that posts while nobody looks: only its knock can say so.
TEST(a_request_in_a_mailbox_that_is_not_looked_into_is_served_on_a_knock_and_once) {
  Daemon daemon;
  const Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(daemon.path.begin(), daemon.path.end(), address.sun_path);
  CHECK(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  protocol::Attach attach{};
  attach.version = protocol::kVersion, attach.max_pins = 64;
  std::memcpy(attach.name, "test", 4);
  std::vector<uint8_t> body;
  protocol::append(body, attach);
  std::vector<Fd> descriptors;
  exchange(socket.get(), request_of(protocol::Op::Attach, 1, 0), body, &descriptors);
  if (!CHECK_EQ(descriptors.size(), 4u)) return;
  const Mapping page(descriptors[3].get(), kPinsOffset, true);
  Mailbox& box = *page.at<Mailbox>(kMailboxOffset);
  CHECK(eventually([&] { return box.attended.load() == 0u; }));  // which it is for a moment after the attach
  for (uint32_t number = 1; number <= 3; ++number) {
    const auto request = request_of(protocol::Op::Stats, 0, number);
    std::memcpy(box.bytes, &request, sizeof request);
    box.request_bytes.store(sizeof request);
    box.asked.store(number);
    const protocol::Knock knock;
    for (int i = 0; i < 2; ++i) CHECK(::send(socket.get(), &knock, sizeof knock, MSG_NOSIGNAL) == sizeof knock);
    CHECK(eventually([&] { return box.answered.load() == number; }));
  }
  const auto served = [&] {  // counted after the answer
    uint64_t count = 0;
    for (const auto& latency : daemon.server->latencies())
      if (latency.operation == "stats")
        count += std::accumulate(latency.counts.buckets.begin(), latency.counts.buckets.end(), uint64_t{0});
    return count;
  };
  CHECK(eventually([&] { return served() >= 3; }));
  CHECK_EQ(served(), 3u);
}

// The client's half against a daemon's half that the test plays.
TEST(a_client_that_fell_asleep_is_woken_by_a_knock_or_by_the_reply_itself) {
  Paper page;
  Ends ends;
  auto daemon = page.daemon();
  std::vector<uint8_t> buffer(kMailboxBytes);
  CHECK(!exchange_by_mailbox(page.box(), ends.client.get(), request_of(protocol::Op::Stats, 0, 1), {}, {}));  // nobody looks
  CHECK_EQ(page.box().asked.load(), 0u);
  daemon.attend(true);
  enum Way { Knocked, BySocket, StaleKnocks };
  for (const Way way : {Knocked, BySocket, StaleKnocks, Knocked}) {
    const uint32_t number = page.box().asked.load() + 1;
    if (way == StaleKnocks)
      for (int i = 0; i < 3; ++i) ends.knock();
    std::string body = "none";
    std::thread client([&] {
      const auto got = exchange_by_mailbox(page.box(), ends.client.get(), request_of(protocol::Op::Stats, 0, number), {}, {});
      if (got) body = text_of(*got);
    });
    CHECK(eventually([&] { return !daemon.take(buffer).empty(); }));
    CHECK(eventually([&] { return page.box().asleep.load() == number; }));
    if (way == BySocket) {
      ends.say(static_cast<uint16_t>(protocol::Op::Stats), number, "by socket");
      daemon.answered_by_socket(number);
    } else {
      const auto head = reply_to(static_cast<uint16_t>(protocol::Op::Stats), number);
      const std::string text = "by mailbox";
      CHECK(daemon.answer(number, bytes_of(head), {reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
      CHECK(daemon.asleep(number));
      ends.knock();
    }
    client.join();
    CHECK(body == (way == BySocket ? "by socket" : "by mailbox"));
  }
  std::optional<Code> code;
  std::thread client([&] {
    code = thrown([&] { exchange_by_mailbox(page.box(), ends.client.get(), request_of(protocol::Op::Stats, 0, 99), {}, {}); });
  });
  CHECK(eventually([&] { return page.box().asleep.load() == 99; }));
  ends.daemon.reset();
  client.join();
  CHECK(code == Code::Detached);
}

// The daemon's half goes to sleep as often as it can: a request that it leaves lying would be waited for in vain.
TEST(nothing_is_lost_between_two_that_fall_asleep) {
  constexpr uint32_t kRounds = 5'000;
  Paper page;
  Ends ends;
  std::vector<uint8_t> buffer(protocol::kMaxMessage);
  std::atomic<uint32_t> mailed{0}, wrong{0};
  auto daemon = page.daemon();
  std::thread client([&] {
    for (uint32_t number = 1; number <= kRounds; ++number) {
      const auto request = request_of(protocol::Op::Stats, 0, number);
      try {
        auto got = exchange_by_mailbox(page.box(), ends.client.get(), request, {}, {});
        mailed += got.has_value();
        if (!got) got = exchange(ends.client.get(), request, {}, nullptr);
        wrong += text_of(*got) != std::to_string(number);
      } catch (const Error&) {
        wrong += 1;
        return;
      }
    }
  });
  uint32_t served = 0, slept = 0;
  const auto serve = [&](bool by_mailbox) {
    const std::span<const uint8_t> message = by_mailbox ? daemon.take(buffer) : ends.hear(buffer);
    protocol::Reader reader(message);
    const auto request = reader.take<protocol::Request>();
    if (!reader.ok() || protocol::is_knock(message)) return;
    served += 1;
    CHECK_EQ(request.tag, served);  // each once, in order
    const std::string text = std::to_string(request.tag);
    if (!by_mailbox) return ends.say(request.op, request.tag, text);
    daemon.answer(request.tag, bytes_of(reply_to(request.op, request.tag)),
                  {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    if (daemon.asleep(request.tag)) ends.knock();
  };
  std::mt19937 random(1);
  while (served < kRounds) {
    daemon.attend(true);
    for (uint32_t looks = random() % 20'000, before = served; looks > 0 && served == before; --looks) serve(true);
    daemon.attend(false);
    const uint32_t before = served;
    serve(true);
    if (served != before || served == kRounds) continue;
    slept += 1;
    if (!CHECK(ends.wait())) break;
    serve(false), serve(true);
  }
  ends.daemon.reset();
  client.join();
  CHECK_EQ(wrong.load(), 0u);
  std::printf("     %u of %u by the mailbox, slept %u times\n", mailed.load(), kRounds, slept);
}

TEST(a_daemon_that_ended_is_told_of) {
  Daemon daemon;
  auto client = daemon.client();
  CHECK(eventually([&] { return stream(*client, 10) > 0; }));
  Mailbox& box = client->attachment()->board->mailbox();
  daemon.stop();
  CHECK_EQ(box.attended.load(), 0u);
  box.attended.store(1);  // as a daemon that was killed leaves it
  CHECK(thrown([&] { client->touch(std::vector<Key>{key(2)}); }) == Code::Detached);
  CHECK_EQ(box.attended.load(), 0u);  // for a daemon that knows nothing of mailboxes
}

TEST(a_new_daemon_takes_over_the_session_and_its_mailbox) {
  Daemon daemon;
  auto client = daemon.client();
  client->register_layout(layout_blob(1, kPageBytes, Rig::kMaxTokens));
  put(*client, key(1), 1);
  CHECK(eventually([&] { return stream(*client, 10) > 0; }));
  for (int round = 0; round < 3; ++round) {
    daemon.restart();
    CHECK(eventually([&] { return !thrown([&] { client->reattach(), client->touch(std::vector<Key>{key(1)}); }); }));
    const uint64_t before = client->mailed();
    CHECK(eventually([&] { return stream(*client, 10) > before; }));
    CHECK_EQ(client->touch(std::vector<Key>{key(1)}), 1u);
  }
}
