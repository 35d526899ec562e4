#include "core/keys.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

#include "core/sha256.h"

namespace kv {
namespace {

static_assert(std::endian::native == std::endian::little, "ids are hashed as they lie in memory");

__extension__ using u128 = unsigned __int128;
constexpr uint64_t kPrime = (1ull << 61) - 1;

// x modulo kPrime, for x < 2^122: the high and the low 61 bits weigh the same.
constexpr uint64_t reduce(u128 x) {
  const uint64_t low = static_cast<uint64_t>(x), high = static_cast<uint64_t>(x >> 64);
  const uint64_t sum = (low & kPrime) + (low >> 61) + (high << 3);
  return sum >= kPrime ? sum - kPrime : sum;
}

constexpr uint64_t digit(int32_t token) { return uint64_t{static_cast<uint32_t>(token)} + 1; }

// powers[i] = base^(count-1-i), so that a fingerprint is a plain sum of products.
std::vector<uint64_t> descending_powers(uint64_t base, size_t count) {
  std::vector<uint64_t> powers(count);
  uint64_t power = 1;
  for (size_t i = count; i-- > 0; power = reduce(u128{power} * base)) powers[i] = power;
  return powers;
}

// A product is below 2^94 and a window has below 2^24 ids, so the sum stays below 2^118 and is reduced once.
uint64_t fingerprint_of(const uint64_t* powers, const int32_t* tokens, size_t count) {
  u128 sum = 0;
  for (size_t i = 0; i < count; ++i) sum += u128{powers[i]} * digit(tokens[i]);
  return reduce(sum);
}

Key chunk_key(const char (&tag)[5], const Key& before, const int32_t* tokens, const uint64_t* extra, uint32_t n) {
  const bool has_extra = extra != nullptr && std::any_of(extra, extra + n, [](uint64_t id) { return id != 0; });
  uint8_t head[4 + sizeof(Key) + 4 + 1];
  std::memcpy(head, tag, 4);
  std::memcpy(head + 4, &before, sizeof before);
  std::memcpy(head + 36, &n, sizeof n);
  head[40] = has_extra;
  Sha256 hash;
  hash.update(head, sizeof head).update(tokens, n * sizeof *tokens);
  if (has_extra) hash.update(extra, n * sizeof *extra);
  return hash.finish();
}

}  // namespace

Key root_key(const Key& identity) { return Sha256().update("kvr1", 4).update(&identity, sizeof identity).finish(); }

uint64_t fingerprint_base(const Key& identity) {
  return 2 + Sha256().update("kvf1", 4).update(&identity, sizeof identity).finish().words[0] % (kPrime - 3);
}

void window_fingerprints(uint64_t base, const int32_t* tokens, size_t count, size_t window, uint64_t* out) {
  if (count < window) return;
  const std::vector<uint64_t> powers = descending_powers(base, window + 1);
  const uint64_t leaving = kPrime - powers[0];  // minus the weight of the id that just left the window

  // A step waits for the last one's product, so four stretches of the prompt go side by side.
  constexpr size_t kStretches = 4;
  const size_t windows = count - window + 1, length = windows / kStretches;
  auto step = [=](uint64_t value, size_t i) {  // from the window at i to the one at i+1
    return reduce(u128{value} * base + u128{leaving} * digit(tokens[i]) + digit(tokens[i + window]));
  };
  uint64_t value[kStretches];
  for (size_t s = 0; s < kStretches; ++s) {
    value[s] = fingerprint_of(powers.data() + 1, tokens + s * length, window);
    out[s * length] = value[s];
  }
  for (size_t i = 1; i < length; ++i)
#pragma GCC unroll 4
    for (size_t s = 0; s < kStretches; ++s) out[s * length + i] = value[s] = step(value[s], s * length + i - 1);
  for (size_t i = std::max<size_t>(1, length * kStretches); i < windows; ++i) out[i] = step(out[i - 1], i - 1);
}

Chain::Chain(const Key& identity, const int32_t* tokens, const uint64_t* extra, size_t count, uint32_t block_tokens,
             bool partial) {
  assert(block_tokens > 0 && block_tokens <= kMaxBlockTokens && count <= kMaxChainTokens);
  if (!partial) count -= count % block_tokens;
  count_ = (count + block_tokens - 1) / block_tokens;

  auto storage = std::make_shared<Storage>();
  storage->identity = identity;
  storage->block_tokens = block_tokens;
  storage->tokens.assign(tokens, tokens + count);
  if (extra != nullptr) storage->extra.assign(extra, extra + count);
  storage->keys.resize(count_ + 1);
  storage_ = storage;

  Key parent = root_key(identity);
  for (size_t i = 0; i < count_; ++i)
    parent = storage->keys[i + 1] = chunk_key("kvp1", parent, this->tokens(i), this->extra(i), token_count(i));
}

const Chain::Storage& Chain::derived() const {
  std::call_once(storage_->derived_once, [this] {
    const Storage& storage = *storage_;
    const Chain whole(storage_, 0, storage.keys.size() - 1);
    const std::vector<uint64_t> powers = descending_powers(fingerprint_base(storage.identity), storage.block_tokens);
    storage.content_keys.reserve(whole.size());
    storage.fingerprints.reserve(whole.size());
    for (size_t i = 0; i < whole.size(); ++i) {
      const uint32_t n = whole.token_count(i);
      storage.content_keys.push_back(chunk_key("kvc1", storage.identity, whole.tokens(i), whole.extra(i), n));
      storage.fingerprints.push_back(fingerprint_of(powers.data() + (storage.block_tokens - n), whole.tokens(i), n));
    }
  });
  return *storage_;
}

size_t Chain::num_tokens() const {
  return count_ == 0 ? 0 : start_token(count_ - 1) + token_count(count_ - 1) - start_token(0);
}

bool operator==(const Chain& a, const Chain& b) {
  return a.count_ == b.count_ && a.first_ == b.first_ && a.block_tokens() == b.block_tokens() &&
         a.identity() == b.identity() && std::equal(a.keys(), a.keys() + a.size(), b.keys());
}

}  // namespace kv
