#include "core/base/checksum.h"

#include <array>
#include <atomic>
#include <bit>
#include <cstring>

#include "core/base/stream.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kv {
namespace {

static_assert(std::endian::native == std::endian::little);

// Bit 31 of a checksum is the coefficient of x^0 (the CRC is "reflected"). Arithmetic is modulo kPoly.
constexpr uint32_t kPoly = 0x82f63b78, kOne = 0x80000000;

constexpr uint32_t times_x(uint32_t a) { return a >> 1 ^ (kPoly & -(a & 1)); }

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int i = 31; i >= 0; --i, b = times_x(b)) product ^= b & -(a >> i & 1);
  return product;
}

// kSquares[i] = x^(2^i).
constexpr auto kSquares = [] {
  std::array<uint32_t, 64> squares{kOne >> 1};
  for (size_t i = 1; i < squares.size(); ++i) squares[i] = multiply(squares[i - 1], squares[i - 1]);
  return squares;
}();

constexpr uint32_t power_of_x(uint64_t exponent) {
  uint32_t power = kOne;
  for (; exponent != 0; exponent &= exponent - 1) power = multiply(power, kSquares[std::countr_zero(exponent)]);
  return power;
}

// kTables[0][b] is the checksum of byte b, kTables[i][b] that of b and i zero bytes.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (size_t i = 0; i < tables.size(); ++i) {
      for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
      tables[i][b] = crc;
    }
  }
  return tables;
}();

uint64_t load(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

using Stretches = std::array<uint32_t, kStretches>;  // their checksums

// ---------------------------------------------------------------- one stretch; crc without the inversions

uint32_t extend_portable(uint32_t crc, const uint8_t* p, size_t n) {
  for (; n >= 8; n -= 8, p += 8) {
    const uint64_t word = load(p) ^ crc;
    crc = 0;
    for (int i = 0; i < 8; ++i) crc ^= kTables[7 - i][word >> 8 * i & 0xff];
  }
  for (; n > 0; --n, ++p) crc = crc >> 8 ^ kTables[0][(crc ^ *p) & 0xff];
  return crc;
}

#if defined(__x86_64__)

__attribute__((target("sse4.2"))) uint32_t extend_sse42(uint32_t crc, const uint8_t* p, size_t n) {
  uint64_t wide = crc;
  for (; n >= 8; n -= 8, p += 8) wide = _mm_crc32_u64(wide, load(p));
  crc = static_cast<uint32_t>(wide);
  for (; n > 0; --n, ++p) crc = _mm_crc32_u8(crc, *p);
  return crc;
}

// ---------------------------------------------------------------- four stretches, each a multiple of 64 bytes

template <bool kCopy>
__attribute__((target("sse4.2"))) Stretches stretches_sse42(uint8_t* dst, const uint8_t* src, size_t stretch) {
  std::array<uint64_t, kStretches> crc{};
  for (size_t i = 0; i < stretch; i += 64) {
#pragma GCC unroll 8
    for (int j = 0; j < 64; j += 8)
#pragma GCC unroll 4
      for (size_t s = 0; s < kStretches; ++s) crc[s] = _mm_crc32_u64(crc[s], load(src + s * stretch + i + j));
    if constexpr (kCopy) stream_lines(dst + i, src + i, stretch);
  }
  if constexpr (kCopy) _mm_sfence();
  Stretches result;
  for (size_t s = 0; s < kStretches; ++s) result[s] = static_cast<uint32_t>(crc[s]);
  return result;
}

// Folding: `rest` is as many bytes as a register has, with the same checksum as all bytes so far. Before the next are added,
// each of its 16-byte parts moves on by so many bits: its earlier half times x^(bits + 64), its later half times x^bits, both
// modulo the polynomial. The product of two reflected numbers is one bit short, hence one x less.
constexpr int64_t earlier_by(uint64_t bits) { return static_cast<int64_t>(uint64_t{power_of_x(bits + 63)} << 32); }
constexpr int64_t later_by(uint64_t bits) { return static_cast<int64_t>(uint64_t{power_of_x(bits - 1)} << 32); }

// From the last bytes to the first each is added as if it were the stretch's last, and what came before moves back: no more is
// known of it then but to move on the result by the whole stretch. So x^-1 is needed, which is a power of x as well.
constexpr uint64_t kPeriod = (uint64_t{1} << 31) - 1;
static_assert(power_of_x(kPeriod) == kOne);

enum class Go { Check, Copy, CopyDown };

// Half of the stretches fold, the others go through the crc32 instruction: either takes 8 bytes a cycle (Zen 3) of a unit of its
// own, so together they take nearly twice as many. That instruction knows no way down.
template <Go kGo>
__attribute__((target("avx2,vpclmulqdq,sse4.2"))) Stretches stretches_avx2(uint8_t* dst, const uint8_t* src, size_t stretch) {
  constexpr bool kCopy = kGo != Go::Check, kDown = kGo == Go::CopyDown;
  constexpr int64_t kEarlier = earlier_by(kDown ? kPeriod - 256 : 256), kLater = later_by(kDown ? kPeriod - 256 : 256);
  constexpr size_t kFolded = kDown ? kStretches : kStretches / 2;
  const __m256i factors = _mm256_setr_epi64x(kEarlier, kLater, kEarlier, kLater);
  __m256i rest[kFolded] = {};
  uint64_t wide[kStretches - kFolded + 1] = {};
  for (size_t done = 0; done < stretch; done += 64) {
    const size_t i = kDown ? stretch - 64 - done : done;
    __m256i bytes[kStretches][2];  // loaded before any is stored: see stream_lines
#pragma GCC unroll 4
    for (size_t s = 0; s < (kCopy ? kStretches : kFolded); ++s)
#pragma GCC unroll 2
      for (size_t j = 0; j < 2; ++j)
        bytes[s][j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + s * stretch + i) + j);
#pragma GCC unroll 8
    for (size_t j = 0; j < 64; j += 8)
#pragma GCC unroll 2
      for (size_t s = kFolded; s < kStretches; ++s)
        wide[s - kFolded] = _mm_crc32_u64(wide[s - kFolded], load(src + s * stretch + i + j));
#pragma GCC unroll 4
    for (size_t s = 0; s < kStretches; ++s)
#pragma GCC unroll 2
      for (size_t j = 0; j < 2; ++j) {
        if constexpr (kCopy) _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + s * stretch + i) + j, bytes[s][j]);
        if (s >= kFolded) continue;
        const __m256i from = kDown ? _mm256_xor_si256(rest[s], bytes[s][1 - j]) : rest[s];
        const __m256i earlier = _mm256_clmulepi64_epi128(from, factors, 0x00);
        const __m256i later = _mm256_clmulepi64_epi128(from, factors, 0x11);
        rest[s] = _mm256_xor_si256(earlier, later);
        if constexpr (!kDown) rest[s] = _mm256_xor_si256(rest[s], bytes[s][j]);
      }
  }
  if constexpr (kCopy) _mm_sfence();
  Stretches crc;
  for (size_t s = kFolded; s < kStretches; ++s) crc[s] = static_cast<uint32_t>(wide[s - kFolded]);
