// The tests of kernels_test.cc, over the library in which AVX512-FP16 and AMX are emulated; and the emulation by itself, each
// instruction against the manual's words, and against the instruction where this CPU has it.
#include "tests/kernels_test.cc"

#define KVK_EMULATED 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/numbers.h"
#include "cpu/tiles.h"
#include "tests/emulation/cpu/half_fma.h"
#define Tiles RealTiles
#include "cpu/tile_instructions.h"
#undef Tiles

namespace kvk {
namespace {

bool has_amx() {
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
         syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

struct Square {  // memory of exactly one tile, rows wider than the tile
  std::vector<uint8_t> bytes;
  explicit Square(uint64_t stride = 64, int rows = 16) : bytes((rows - 1) * stride + 64) {
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(pick(0, 255));
  }
  float& number(int row, int column, uint64_t stride = 64) { return reinterpret_cast<float*>(&bytes[row * stride])[column]; }
};

// Both products of the same operands, as T computes them.
template <class T>
void both_products(uint32_t depth_bytes, const Square& left, const Square& right, const Square& start, Square* pairs,
                   Square* codes) {
  T::configure(shapes_for(depth_bytes));
  T::template load<0>(start.bytes.data(), 64), T::template load<1>(start.bytes.data(), 64);
  T::template load<4>(left.bytes.data(), 64), T::template load<6>(right.bytes.data(), 64);
  T::template dot_bf16<0, 4, 6>(), T::template dot_signed_unsigned<1, 4, 6>();
  T::template store<0>(pairs->bytes.data(), 64), T::template store<1>(codes->bytes.data(), 64);
  T::release();
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512fp16"))) uint16_t real_half_fma(uint16_t a, uint16_t b, uint16_t c) {
  const __m128h sum = _mm_fmadd_sh(_mm_castsi128_ph(_mm_set1_epi16(static_cast<short>(a))),
                                   _mm_castsi128_ph(_mm_set1_epi16(static_cast<short>(b))),
                                   _mm_castsi128_ph(_mm_set1_epi16(static_cast<short>(c))));
  return static_cast<uint16_t>(_mm_extract_epi16(_mm_castph_si128(sum), 0));
}

_Float16 half_of(uint16_t bits) { return __builtin_bit_cast(_Float16, bits); }

uint16_t bits_of(const Square& from, int row, int column) {
  uint16_t bits;
  std::memcpy(&bits, &from.bytes[64 * row + 2 * column], 2);
  return bits;
}

}  // namespace
}  // namespace kvk

TEST(a_tile_is_loaded_and_stored_by_its_shape) {
  using namespace kvk;
  const Registers registers;
  Tiles::configure(shapes_for(32));
  const Square from(80);
  Tiles::load<4>(from.bytes.data(), 80);  // 16 rows of 32 bytes
  std::vector<uint8_t> to(16 * 100, 7);
  Tiles::store<4>(to.data(), 100);
  for (int row = 0; row < 16; ++row)
    for (int i = 0; i < 100; ++i) CHECK_EQ(int{to[100 * row + i]}, i < 32 ? int{from.bytes[80 * row + i]} : 7);
  Tiles::load<6>(from.bytes.data(), 80);  // 8 rows of 64 bytes
  std::fill(to.begin(), to.end(), 7);
  Tiles::store<6>(to.data(), 100);
  for (int row = 0; row < 16; ++row)
    for (int i = 0; i < 100; ++i) CHECK_EQ(int{to[100 * row + i]}, row < 8 && i < 64 ? int{from.bytes[80 * row + i]} : 7);
  Tiles::release();
}

TEST(bytes_are_multiplied_signed_on_the_left) {
  using namespace kvk;
  for (uint32_t depth_bytes : {16u, 32u, 64u}) {
    Tiles::configure(shapes_for(depth_bytes));
    const Square left, right, start;
    Tiles::load<0>(start.bytes.data(), 64), Tiles::load<4>(left.bytes.data(), 64), Tiles::load<6>(right.bytes.data(), 64);
    Tiles::dot_signed_unsigned<0, 4, 6>();
    Square sum;
    Tiles::store<0>(sum.bytes.data(), 64);
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 16; ++column) {
        int64_t wanted = *reinterpret_cast<const int32_t*>(&start.bytes[64 * row + 4 * column]);
        for (uint32_t k = 0; k < depth_bytes; ++k)
          wanted += int64_t{static_cast<int8_t>(left.bytes[64 * row + k])} * right.bytes[64 * (k / 4) + 4 * column + k % 4];
        CHECK_EQ(*reinterpret_cast<const int32_t*>(&sum.bytes[64 * row + 4 * column]), static_cast<int32_t>(wanted));
      }
  }
  Tiles::release();
}

