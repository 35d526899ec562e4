#include "core/session/session_tokens.h"

#include <sys/random.h>

#include <cstring>

#include "core/base/error.h"

namespace kv {
namespace {

uint64_t number_of(std::span<const uint8_t> token) {
  uint64_t number;
  std::memcpy(&number, token.data(), sizeof number);
  return number;
}

// Every byte is looked at, whatever the others are.
bool same(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = difference | (a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

Tokens::Token Tokens::issue(const Grant& grant) {
  std::lock_guard lock(mutex_);
  Token token;
  do KV_INVARIANT(::getrandom(token.data(), token.size(), 0) == static_cast<ssize_t>(token.size()));
  while (issued_.count(number_of(token)));
  issued_.emplace(number_of(token), Issued{token, grant});
  return token;
}

void Tokens::end(const Token& token) {
  std::lock_guard lock(mutex_);
  issued_.erase(number_of(token));
}

std::optional<Tokens::Grant> Tokens::check(std::span<const uint8_t> shown) const {
  if (shown.size() != kTokenBytes) return std::nullopt;
  std::lock_guard lock(mutex_);
  const auto found = issued_.find(number_of(shown));
  if (found == issued_.end() || !same(shown, found->second.token)) return std::nullopt;
  return found->second.grant;
}

}  // namespace kv