#pragma GCC unroll 4  // indexed by a variable, `rest` would live in memory, also in the loop above
  for (size_t s = 0; s < kFolded; ++s) {
    alignas(32) uint8_t bytes[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), rest[s]);
    crc[s] = extend_sse42(0, bytes, sizeof bytes);
  }
  return crc;
}

template <Go kGo>
__attribute__((target("avx512f,vpclmulqdq,sse4.2"))) Stretches stretches_avx512(uint8_t* dst, const uint8_t* src,
                                                                                size_t stretch) {
  constexpr bool kCopy = kGo != Go::Check, kDown = kGo == Go::CopyDown;
  constexpr int64_t kEarlier = earlier_by(kDown ? kPeriod - 512 : 512), kLater = later_by(kDown ? kPeriod - 512 : 512);
  const __m512i factors = _mm512_set4_epi64(kLater, kEarlier, kLater, kEarlier);
  __m512i rest[kStretches] = {};
  for (size_t done = 0; done < stretch; done += 64) {
    const size_t i = kDown ? stretch - 64 - done : done;
    __m512i bytes[kStretches];  // loaded before any is stored: see stream_lines
#pragma GCC unroll 4
    for (size_t s = 0; s < kStretches; ++s) bytes[s] = _mm512_loadu_si512(src + s * stretch + i);
#pragma GCC unroll 4
    for (size_t s = 0; s < kStretches; ++s) {
      if constexpr (kCopy) _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + s * stretch + i), bytes[s]);
      const __m512i from = kDown ? _mm512_xor_si512(rest[s], bytes[s]) : rest[s];
      const __m512i earlier = _mm512_clmulepi64_epi128(from, factors, 0x00);
      const __m512i later = _mm512_clmulepi64_epi128(from, factors, 0x11);
      rest[s] = kDown ? _mm512_xor_si512(earlier, later) : _mm512_ternarylogic_epi64(earlier, later, bytes[s], 0x96);  // of three
    }
  }
  if constexpr (kCopy) _mm_sfence();
  Stretches crc;
