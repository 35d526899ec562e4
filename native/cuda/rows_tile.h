// Rows of K or V of any codec: dequantised, turned, eight elements at a time. The loops of dequantise, rotate, load and score.
//
// Owns what one thread does to one row; host and device alike. Never allocates. Invariant: the arithmetic is that of
// native/cpu/codec_rows.h and turn_row(), operation by operation, so the bytes are the CPU library's.
#pragma once

#include "cuda/numbers.h"

namespace kvk {

// K or V of one block, from the block's first token and head on.
struct Side {
  const void* data;
  int64_t head_stride, token_stride;
  const uint16_t *scale, *zero;  // K: [head][group][head_dim]; V: [head][token]
  int64_t scale_head_stride;
  const float* turn;      // NULL: not turned
  uint32_t codec, group;  // 0: V
};

// How a head's elements are turned, and how many there are.
struct Shape {
  uint32_t head_dim, rope, rotary_dim;
};

KVK_BOTH Side keys_of(const kvk_segment& s) {
  return {s.k, s.k_head_stride, s.k_token_stride, s.k_scale, s.k_zero, s.k_scale_head_stride, s.turn, s.codec, s.k_group};
}

KVK_BOTH Side values_of(const kvk_segment& s) {
  return {s.v, s.v_head_stride, s.v_token_stride, s.v_scale, s.v_zero, s.v_scale_head_stride, nullptr, s.codec, 0};
}

KVK_BOTH bool is_quantised(uint32_t codec) { return codec == KVK_INT8 || codec == KVK_INT4; }

// What a code stands for: at most what fp16 holds, for it was made of that; rounding takes it beyond.
KVK_BOTH float decoded(float code, float scale, float zero) {
  const float x = plus(times(code, scale), zero);
  return x > kLargestHalf ? kLargestHalf : x;
}

// ------------------------------------------------------------ one element: the naive kernels, and what does not fit eights

KVK_BOTH float plain_value(const Side& s, uint32_t head, uint32_t token, uint32_t n, uint32_t i) {
  const void* row = at(s.data, head * s.head_stride + token * s.token_stride);
  if (!is_quantised(s.codec)) return element(s.codec, row, i);
  const auto* bytes = static_cast<const uint8_t*>(row);
  const uint32_t code = s.codec == KVK_INT8 ? bytes[i] : bytes[i / 2] >> 4 * (i % 2) & 15;
  const uint64_t place = s.group != 0 ? static_cast<uint64_t>(token / s.group) * n + i : token;
  const uint16_t scale = at(s.scale, head * s.scale_head_stride)[place], zero = at(s.zero, head * s.scale_head_stride)[place];
  return decoded(static_cast<float>(code), from_half(scale), from_half(zero));
}

KVK_BOTH float value(const Side& s, const Shape& shape, uint32_t head, uint32_t token, uint32_t i) {
  const float plain = plain_value(s, head, token, shape.head_dim, i);
  if (s.turn == nullptr || i >= shape.rotary_dim) return plain;
  const uint32_t half = shape.rotary_dim / 2;
  const bool halves = shape.rope == KVK_ROPE_HALF;
  const uint32_t pair = halves ? i % half : i / 2;
  const bool second = halves ? i >= half : i % 2 == 1;
  const uint32_t partner = halves ? (second ? i - half : i + half) : i ^ 1;
  const float other = plain_value(s, head, token, shape.head_dim, partner);
  const float with = times(other, s.turn[half + pair]), alone = times(plain, s.turn[pair]);
  return second ? plus(alone, with) : minus(alone, with);
}

// ------------------------------------------------------------ eight elements

// The bytes of eight elements of a row.
template <int Codec>
struct Octet {
  uint32_t w[Codec == KVK_F32 ? 8 : Codec == KVK_INT8 ? 2 : Codec == KVK_INT4 ? 1 : 4];
};

template <int Codec>
KVK_BOTH constexpr uint32_t octet_bytes() {
  return sizeof(Octet<Codec>);
}

template <int Codec>
KVK_BOTH Octet<Codec> load_octet(const void* place) {
  Octet<Codec> o;
  if constexpr (Codec == KVK_INT4) {
    o.w[0] = *static_cast<const uint32_t*>(place);
  } else if constexpr (Codec == KVK_INT8) {
    const Words2 two = *static_cast<const Words2*>(place);
    o.w[0] = two.w[0], o.w[1] = two.w[1];
  } else {
    KVK_UNROLL
    for (uint32_t i = 0; i < sizeof o.w / 16; ++i) {
      const Words4 four = static_cast<const Words4*>(place)[i];
      KVK_UNROLL
      for (uint32_t j = 0; j < 4; ++j) o.w[4 * i + j] = four.w[j];
    }
  }
  return o;
}

// Codes as they are; elements widened.
template <int Codec>
KVK_BOTH void widen_octet(const Octet<Codec>& o, float* x) {
  KVK_UNROLL
  for (uint32_t i = 0; i < 8; ++i) {
    if constexpr (Codec == KVK_F32)
      x[i] = float_of(o.w[i]);
    else if constexpr (Codec == KVK_F16)
      x[i] = from_half(static_cast<uint16_t>(o.w[i / 2] >> 16 * (i % 2)));
    else if constexpr (Codec == KVK_BF16)
      x[i] = i % 2 == 0 ? float_of(o.w[i / 2] << 16) : float_of(o.w[i / 2] & 0xffff0000);
    else if constexpr (Codec == KVK_INT8)  // 2^23 + code, exactly
      x[i] = float_of(0x4b000000 | (o.w[i / 4] >> 8 * (i % 4) & 255)) - 8388608.0f;
    else
      x[i] = float_of(0x4b000000 | (o.w[0] >> 4 * i & 15)) - 8388608.0f;
  }
}

template <int Dtype>
KVK_BOTH void store_octet(const float* x, void* place) {
  KVK_UNROLL
  for (uint32_t i = 0; i < (Dtype == KVK_F32 ? 2 : 1); ++i) {
    Words4 four;
    KVK_UNROLL
    for (uint32_t j = 0; j < 4; ++j) {
      if constexpr (Dtype == KVK_F32)
        four.w[j] = bits_of(x[4 * i + j]);
      else if constexpr (Dtype == KVK_F16)
        four.w[j] = to_half(x[2 * j]) | static_cast<uint32_t>(to_half(x[2 * j + 1])) << 16;
      else
        four.w[j] = to_bf16(x[2 * j]) | static_cast<uint32_t>(to_bf16(x[2 * j + 1])) << 16;
    }
    static_cast<Words4*>(place)[i] = four;
  }
}

// Which two octets of a head one thread owns, so that whatever is turned together is in one thread: pair `p` of head_dim / 16.
// For KVK_ROPE_HALF those of the rotary part that are half of it apart; otherwise neighbours.
struct OctetPair {
  uint32_t first, second;
  bool apart;  // element i of `one` turns with element i of `other`
  bool turns;
};

KVK_BOTH OctetPair octet_pair(const Shape& shape, bool turned, uint32_t p) {
  const uint32_t half = shape.rotary_dim / 2;
  if (turned && shape.rope == KVK_ROPE_HALF && 16 * p < shape.rotary_dim) return {8 * p, 8 * p + half, true, true};
  return {16 * p, 16 * p + 8, false, turned && 16 * p < shape.rotary_dim};
}

// Whether heads of this shape fall into such pairs.
KVK_BOTH bool in_octets(const Shape& shape) {
  return shape.head_dim % 16 == 0 && shape.rotary_dim % 16 == 0 && shape.rotary_dim <= shape.head_dim;
}

// cos and sin of a pair of octets: of eight pairs of elements where they stand apart, else four each.
struct Turn {
  float cosine[8], sine[8];
};

KVK_BOTH Turn turn_of(const Side& s, const Shape& shape, const OctetPair& pair) {
  Turn t;
  const uint32_t half = shape.rotary_dim / 2, first = pair.apart ? pair.first : pair.first / 2;
  KVK_UNROLL
  for (uint32_t i = 0; i < 8; ++i) {
    t.cosine[i] = pair.turns ? s.turn[first + i] : 1;
    t.sine[i] = pair.turns ? s.turn[half + first + i] : 0;
  }
  return t;
}

KVK_BOTH void turn_pair(float& a, float& b, float cosine, float sine) {
  const float x = a, y = b;
  a = minus(times(x, cosine), times(y, sine));
  b = plus(times(y, cosine), times(x, sine));
}

KVK_BOTH void turn_octets(const Turn& t, bool apart, float* x, float* y) {
  if (apart) {
    KVK_UNROLL
    for (uint32_t i = 0; i < 8; ++i) turn_pair(x[i], y[i], t.cosine[i], t.sine[i]);
    return;
  }
  KVK_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    turn_pair(x[2 * i], x[2 * i + 1], t.cosine[i], t.sine[i]);
    turn_pair(y[2 * i], y[2 * i + 1], t.cosine[4 + i], t.sine[4 + i]);
  }
}

