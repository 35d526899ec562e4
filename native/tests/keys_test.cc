// Keys: SHA-256 on both paths against the published vectors, chains and fingerprints against a plain re-statement.
// The golden vectors of the key scheme are tests/unit/formats/test_keys.py's.
#include "core/format/keys.h"

#include <cstring>
#include <string>
#include <thread>

#include "core/format/derived.h"
#include "core/format/sha256.h"
#include "tests/check.h"

using namespace kv;

namespace {

constexpr uint64_t kPrime = (1ull << 61) - 1;
const Key kIdentity{{1, 2, 3, 4}};

std::string hex(const Key& key) {
  std::string out;
  const auto* bytes = reinterpret_cast<const uint8_t*>(&key);
  for (size_t i = 0; i < sizeof key; ++i) {
    out += "0123456789abcdef"[bytes[i] >> 4];
    out += "0123456789abcdef"[bytes[i] & 15];
  }
  return out;
}

// Runs `test` once with each path this CPU has, then leaves the best one in use.
template <class Test>
void on_all_paths(Test test) {
  sha256::use(sha256::portable());
  test();
  if (sha256::accelerated() != nullptr) {
    sha256::use(sha256::accelerated());
    test();
  }
}

std::vector<int32_t> prompt(size_t n) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>(i * 2654435761u);  // negative ids too
  return tokens;
}

uint64_t horner(uint64_t base, const int32_t* tokens, size_t n) {
  __extension__ unsigned __int128 value = 0;
  for (size_t i = 0; i < n; ++i) value = (value * base + static_cast<uint32_t>(tokens[i]) + 1ull) % kPrime;
  return static_cast<uint64_t>(value);
}

}  // namespace

