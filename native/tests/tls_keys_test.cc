// Goal: a connection outlives its keys: before one has encrypted as much as its cipher stands for, what follows is under another,
// in both directions, and no byte is lost. Method: two channels with a key good for few records, and between them a relay that
// reads the lengths of the records that pass. Certificates by the `openssl` command.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "tests/peer_answers.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kRecordsPerKey = 4, kFrames = 400;  // each more than half a record, so it has one or two of its own
constexpr size_t kPayload = 9000;
// Of TLS 1.3's record of a KeyUpdate: head and body of the message, the content's type, and the tag. No frame is so short.
constexpr size_t kKeyUpdateBytes = 4 + 1 + 1 + 16;

// A certificate that is its own authority, for a host "b".
peer::TlsFiles certificate(const std::string& directory) {
  const std::string key = directory + "/key", pem = directory + "/pem";
  const std::string command =
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=b "
      "-addext subjectAltName=DNS:b -keyout " +
      key + " -out " + pem + " 2>/dev/null";
  KV_INVARIANT(std::system(command.c_str()) == 0);
  return {pem, key, pem};
}

// Passes on what comes, until one end hangs up; counts the records of a KeyUpdate's length among it.
uint64_t relay(int from, int to) {
  uint64_t updates = 0;
  Bytes record;
  for (std::byte buffer[1 << 14];;) {
    const ssize_t got = ::read(from, buffer, sizeof buffer);
    if (got <= 0 || ::send(to, buffer, static_cast<size_t>(got), MSG_NOSIGNAL) != got) break;
    record.insert(record.end(), buffer, buffer + got);
    size_t at = 0;
    for (size_t length; record.size() - at >= 5; at += 5 + length) {
      length = std::to_integer<size_t>(record[at + 3]) << 8 | std::to_integer<size_t>(record[at + 4]);
      if (record.size() - at < 5 + length) break;
      updates += length == kKeyUpdateBytes;
    }
    record.erase(record.begin(), record.begin() + static_cast<long>(at));
  }
  ::shutdown(to, SHUT_WR);
  return updates;
}

Bytes payload(uint64_t number) {
  Bytes out(kPayload);
  for (size_t i = 0; i < out.size(); ++i) out[i] = std::byte(mixed(number) >> i % 8 * 8);
  return out;
}

// Each frame answered by the same one. Whether all were right.
bool talk(peer::Channel& channel, bool first) {
  Bytes came(kPayload);
  for (uint64_t i = 0; i < kFrames; ++i) {
    const auto say = [&] { channel.put({.request = static_cast<uint32_t>(i)}, payload(i)), channel.flush(); };
    if (first) say();
    const Frame head = channel.take_head();
    if (head.request != i || head.bytes != kPayload) return false;
    channel.take_checked(head, came.data());
    if (came != payload(i)) return false;
    if (!first) say();
  }
  return true;
}

}  // namespace

TEST(a_connection_goes_on_under_another_key_before_one_has_encrypted_too_much) {
  if (std::system("command -v openssl >/dev/null") != 0) {
    std::puts("skipped: no openssl command on this host");
    return;
  }
  char name[] = "/tmp/kvstored-tls-XXXXXX";
  KV_INVARIANT(::mkdtemp(name) != nullptr);
  const peer::TlsIdentity identity(certificate(name), kRecordsPerKey);
  std::filesystem::remove_all(name);
  Pair a, b;
  uint64_t updates[2] = {};
  std::jthread there([&] { updates[0] = relay(a.far.get(), b.far.get()); });
  std::jthread back([&] { updates[1] = relay(b.far.get(), a.far.get()); });
  bool called = false;
  std::jthread answering([&] {
    peer::Channel channel(std::move(b.near));
    channel.secure(identity, "", 5000);
    called = talk(channel, false);
  });
  {
    peer::Channel channel(std::move(a.near));
    channel.secure(identity, "b", 5000);
    CHECK(talk(channel, true));
  }
  answering.join(), there.join(), back.join();
  CHECK(called);
  for (const uint64_t count : updates) CHECK(count >= kFrames / kRecordsPerKey - 1 && count <= 2 * kFrames / kRecordsPerKey);
}
