// What a session shows on gRPC, where a handler sees no peer: 40 random bytes that stand for one session's namespace and mode,
// as long as its connection lives. Thread-safe. A token is a number that finds it and a secret compared in constant time.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>

namespace kv {

inline constexpr size_t kTokenBytes = 40;

class Tokens {
 public:
  using Token = std::array<uint8_t, kTokenBytes>;
  struct Grant {
    std::string name;  // of the namespace
    bool read_only;
    uint32_t uid;  // of the session's process
  };

  Token issue(const Grant& grant);
  void end(const Token& token);
  std::optional<Grant> check(std::span<const uint8_t> shown) const;

 private:
  struct Issued {
    Token token;
    Grant grant;
  };
  mutable std::mutex mutex_;
  std::map<uint64_t, Issued> issued_;  // by the token's first eight bytes
};

}  // namespace kv