#pragma GCC unroll 4  // indexed by a variable, `rest` would live in memory, also in the loop above
  for (size_t s = 0; s < kStretches; ++s) {
    alignas(64) uint8_t bytes[64];
    _mm512_store_si512(bytes, rest[s]);
    crc[s] = extend_sse42(0, bytes, sizeof bytes);
  }
  return crc;
}

// ---------------------------------------------------------------- one stretch, folded: too short to be worth four

// `rest` moved on by so many bits, and what lies there added.
template <uint64_t kBits>
__attribute__((target("avx512f,vpclmulqdq"), always_inline)) inline __m512i moved_on(__m512i rest, __m512i there) {
  constexpr int64_t kEarlier = earlier_by(kBits), kLater = later_by(kBits);
  const __m512i factors = _mm512_set4_epi64(kLater, kEarlier, kLater, kEarlier);
  const __m512i earlier = _mm512_clmulepi64_epi128(rest, factors, 0x00);
  const __m512i later = _mm512_clmulepi64_epi128(rest, factors, 0x11);
  return _mm512_ternarylogic_epi64(earlier, later, there, 0x96);
}

template <uint64_t kBits>
__attribute__((target("avx2,vpclmulqdq"), always_inline)) inline __m256i moved_on(__m256i rest, __m256i there) {
  constexpr int64_t kEarlier = earlier_by(kBits), kLater = later_by(kBits);
  const __m256i factors = _mm256_setr_epi64x(kEarlier, kLater, kEarlier, kLater);
  const __m256i earlier = _mm256_clmulepi64_epi128(rest, factors, 0x00);
  const __m256i later = _mm256_clmulepi64_epi128(rest, factors, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(earlier, later), there);
}

