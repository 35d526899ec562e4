#include "core/peer/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "core/base/error.h"
#include "core/format/sha256.h"

namespace kv::peer {
namespace {

void random_bytes(uint8_t* to, size_t n) { KV_INVARIANT(::getrandom(to, n, 0) == static_cast<ssize_t>(n)); }

void set_name(char (&to)[kMaxName + 1], const std::string& name) {
  if (name.size() > kMaxName) throw Error(Code::InvalidArgument, "a name of " + std::to_string(name.size()) + " bytes");
  std::memset(to, 0, sizeof to);
  std::memcpy(to, name.data(), name.size());
}

std::string name_of(const char (&from)[kMaxName + 1]) { return {from, ::strnlen(from, kMaxName)}; }

Secret proof_of(const Secret& salt, uint8_t side, const Hello& hello, const Challenge& challenge) {
  std::vector<uint8_t> said{side};
  auto add = [&](const void* bytes, size_t n) {
    said.insert(said.end(), static_cast<const uint8_t*>(bytes), static_cast<const uint8_t*>(bytes) + n);
  };
  add(&hello, sizeof hello);
  add(&challenge, offsetof(Challenge, proof));
  return hmac_sha256(salt, said);
}

bool same(const Secret& a, const uint8_t (&b)[32]) {  // in a time that says nothing
  uint8_t differs = 0;
  for (size_t i = 0; i < a.size(); ++i) differs |= a[i] ^ b[i];
  return differs == 0;
}

// The highest version that both ends speak; both have signed what was said, so nobody in between can lower it.
std::optional<uint32_t> version_with(const Hello& hello) {
  const uint32_t oldest = hello.oldest ? hello.oldest : hello.version, spoken = std::min(hello.version, kVersion);
  return spoken >= std::max(oldest, kOldestVersion) ? std::optional(spoken) : std::nullopt;
}

Frame frame(Kind kind) { return {.kind = static_cast<uint16_t>(kind)}; }

[[noreturn]] void refuse(Channel& channel, const char* why) {
  channel.put(frame(Kind::Refused), {});
  channel.flush();
  throw Broken(Broken::Why::Refused, why);
}

}  // namespace

Secret hmac_sha256(const Secret& key, std::span<const uint8_t> message) {
  uint8_t inner[64], outer[64];
  for (size_t i = 0; i < 64; ++i) {
    const uint8_t byte = i < key.size() ? key[i] : 0;
    inner[i] = byte ^ 0x36, outer[i] = byte ^ 0x5c;
  }
  const Key within = Sha256().update(inner, 64).update(message.data(), message.size()).finish();
  const Key digest = Sha256().update(outer, 64).update(&within, sizeof within).finish();
  Secret out;
  std::memcpy(out.data(), &digest, sizeof digest);
  return out;
}

uint32_t introduce(Channel& channel, const std::string& node, const std::string& space, const Secret& salt,
                   const std::string& expected_node) {
  Hello hello{};
  hello.version = kVersion, hello.oldest = kOldestVersion;
  set_name(hello.node, node), set_name(hello.space, space);
  random_bytes(hello.nonce, sizeof hello.nonce);
  channel.put(frame(Kind::Hello), bytes_of(hello));
  channel.flush();
  const auto challenge = channel.take_value<Challenge>(Kind::Challenge, kHandshakeMs);
  if (challenge.version < kOldestVersion || challenge.version > kVersion)
    throw Broken(Broken::Why::Refused, "it speaks version " + std::to_string(challenge.version) + ", this host " +
                                           std::to_string(kOldestVersion) + " to " + std::to_string(kVersion));
  if (name_of(challenge.node) != expected_node) throw Broken(Broken::Why::Refused, "it is not " + expected_node);
  if (!same(proof_of(salt, 's', hello, challenge), challenge.proof))
    throw Broken(Broken::Why::Refused, "its salt is another, it does not share the namespace, or " + node + " is no peer of it");
  Proof proof;
  const Secret mine = proof_of(salt, 'c', hello, challenge);
  std::memcpy(proof.proof, mine.data(), mine.size());
  channel.put(frame(Kind::Proof), bytes_of(proof));
  channel.flush();
  Channel::expect(channel.take_head(kHandshakeMs), Kind::Welcome, 0);
  return challenge.version;
}

std::string admit(Channel& channel, const std::string& node,
                  const std::function<std::optional<Secret>(const std::string&, const std::string&)>& secret_of) {
  const auto hello = channel.take_value<Hello>(Kind::Hello, kHandshakeMs);
  const std::optional<uint32_t> spoken = version_with(hello);
  const std::string space = name_of(hello.space);
  std::optional<Secret> salt = secret_of(space, name_of(hello.node));
  const bool known = salt.has_value();
  if (!known) random_bytes(salt.emplace().data(), sizeof(Secret));  // takes the same way as a wrong salt
  Challenge challenge{};
  challenge.version = spoken.value_or(kVersion);  // one that knows none of ours says so
  set_name(challenge.node, node);
  random_bytes(challenge.nonce, sizeof challenge.nonce);
  const Secret mine = proof_of(*salt, 's', hello, challenge);
  std::memcpy(challenge.proof, mine.data(), mine.size());
  channel.put(frame(Kind::Challenge), bytes_of(challenge));
  channel.flush();
  const auto proof = channel.take_value<Proof>(Kind::Proof, kHandshakeMs);
  const bool right = same(proof_of(*salt, 'c', hello, challenge), proof.proof);
  if (!right || !known || !spoken) refuse(channel, "a stranger");
  channel.put(frame(Kind::Welcome), {});
  channel.flush();
  return space;
}

}  // namespace kv::peer