TEST(sha256_published_vectors) {
  on_all_paths([] {
    const std::string two_blocks = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", million(1000000, 'a');
    CHECK_EQ(hex(Sha256().finish()), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK_EQ(hex(Sha256().update("abc", 3).finish()), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQ(hex(Sha256().update(two_blocks.data(), two_blocks.size()).finish()),
             "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK_EQ(hex(Sha256().update(million.data(), million.size()).finish()),
             "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  });
}

TEST(sha256_is_the_same_however_it_is_fed) {
  std::vector<uint8_t> data(300);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * 7);
  for (size_t n = 0; n <= data.size(); ++n) {
    sha256::use(sha256::portable());
    const Key whole = Sha256().update(data.data(), n).finish();
    on_all_paths([&] {
      for (size_t cut : {size_t{0}, n / 3, n / 2, n})
        CHECK_EQ(hex(Sha256().update(data.data(), cut).update(data.data() + cut, n - cut).finish()), hex(whole));
    });
  }
}

TEST(both_paths_make_the_same_chain) {
  const std::vector<int32_t> tokens = prompt(1000);
  sha256::use(sha256::portable());
  const Chain first(kIdentity, tokens.data(), tokens.size(), nullptr, 0, 128, true);
  first.content_keys();
  on_all_paths([&] {
    const Chain again(kIdentity, tokens.data(), tokens.size(), nullptr, 0, 128, true);
    CHECK(again == first);
    CHECK(std::equal(first.content_keys(), first.content_keys() + first.size(), again.content_keys()));
  });
}

TEST(fingerprints_and_windows) {
  const std::vector<int32_t> tokens = prompt(300);
  const uint64_t base = fingerprint_base(kIdentity);
  CHECK(base >= 2 && base < kPrime);
  for (size_t window : {1, 2, 16, 127, 128, 299, 300})
    for (size_t count : {window, window + 1, window + 2, window + 3, window + 4, window + 7, size_t{300}}) {
      if (count > tokens.size()) continue;
      std::vector<uint64_t> found(count - window + 1);
      window_fingerprints(base, tokens.data(), count, window, found.data());
      for (size_t i = 0; i < found.size(); ++i) CHECK_EQ(found[i], horner(base, tokens.data() + i, window));
    }
  uint64_t untouched = 42;
  window_fingerprints(base, tokens.data(), 15, 16, &untouched);
  CHECK_EQ(untouched, 42u);
  const Chain chain(kIdentity, tokens.data(), tokens.size(), nullptr, 0, 128, true);
  CHECK_EQ(chain.size(), 3u);
  for (size_t i = 0; i < chain.size(); ++i)
    CHECK_EQ(chain.fingerprint(i), horner(base, tokens.data() + i * 128, chain.token_count(i)));
}

TEST(fingerprints_at_the_largest_values) {
  const std::vector<int32_t> tokens(2 * kMaxBlockTokens, -1);
  const uint64_t base = kPrime - 1;
  std::vector<uint64_t> found(tokens.size() - kMaxBlockTokens + 1);
  window_fingerprints(base, tokens.data(), tokens.size(), kMaxBlockTokens, found.data());
  const uint64_t expected = horner(base, tokens.data(), kMaxBlockTokens);
  for (uint64_t value : found) CHECK_EQ(value, expected);
}

TEST(slices_share_their_prompt) {
  const std::vector<int32_t> tokens = prompt(100);
  std::vector<uint64_t> extra(4 * tokens.size());
  for (size_t i = 0; i < extra.size(); ++i) extra[i] = i;
  Chain part = Chain(kIdentity, nullptr, 0, nullptr, 0, 1, false);
  CHECK(part.empty() && part.num_tokens() == 0);
  const Key* keys = nullptr;
  {
    const Chain whole(kIdentity, tokens.data(), tokens.size(), extra.data(), 4, 16, true);
    CHECK_EQ(whole.size(), 7u);
    CHECK_EQ(whole.num_tokens(), 100u);
    CHECK_EQ(whole.token_count(6), 4u);
    CHECK_EQ(whole.parent_key(0), Key{});
    keys = whole.keys();
    part = whole.slice(2, 4).slice(1, 3);
  }
  CHECK(part.keys() == keys + 3);
  CHECK_EQ(part.parent_key(0), keys[2]);
  CHECK_EQ(part.start_token(0), 48u);
  CHECK_EQ(part.num_tokens(), 48u);
  CHECK(std::equal(part.tokens(0), part.tokens(0) + 48, tokens.begin() + 48));
  CHECK_EQ(part.extra(1)[0], 4u * 64);
  CHECK(part.slice(0, 0) == part.slice(0, 0));
  CHECK(!(part.slice(0, 1) == part.slice(1, 1)));
}

TEST(derived_keys_are_plain_hashes) {
  const DerivedKeys derived(kIdentity);
  for (const size_t length : {0u, 1u, 32u, 36u, 55u, 56u, 64u, 200u}) {
    std::vector<uint8_t> name(length, 7), whole(64, 0);
    std::memcpy(whole.data(), &kIdentity, sizeof kIdentity);
    whole.insert(whole.end(), name.begin(), name.end());
    CHECK(derived.of(name.data(), length) == Sha256().update(whole.data(), whole.size()).finish());
  }
}

TEST(a_chain_may_be_cut_elsewhere) {
  const std::vector<int32_t> tokens = prompt(50);
  const uint32_t counts[] = {16, 3, 9, 16};
  const Key root = root_key(Key{{7}});
  const Chain cut(kIdentity, tokens.data(), tokens.size(), nullptr, 0, 16, false,
                  {.counts = counts, .start = 100, .root = &root, .window = 8});
  CHECK_EQ(cut.size(), 4u);
  CHECK_EQ(cut.num_tokens(), 44u);
  CHECK_EQ(cut.start_token(2), 119u);
  CHECK(std::equal(cut.tokens(2), cut.tokens(2) + 9, tokens.begin() + 19));
  const uint64_t base = fingerprint_base(kIdentity);
  for (size_t i = 0, at = 0; i < 4; at += counts[i++]) {
    CHECK_EQ(cut.token_count(i), counts[i]);
    CHECK_EQ(cut.fingerprint(i), horner(base, tokens.data() + at, std::min(counts[i], 8u)));
    const Chain alone(kIdentity, tokens.data() + at, counts[i], nullptr, 0, counts[i], false);
    CHECK(cut.content_keys()[i] == alone.content_keys()[0]);
  }
  const Chain slice = cut.slice(1, 2);
  CHECK_EQ(slice.start_token(0), 116u);
  CHECK_EQ(slice.num_tokens(), 12u);
  const Chain plain(kIdentity, tokens.data(), tokens.size(), nullptr, 0, 16, false);
  CHECK(cut.keys()[0] != plain.keys()[0]);  // another root
  const Chain same(kIdentity, tokens.data(), tokens.size(), nullptr, 0, 16, false, {.counts = counts});
  CHECK(same.keys()[0] == plain.keys()[0]);
  CHECK(same.keys()[1] != plain.keys()[1]);
}

TEST(derived_values_are_computed_once_by_any_thread) {
  const std::vector<int32_t> tokens = prompt(4096);
  const Chain chain(kIdentity, tokens.data(), tokens.size(), nullptr, 0, 16, false);
  std::vector<std::thread> threads;
  std::atomic<int> differing{0};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, slice = chain.slice(i, chain.size() - i), i] {
      if (slice.content_keys() - i != chain.content_keys()) ++differing;
      if (slice.fingerprints() - i != chain.fingerprints()) ++differing;
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(differing.load(), 0);
}
