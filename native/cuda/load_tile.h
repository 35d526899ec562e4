// What a block of threads does of kvk_load and kvk_score: rows of one segment, brought and then stored or compared.
//
// Owns which thread does which row and octet; host and device alike. Never allocates. Invariant: a segment that is not aligned,
// or of another codec than the fast loop has, goes element by element and gives the same bytes.
#pragma once

#include "cuda/rows_tile.h"

namespace kvk {

constexpr uint32_t kLoadThreads = 256;

KVK_BOTH uint32_t rows_at_once(uint32_t head_dim) { return kLoadThreads / (head_dim / 16); }

// Tokens of a segment that one block of threads brings.
KVK_BOTH uint32_t tile_tokens(uint32_t head_dim) { return rows_at_once(head_dim) * kRowsInFlight; }

template <int Dtype>
struct StoreAt {
  void* out;  // of the segment's first token
  int64_t token_stride;
  uint32_t first;
  KVK_BOTH void operator()(uint32_t token, uint32_t octet, const float* x) const {
    const int64_t bytes = static_cast<int64_t>(token - first) * token_stride + octet * (Dtype == KVK_F32 ? 4 : 2);
    store_octet<Dtype>(x, at(out, bytes));
  }
};

// Rows of one tile of one side of one segment, for thread `thread`, into sink: fast where the bytes allow it.
template <int Dtype, class Sink>
KVK_BOTH void bring_tile(const Side& side, const Shape& shape, uint32_t head, uint32_t first, uint32_t tokens, uint32_t tile,
                         uint32_t thread, const Sink& sink) {
  const uint32_t pairs = shape.head_dim / 16, rows = rows_at_once(shape.head_dim);
  const uint32_t row = thread / pairs, p = thread % pairs;
  const uint32_t token = first + tile * tile_tokens(shape.head_dim) + row, stop = first + tokens;
  if (row >= rows || token >= stop) return;
  const bool fits = is_aligned(side);
  if (fits && side.codec == KVK_INT8) return bring_rows<KVK_INT8>(side, shape, head, token, stop, rows, p, sink);
  if (fits && side.codec == KVK_INT4) return bring_rows<KVK_INT4>(side, shape, head, token, stop, rows, p, sink);
  if (fits && side.codec == Dtype) return bring_rows<Dtype>(side, shape, head, token, stop, rows, p, sink);
  const OctetPair pair = octet_pair(shape, side.turn != nullptr, p);
  for (uint32_t t = token, r = 0; r < kRowsInFlight && t < stop; ++r, t += rows)
    for (uint32_t o = 0; o < 2; ++o) {
      const uint32_t octet = o == 0 ? pair.first : pair.second;
      float x[8];
      KVK_UNROLL
      for (uint32_t i = 0; i < 8; ++i) x[i] = value(side, shape, head, t, octet + i);
      sink(t, octet, x);
    }
}

// Adds (x - computed)^2 and computed^2 of what one thread sees of the rows of its tile.
template <int Dtype>
struct Compare {
  const void* computed;  // of the segment's first token, of one head
  int64_t token_stride;
  uint32_t first, token, step;  // the thread's first token, and how far apart its next are
  float* square;                // [kRowsInFlight]
  float* norm;
  KVK_BOTH void operator()(uint32_t t, uint32_t octet, const float* x) const {
    const int64_t bytes = static_cast<int64_t>(t - first) * token_stride + octet * (Dtype == KVK_F32 ? 4 : 2);
    float y[8], s = 0, n = 0;
    widen_octet<Dtype>(load_octet<Dtype>(at(computed, bytes)), y);
    KVK_UNROLL
    for (uint32_t i = 0; i < 8; ++i) {
      s += (x[i] - y[i]) * (x[i] - y[i]);
      n += y[i] * y[i];
    }
    KVK_UNROLL
    for (uint32_t r = 0; r < kRowsInFlight; ++r) {  // no register is indexed by a variable
      square[r] += t == token + r * step ? s : 0;
      norm[r] += t == token + r * step ? n : 0;
    }
  }
};

}  // namespace kvk
