#include "core/format/sha256.h"

#include <atomic>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kv {
namespace sha256 {
namespace {

alignas(64) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

void compress_portable(uint32_t state[8], const uint8_t* data, size_t blocks) {
  for (; blocks > 0; --blocks, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = uint32_t{data[4 * i]} << 24 | uint32_t{data[4 * i + 1]} << 16 | uint32_t{data[4 * i + 2]} << 8 | data[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] =
          w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] + (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    uint32_t s[8];
    std::memcpy(s, state, sizeof s);
#pragma GCC unroll 64
    for (int i = 0; i < 64; ++i) {  // the letters stay, their names move: round i calls s[(n - i) mod 8] its n-th
      auto at = [&](int n) -> uint32_t& { return s[(n + 64 - i) % 8]; };
      const uint32_t a = at(0), e = at(4);
      const uint32_t t =
          at(7) + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & at(5)) ^ (~e & at(6))) + kRound[i] + w[i];
      at(3) += t;
      at(7) = t + (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & at(1)) ^ (a & at(2)) ^ (at(1) & at(2)));
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
  }
}

#if defined(__x86_64__)
// The instructions want the state as {A,B,E,F} and {C,D,G,H}, high word first.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(uint32_t state[8], const uint8_t* data, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1b);
  __m128i abef = _mm_alignr_epi8(badc, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, badc, 0xf0);

  for (; blocks > 0; --blocks, data += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), swap);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {  // four rounds each; w[i % 4] holds their four words
      __m128i& now = w[i % 4];
      const __m128i& last = w[(i + 3) % 4];
      if (i >= 4) {
        const __m128i& third = w[(i + 2) % 4];
        now =
            _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) % 4]), _mm_alignr_epi8(last, third, 4)), last);
      }
      const __m128i k = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, k);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(k, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#endif

std::atomic<Compress> active{nullptr};

Compress chosen() {
  Compress compress = active.load(std::memory_order_relaxed);
  if (compress == nullptr) {
    compress = accelerated() ? accelerated() : portable();
    active.store(compress, std::memory_order_relaxed);
  }
  return compress;
}

}  // namespace

Compress portable() { return compress_portable; }

Compress accelerated() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;  // g++ 12 does not know "sha" in __builtin_cpu_supports
  asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  if ((ebx >> 29 & 1) && __builtin_cpu_supports("sse4.1")) return compress_sha_ni;
#endif
  return nullptr;
}

void use(Compress compress) { active.store(compress, std::memory_order_relaxed); }

}  // namespace sha256

namespace {

void put_length(uint8_t* out, uint64_t bytes) {
  const uint64_t bits = __builtin_bswap64(bytes * 8);
  std::memcpy(out, &bits, sizeof bits);
}

Key key_of(const uint32_t state[8]) {
  uint32_t digest[8];
  for (int i = 0; i < 8; ++i) digest[i] = __builtin_bswap32(state[i]);
  Key key;
  std::memcpy(&key, digest, sizeof key);
  return key;
}

}  // namespace

Sha256& Sha256::update(const void* data, size_t n) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const size_t held = length_ % 64;
  length_ += n;
  if (held != 0) {
    const size_t take = n < 64 - held ? n : 64 - held;
    std::memcpy(tail_ + held, bytes, take);
    if (held + take < 64) return *this;
    sha256::chosen()(state_, tail_, 1);
    bytes += take;
    n -= take;
  }
  if (n >= 64) sha256::chosen()(state_, bytes, n / 64);
  std::memcpy(tail_, bytes + n / 64 * 64, n % 64);
  return *this;
}

Key Sha256::finish() {
  static constexpr uint8_t kPadding[64] = {0x80};
  uint8_t length[8];
  put_length(length, length_);
  update(kPadding, (119 - length_ % 64) % 64 + 1);  // up to 8 bytes before a block's end
  update(length, 8);
  return key_of(state_);
}

Key Sha256::finish_with(const void* data, size_t n) const {
  if (length_ % 64 != 0 || n > 55) return Sha256(*this).update(data, n).finish();
  uint8_t block[64] = {};              // the last one: the data, a bit, zeros and the length
  if (n) std::memcpy(block, data, n);  // nothing may lie at null
  block[n] = 0x80;
  put_length(block + 56, length_ + n);
  uint32_t state[8];
  std::memcpy(state, state_, sizeof state);
  sha256::chosen()(state, block, 1);
  return key_of(state);
}

}  // namespace kv