__attribute__((target("avx512f,vpclmulqdq,sse4.2"))) uint32_t extend_avx512(uint32_t crc, const uint8_t* p, size_t n) {
  constexpr size_t kAtOnce = 4 * 64;
  if (n < kAtOnce) return extend_sse42(crc, p, n);
  __m512i rest[4];
  for (size_t s = 0; s < 4; ++s) rest[s] = _mm512_loadu_si512(p + 64 * s);
  rest[0] = _mm512_xor_si512(rest[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (p += kAtOnce, n -= kAtOnce; n >= kAtOnce; p += kAtOnce, n -= kAtOnce)
#pragma GCC unroll 4
    for (size_t s = 0; s < 4; ++s) rest[s] = moved_on<8 * kAtOnce>(rest[s], _mm512_loadu_si512(p + 64 * s));
  __m512i all = rest[0];
#pragma GCC unroll 4
  for (size_t s = 1; s < 4; ++s) all = moved_on<512>(all, rest[s]);
  for (; n >= 64; p += 64, n -= 64) all = moved_on<512>(all, _mm512_loadu_si512(p));
  alignas(64) uint8_t bytes[64];
  _mm512_store_si512(bytes, all);
  return extend_sse42(extend_sse42(0, bytes, sizeof bytes), p, n);
}

__attribute__((target("avx2,vpclmulqdq,sse4.2"))) uint32_t extend_avx2(uint32_t crc, const uint8_t* p, size_t n) {
  constexpr size_t kAtOnce = 4 * 32;
  if (n < 2 * kAtOnce) return extend_sse42(crc, p, n);
  const auto at = [](const uint8_t* from) { return reinterpret_cast<const __m256i*>(from); };
  __m256i rest[4];
  for (size_t s = 0; s < 4; ++s) rest[s] = _mm256_loadu_si256(at(p + 32 * s));
  rest[0] = _mm256_xor_si256(rest[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (p += kAtOnce, n -= kAtOnce; n >= kAtOnce; p += kAtOnce, n -= kAtOnce)
#pragma GCC unroll 4
    for (size_t s = 0; s < 4; ++s) rest[s] = moved_on<8 * kAtOnce>(rest[s], _mm256_loadu_si256(at(p + 32 * s)));
  __m256i all = rest[0];
#pragma GCC unroll 4
  for (size_t s = 1; s < 4; ++s) all = moved_on<256>(all, rest[s]);
  for (; n >= 32; p += 32, n -= 32) all = moved_on<256>(all, _mm256_loadu_si256(at(p)));
  alignas(32) uint8_t bytes[32];
  _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), all);
  return extend_sse42(extend_sse42(0, bytes, sizeof bytes), p, n);
}
#endif

// ---------------------------------------------------------------- the choice

struct Path {
  uint32_t (*extend)(uint32_t crc, const uint8_t* p, size_t n);
  Stretches (*check)(uint8_t* dst, const uint8_t* src, size_t stretch);  // null: only `extend`
  Stretches (*copy)(uint8_t* dst, const uint8_t* src, size_t stretch);
  Stretches (*copy_down)(uint8_t* dst, const uint8_t* src, size_t stretch);  // null: cannot; its results are to be moved on
  size_t long_bytes;  // below it, to combine four checksums costs more than to work on them at once gains
};

constexpr size_t kLongCopy = 4 << 10;  // the same of copies
constexpr Path kPortable{extend_portable, nullptr, nullptr, nullptr, 0};
#if defined(__x86_64__)
constexpr Path kSse42{extend_sse42, stretches_sse42<false>, stretches_sse42<true>, nullptr, 4 << 10};
constexpr Path kAvx2{extend_avx2, stretches_avx2<Go::Check>, stretches_avx2<Go::Copy>, stretches_avx2<Go::CopyDown>, 16 << 10};
constexpr Path kAvx512{extend_avx512, stretches_avx512<Go::Check>, stretches_avx512<Go::Copy>, stretches_avx512<Go::CopyDown>,
                       64 << 10};
#endif

const Path& path_of(ChecksumPath path) {
#if defined(__x86_64__)
  if (path == ChecksumPath::Sse42) return kSse42;
  if (path == ChecksumPath::Avx2) return kAvx2;
  if (path == ChecksumPath::Avx512) return kAvx512;
#endif
  (void)path;
  return kPortable;
}

const Path& best() {
  for (ChecksumPath path : {ChecksumPath::Avx512, ChecksumPath::Avx2, ChecksumPath::Sse42})
    if (supported(path)) return path_of(path);
  return kPortable;
}

std::atomic<const Path*> active{nullptr};

const Path& chosen() {
  const Path* path = active.load(std::memory_order_relaxed);
  if (path == nullptr) {
    path = &best();
    active.store(path, std::memory_order_relaxed);
  }
  return *path;
}

uint32_t run(uint8_t* dst, const uint8_t* src, size_t n, uint32_t crc) {
  const Path& path = chosen();
  crc = ~crc;
  if (path.check != nullptr && n >= (dst != nullptr ? kLongCopy : path.long_bytes)) {
    const size_t stretch = n / kStretches & ~size_t{511};  // a round number has a power that is quickly found
    const bool down = dst != nullptr && path.copy_down != nullptr && trails(dst, src);
    const Stretches parts = (down ? path.copy_down : dst != nullptr ? path.copy : path.check)(dst, src, stretch);
    const uint32_t shift = power_of_x(8 * stretch);
    for (uint32_t part : parts) crc = multiply(down ? crc ^ part : crc, shift) ^ (down ? 0 : part);
    const size_t done = parts.size() * stretch;
    src += done;
    n -= done;
    if (dst != nullptr) dst += done;
  }
  if (dst != nullptr) std::memcpy(dst, src, n);
  return ~path.extend(crc, src, n);
}

}  // namespace

uint32_t crc32c(const void* data, size_t n, uint32_t crc) { return run(nullptr, static_cast<const uint8_t*>(data), n, crc); }

uint32_t crc32c_stream(void* dst, const void* src, size_t n, uint32_t crc) {
  return run(static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), n, crc);
}

bool copies_down() { return chosen().copy_down != nullptr; }

bool supported(ChecksumPath path) {
  if (path == ChecksumPath::Portable) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (path == ChecksumPath::Sse42) return __builtin_cpu_supports("sse4.2");
  if (!__builtin_cpu_supports("vpclmulqdq")) return false;
  return path == ChecksumPath::Avx2 ? __builtin_cpu_supports("avx2") : __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

void use(ChecksumPath path) { active.store(&path_of(path), std::memory_order_relaxed); }

}  // namespace kv
