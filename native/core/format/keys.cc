#include "core/format/keys.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

#include "core/format/sha256.h"

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

// A product is below 2^94 and there are fewer than 2^16, so the sum stays below 2^110 and is reduced once.
uint64_t fingerprint_of(const uint64_t* powers, const int32_t* tokens, size_t count) {
  u128 sum = 0;
  for (size_t i = 0; i < count; ++i) sum += u128{powers[i]} * digit(tokens[i]);
  return reduce(sum);
}

Key tagged_identity(const char (&tag)[5], const Key& identity) {
  return Sha256().update(tag, 4).update(&identity, sizeof identity).finish();
}

}  // namespace

Key root_key(const Key& identity) { return tagged_identity("kvr1", identity); }

uint64_t fingerprint_base(const Key& identity) { return 2 + tagged_identity("kvf1", identity).words[0] % (kPrime - 3); }

void window_fingerprints(uint64_t base, const int32_t* tokens, size_t count, size_t window, uint64_t* out) {
  assert(window > 0 && window <= kMaxBlockTokens);
  if (count < window) return;
  const std::vector<uint64_t> powers = descending_powers(base, window + 1);
  const uint64_t leaving = kPrime - powers[0];  // minus the weight of the id that just left the window
  auto step = [=](uint64_t value, size_t i) {   // from the window at i to the one at i+1
    return reduce(u128{value} * base + u128{leaving} * digit(tokens[i]) + digit(tokens[i + window]));
  };

  // A step waits for the last one's product, so four stretches of the prompt go side by side.
  constexpr size_t kStretches = 4;
  const size_t windows = count - window + 1, length = windows / kStretches;
  uint64_t value[kStretches];
  for (size_t s = 0; s < kStretches; ++s)
    out[s * length] = value[s] = fingerprint_of(powers.data() + 1, tokens + s * length, window);
  for (size_t i = 1; i < length; ++i)
#pragma GCC unroll 4
    for (size_t s = 0; s < kStretches; ++s) out[s * length + i] = value[s] = step(value[s], s * length + i - 1);
  for (size_t i = std::max<size_t>(1, length * kStretches); i < windows; ++i) out[i] = step(out[i - 1], i - 1);
}

Chain::Chain(const Key& identity, const int32_t* tokens, size_t count, const uint64_t* extra, uint32_t extra_words,
             uint32_t block_tokens, bool partial, const Cuts& cuts) {
  assert(block_tokens > 0 && block_tokens <= kMaxBlockTokens && count <= kMaxChainTokens);
  auto storage = std::make_shared<Storage>();
  if (cuts.counts.empty()) {
    if (!partial) count -= count % block_tokens;
    count_ = (count + block_tokens - 1) / block_tokens;
  } else {
    size_t end = 0;
    for (const uint32_t n : cuts.counts) storage->ends.push_back(end += n);
    assert(end <= count);
    count = end;
    count_ = cuts.counts.size();
  }
  storage->start = cuts.start;
  storage->window = cuts.window == 0 ? block_tokens : std::min(cuts.window, block_tokens);
  storage->identity = identity;
  storage->block_tokens = block_tokens;
  storage->extra_words = extra_words;
  storage->tokens.assign(tokens, tokens + count);
  storage->extra.assign(extra, extra + count * extra_words);
  storage->keys.resize(count_ + 1);
  storage_ = storage;
  Key before = cuts.root ? *cuts.root : root_key(identity);
  for (size_t i = 0; i < count_; ++i) storage->keys[i + 1] = before = hash_chunk("kvp1", before, i);
}

Key Chain::hash_chunk(const char (&tag)[5], const Key& before, size_t i) const {
  const uint32_t n = token_count(i);
  const uint64_t *extra = this->extra(i), *extra_end = extra + n * extra_words();
  const bool has_extra = std::any_of(extra, extra_end, [](uint64_t word) { return word != 0; });
  Sha256 hash;
  hash.update(tag, 4).update(&before, sizeof before).update(&n, sizeof n).update(&has_extra, 1);
  hash.update(tokens(i), n * sizeof(int32_t));
  if (has_extra) hash.update(extra, n * extra_words() * sizeof *extra);
  return hash.finish();
}

const Key* Chain::content_keys() const {
  std::call_once(storage_->content_once, [this] {
    const Chain whole(storage_, 0, storage_->keys.size() - 1);
    storage_->content_keys.reserve(whole.size());
    for (size_t i = 0; i < whole.size(); ++i) storage_->content_keys.push_back(whole.hash_chunk("kvc1", identity(), i));
  });
  return storage_->content_keys.data() + first_;
}

const uint64_t* Chain::fingerprints() const {
  std::call_once(storage_->fingerprints_once, [this] {
    const Chain whole(storage_, 0, storage_->keys.size() - 1);
    const uint32_t window = storage_->window;
    const std::vector<uint64_t> powers = descending_powers(fingerprint_base(identity()), window);
    storage_->fingerprints.reserve(whole.size());
    for (size_t i = 0; i < whole.size(); ++i) {
      const uint32_t n = std::min(whole.token_count(i), window);
      storage_->fingerprints.push_back(fingerprint_of(powers.data() + (window - n), whole.tokens(i), n));
    }
  });
  return storage_->fingerprints.data() + first_;
}

size_t Chain::num_tokens() const { return count_ == 0 ? 0 : offset(count_ - 1) + token_count(count_ - 1) - offset(0); }

bool operator==(const Chain& a, const Chain& b) {
  return a.count_ == b.count_ && a.first_ == b.first_ && a.storage_->start == b.storage_->start &&
         a.block_tokens() == b.block_tokens() && a.identity() == b.identity() &&
         std::equal(a.keys(), a.keys() + a.size(), b.keys());
}

}  // namespace kv