TEST(pairs_of_bf16_are_summed_even_and_odd_apart) {
  using namespace kvk;
  Tiles::configure(shapes_for(64));
  for (int i = 0; i < 20; ++i) {
    Square left, right, sum;
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 16; ++column) sum.number(row, column) = noise();
    for (size_t at = 0; at < left.bytes.size(); at += 2) {
      const uint16_t a = bf16(noise()), b = bf16(noise());
      std::memcpy(&left.bytes[at], &a, 2), std::memcpy(&right.bytes[at], &b, 2);
    }
    const Square start = sum;
    Tiles::load<1>(start.bytes.data(), 64), Tiles::load<5>(left.bytes.data(), 64), Tiles::load<7>(right.bytes.data(), 64);
    Tiles::dot_bf16<1, 5, 7>();
    Tiles::store<1>(sum.bytes.data(), 64);
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 16; ++column) {
        float even = 0, odd = 0;
        for (int k = 0; k < 16; ++k) {
          even = std::fma(from_bf16(bits_of(left, row, 2 * k)), from_bf16(bits_of(right, k, 2 * column)), even);
          odd = std::fma(from_bf16(bits_of(left, row, 2 * k + 1)), from_bf16(bits_of(right, k, 2 * column + 1)), odd);
        }
        CHECK_EQ(sum.number(row, column), const_cast<Square&>(start).number(row, column) + (even + odd));
      }
  }
  Tiles::release();
}

TEST(too_small_a_bf16_counts_as_zero) {
  using namespace kvk;
  Tiles::configure(shapes_for(64));
  Square left, right, sum;
  std::fill(left.bytes.begin(), left.bytes.end(), 0), std::fill(right.bytes.begin(), right.bytes.end(), 0);
  const uint16_t small = 0x0040, large = 0x7f00;  // 2^-127, 2^127
  std::memcpy(&left.bytes[0], &small, 2), std::memcpy(&right.bytes[0], &large, 2);
  Tiles::zero<0>(), Tiles::load<4>(left.bytes.data(), 64), Tiles::load<6>(right.bytes.data(), 64);
  Tiles::dot_bf16<0, 4, 6>();
  Tiles::store<0>(sum.bytes.data(), 64);
  CHECK_EQ(sum.number(0, 0), 0.0f);
  Tiles::release();
}

TEST(the_emulated_tiles_are_the_real_ones) {
  using namespace kvk;
  if (!has_amx()) {
    std::printf("  skipped: this CPU has no AMX, or the kernel does not give it\n");
    return;
  }
  for (int i = 0; i < 200; ++i) {
    const Square left, right, start;
    Square pairs[2], codes[2];
    const uint32_t depth_bytes = 16u << i % 3;
    both_products<Tiles>(depth_bytes, left, right, start, &pairs[0], &codes[0]);
    both_products<RealTiles>(depth_bytes, left, right, start, &pairs[1], &codes[1]);
    CHECK(codes[0].bytes == codes[1].bytes);
    for (int j = 0; j < 256; ++j) {  // of any bits: NaN is NaN, whichever
      const float a = pairs[0].number(j / 16, j % 16), b = pairs[1].number(j / 16, j % 16);
      CHECK((a != a && b != b) || a == b);
    }
  }
}

TEST(an_fp16_product_and_sum_is_rounded_once) {
  using namespace kvk;
  const bool real = __builtin_cpu_supports("avx512fp16");
  if (!real) std::printf("  not beside the instruction: this CPU has no AVX512-FP16\n");
  for (int i = 0; i < 300000; ++i) {
    uint16_t a = static_cast<uint16_t>(pick(0, 0xffff)), b = static_cast<uint16_t>(pick(0, 0xffff));
    uint16_t c = static_cast<uint16_t>(pick(0, 0xffff));
    const _Float16 found = half_fma(half_of(a), half_of(b), half_of(c));
    const auto exact = static_cast<__float128>(half_of(a)) * half_of(b) + static_cast<__float128>(half_of(c));  // 80 bits at most
    const auto wanted = static_cast<_Float16>(exact);
    CHECK((found != found && wanted != wanted) || __builtin_bit_cast(uint16_t, found) == __builtin_bit_cast(uint16_t, wanted));
    if (!real) continue;
    const _Float16 instruction = half_of(real_half_fma(a, b, c));
    CHECK((found != found && instruction != instruction) || found == instruction);
  }
}