// Whether every octet of this side can be loaded at once.
KVK_BOTH bool is_aligned(const Side& s) {
  const uint32_t bytes = s.codec == KVK_INT4 ? 4 : s.codec == KVK_INT8 ? 8 : 16;
  return is_aligned(s.data, bytes) && s.head_stride % bytes == 0 && s.token_stride % bytes == 0 &&
         (s.group == 0 || (is_aligned(s.scale, 16) && is_aligned(s.zero, 16) && s.scale_head_stride % 16 == 0));
}

// Scales of one octet of K: those of a group of tokens.
KVK_BOTH void scales_of_octet(const Side& s, uint32_t head, uint32_t group, uint32_t n, uint32_t octet, float* scale,
                              float* zero) {
  const int64_t bytes = head * s.scale_head_stride + (static_cast<int64_t>(group) * n + octet) * 2;
  widen_octet<KVK_F16>(load_octet<KVK_F16>(at(s.scale, bytes)), scale);
  widen_octet<KVK_F16>(load_octet<KVK_F16>(at(s.zero, bytes)), zero);
}

constexpr uint32_t kRowsInFlight = 4;

// Tokens `token`, token + step, ... below `stop` (kRowsInFlight of them at most) of one head and one pair of octets, given to
// sink(token, octet, eight floats). `token` counts from the block's first.
template <int Codec, class Sink>
KVK_BOTH void bring_rows(const Side& s, const Shape& shape, uint32_t head, uint32_t token, uint32_t stop, uint32_t step,
                         uint32_t p, const Sink& sink) {
  constexpr bool kQuantised = Codec == KVK_INT8 || Codec == KVK_INT4;
  constexpr uint32_t kBytes = octet_bytes<Codec>();
  const OctetPair pair = octet_pair(shape, s.turn != nullptr, p);
  Octet<Codec> loaded[kRowsInFlight][2];
  KVK_UNROLL
  for (uint32_t r = 0; r < kRowsInFlight; ++r) {
    const uint32_t t = token + r * step < stop ? token + r * step : token;
    const void* row = at(s.data, head * s.head_stride + static_cast<int64_t>(t) * s.token_stride);
    loaded[r][0] = load_octet<Codec>(at(row, pair.first / 8 * kBytes));
    loaded[r][1] = load_octet<Codec>(at(row, pair.second / 8 * kBytes));
  }
  const Turn turn = turn_of(s, shape, pair);
  float scale[2][8] = {}, zero[2][8] = {};
  uint32_t scaled = ~0u;  // the group whose scales are there
  KVK_UNROLL
  for (uint32_t r = 0; r < kRowsInFlight; ++r) {
    const uint32_t t = token + r * step;
    if (t >= stop) return;
    float x[2][8];
    widen_octet<Codec>(loaded[r][0], x[0]);
    widen_octet<Codec>(loaded[r][1], x[1]);
    if constexpr (kQuantised) {
      if (s.group == 0) {
        const float by = from_half(at(s.scale, head * s.scale_head_stride)[t]);
        const float from = from_half(at(s.zero, head * s.scale_head_stride)[t]);
        KVK_UNROLL
        for (uint32_t i = 0; i < 16; ++i) x[i / 8][i % 8] = decoded(x[i / 8][i % 8], by, from);
      } else {
        if (t / s.group != scaled) {
          scaled = t / s.group;
          scales_of_octet(s, head, scaled, shape.head_dim, pair.first, scale[0], zero[0]);
          scales_of_octet(s, head, scaled, shape.head_dim, pair.second, scale[1], zero[1]);
        }
        KVK_UNROLL
        for (uint32_t i = 0; i < 16; ++i) x[i / 8][i % 8] = decoded(x[i / 8][i % 8], scale[i / 8][i % 8], zero[i / 8][i % 8]);
      }
    }
    if (pair.turns) turn_octets(turn, pair.apart, x[0], x[1]);
    sink(t, pair.first, x[0]);
    sink(t, pair.second, x[1]);
  }
}

}  // namespace kvk
