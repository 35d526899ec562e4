// Shuffles, mma and ldmatrix over the records of 32 lanes, with the layouts of fragments as the PTX manual draws them.
//
// Written from the manual, element by element, and not from the kernels: an index wrong in a kernel meets a right one here.
#include "cuda/device.h"
#include "cuda/operands.h"

namespace kvk {
namespace {

struct Shuffle {
  uint32_t value, from, out;
};

struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

struct Matrices {
  uint32_t* out;
  const void* row;
};

template <class Record>
const Record& record(void* const* records, uint32_t lane) {
  return *static_cast<const Record*>(records[lane]);
}

uint16_t half_of(uint32_t word, uint32_t i) { return static_cast<uint16_t>(word >> 16 * i); }

// PTX, "Matrix fragments for mma.m16n8k16 with floating point type": for element i of a: row = groupID for i in {0, 1, 4, 5},
// groupID + 8 else; column = threadID_in_group * 2 + (i & 1), + 8 for i >= 4. b: row = threadID_in_group * 2 + (i & 1), + 8 for
// i >= 2; column = groupID. c: row = groupID for i < 2, + 8 else; column = threadID_in_group * 2 + (i & 1).
template <float (*kWiden)(uint16_t)>
void multiply(void* const* records) {
  float a[16][16], b[16][8];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const auto& product = record<Product>(records, lane);
    const uint32_t group = lane >> 2, in_group = lane % 4;
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
      const uint32_t column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      a[row][column] = kWiden(half_of(product.a[i / 2], i & 1));
    }
    for (uint32_t i = 0; i < 4; ++i)
      b[in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = kWiden(half_of(product.b[i / 2], i & 1));
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const auto& product = record<Product>(records, lane);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = (lane >> 2) + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
      float sum = product.c[i];
      for (uint32_t k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      product.c[i] = sum;
    }
  }
}

struct WholeProduct {
  int32_t* c;
  const uint32_t* a;
  uint32_t b[2];
};

// PTX, "Matrix fragments for mma.m16n8k32": of a, element i of 16: row = groupID for i in 0..3 and 8..11, groupID + 8 else;
// column = threadID_in_group * 4 + (i & 3), + 16 for i >= 8. b, element i of 8: row = threadID_in_group * 4 + (i & 3), + 16 for i
// >= 4; column = groupID. c as of m16n8k16.
void multiply_whole(void* const* records) {
  int32_t a[16][32], b[32][8];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const auto& product = record<WholeProduct>(records, lane);
    const uint32_t group = lane >> 2, in_group = lane % 4;
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t row = i < 4 || (i >= 8 && i < 12) ? group : group + 8;
      a[row][in_group * 4 + (i & 3) + (i >= 8 ? 16 : 0)] = static_cast<uint8_t>(product.a[i / 4] >> 8 * (i & 3));
    }
    for (uint32_t i = 0; i < 8; ++i)
      b[in_group * 4 + (i & 3) + (i >= 4 ? 16 : 0)][group] = static_cast<int8_t>(product.b[i / 4] >> 8 * (i & 3));
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const auto& product = record<WholeProduct>(records, lane);
    for (uint32_t i = 0; i < 4; ++i)
      for (uint32_t k = 0; k < 32; ++k) product.c[i] += a[(lane >> 2) + (i < 2 ? 0 : 8)][k] * b[k][lane % 4 * 2 + (i & 1)];
  }
}

float widen_bf16(uint16_t bits) { return from_bf16(bits); }

template <bool kTransposed>
void load(void* const* records) {
  for (uint32_t matrix = 0; matrix < 4; ++matrix) {
    uint16_t m[8][8];
    for (uint32_t row = 0; row < 8; ++row) {
      const void* from = record<Matrices>(records, 8 * matrix + row).row;
      if (reinterpret_cast<uintptr_t>(from) % 16 != 0) __builtin_trap();
      std::memcpy(m[row], from, 16);
    }
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const uint32_t row_of_lane = lane / 4, pair = lane % 4 * 2;
      const uint16_t low = kTransposed ? m[pair][row_of_lane] : m[row_of_lane][pair],
                     high = kTransposed ? m[pair + 1][row_of_lane] : m[row_of_lane][pair + 1];
      record<Matrices>(records, lane).out[matrix] = low | static_cast<uint32_t>(high) << 16;
    }
  }
}

}  // namespace

void sync_warp() {
  emulation::meet(nullptr, [](void* const*) {});
}

uint32_t shuffle_bits(uint32_t value, uint32_t from) {
  Shuffle shuffle{value, from % 32, 0};
  emulation::meet(&shuffle, [](void* const* records) {
    for (uint32_t lane = 0; lane < 32; ++lane) {
      auto& of_lane = *static_cast<Shuffle*>(records[lane]);
      of_lane.out = record<Shuffle>(records, of_lane.from).value;
    }
  });
  return shuffle.out;
}

uint32_t ballot(bool value) {
  Shuffle shuffle{value, 0, 0};
  emulation::meet(&shuffle, [](void* const* records) {
    uint32_t bits = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) bits |= record<Shuffle>(records, lane).value << lane;
    for (uint32_t lane = 0; lane < 32; ++lane) static_cast<Shuffle*>(records[lane])->out = bits;
  });
  return shuffle.out;
}

void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product product{c, a, {b0, b1}};
  emulation::meet(&product, multiply<from_half>);
}

void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product product{c, a, {b0, b1}};
  emulation::meet(&product, multiply<widen_bf16>);
}

void mma_u8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  WholeProduct product{c, a, {b0, b1}};
  emulation::meet(&product, multiply_whole);
}

uint32_t transposed(uint32_t word) {
  Shuffle shuffle{word, 0, 0};
  emulation::meet(&shuffle, [](void* const* records) {
    uint16_t m[8][8];
    for (uint32_t lane = 0; lane < 32; ++lane)
      for (uint32_t i = 0; i < 2; ++i) m[lane / 4][lane % 4 * 2 + i] = half_of(record<Shuffle>(records, lane).value, i);
    for (uint32_t lane = 0; lane < 32; ++lane)
      static_cast<Shuffle*>(records[lane])->out = m[lane % 4 * 2][lane / 4] | static_cast<uint32_t>(m[lane % 4 * 2 + 1][lane / 4])
                                                                                  << 16;
  });
  return shuffle.out;
}

void load_matrices(uint32_t (&m)[4], const void* row) {
  Matrices matrices{m, row};
  emulation::meet(&matrices, load<false>);
}

void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
  Matrices matrices{m, row};
  emulation::meet(&matrices, load<true>);
}

}  // namespace kvk
