// The loops of the CUDA kernels (native/cuda/*_tile.h), compiled by g++ and run thread by thread over memory of exactly the
// size they may touch: quantise, dequantise, rotate and load byte for byte against the CPU library, score against sums in
// double, pages against memcpy. What a GPU adds, the launches and the shuffles, is tests/gpu's.
#include <cmath>
#include <random>

#include "cuda/load_tile.h"
#include "cuda/pages_tile.h"
#include "cuda/quantise_tile.h"
#include "tests/check.h"

namespace {

using kvk::Shape;
using kvk::Side;

std::mt19937 noise_source(11);

float noise() { return std::normal_distribution<float>()(noise_source); }
uint32_t pick(uint32_t low, uint32_t high) { return std::uniform_int_distribution<uint32_t>(low, high)(noise_source); }
uint32_t size_of(uint32_t dtype) { return dtype == KVK_F32 ? 4 : 2; }

using Bytes = std::vector<uint8_t>;

Bytes elements(uint32_t dtype, size_t count) {
  Bytes bytes(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) kvk::put(dtype, bytes.data(), static_cast<uint32_t>(i), noise() * (i % 7 == 0 ? 30 : 1));
  return bytes;
}

// One side of a block, quantised by the CPU library, or elements as they are.
struct Quantised {
  Bytes source, codes;
  std::vector<uint16_t> scale, zero;
  kvk_conversion args{};

  Quantised(uint32_t heads, uint32_t tokens, uint32_t head_dim, uint32_t dtype, uint32_t codec, uint32_t group) {
    const uint32_t scales = group != 0 ? (tokens + group - 1) / group * head_dim : tokens,
                   row = codec == KVK_INT8 ? head_dim : head_dim / 2;
    source = elements(dtype, size_t{heads} * tokens * head_dim);
    codes.resize(size_t{heads} * tokens * row);
    scale.resize(size_t{heads} * scales), zero.resize(size_t{heads} * scales);
    const int64_t width = int64_t{head_dim} * size_of(dtype);
    args = {sizeof args,
            KVK_ABI,
            heads,
            tokens,
            head_dim,
            dtype,
            codec,
            group,
            source.data(),
            width * tokens,
            width,
            codes.data(),
            row * tokens,
            row,
            scale.data(),
            zero.data(),
            2 * int64_t{scales},
            0,
            nullptr,
            nullptr};
  }
};

template <int Dtype>
void quantise_as_threads_do(const kvk_conversion& c) {
  if (c.group != 0) {
    for (uint32_t head = 0; head < c.heads; ++head)
      for (uint32_t group = 0; group * c.group < c.tokens; ++group)
        for (uint32_t channel = 0; channel < c.head_dim; channel += 2)
          CHECK(kvk::quantise_channels<Dtype>(c, head, group, channel));
    return;
  }
  constexpr uint32_t kLanes = 16;
  for (uint32_t head = 0; head < c.heads; ++head)
    for (uint32_t token = 0; token < c.tokens; ++token) {
      kvk::Extent all = kvk::nothing_yet();
      for (uint32_t lane = kLanes; lane-- > 0;) all.add(kvk::row_extent<Dtype>(c, kvk::row_of(c, head, token), lane, kLanes));
      CHECK(all.finite);
      for (uint32_t lane = 0; lane < kLanes; ++lane) kvk::quantise_row<Dtype>(c, head, token, all, lane, kLanes);
    }
}

void quantise_naively(const kvk_conversion& c) {
  for (uint32_t head = 0; head < c.heads; ++head) {
    for (uint32_t token = 0; token < c.tokens; token += c.group == 0 ? 1 : c.group)
      for (uint32_t channel = 0; channel < (c.group == 0 ? 1 : c.head_dim); ++channel)
        CHECK(kvk::quantise_plainly(c, head, token, channel));
    for (uint32_t token = 0; token < c.tokens; ++token)
      for (uint32_t channel = 0; channel < c.head_dim; channel += 2) kvk::encode_plainly(c, head, token, channel);
  }
}

template <int Dtype>
struct Store {
  void* out;
  int64_t token_stride;
  void operator()(uint32_t token, uint32_t octet, const float* x) const {
    kvk::store_octet<Dtype>(x, kvk::at(out, token * token_stride + octet * size_of(Dtype)));
  }
};

// Every thread of one head: pairs of octets, and rows that are `rows` apart.
template <int Codec, int Dtype>
void bring_as_threads_do(const Side& side, const Shape& shape, uint32_t head, uint32_t tokens, void* out, int64_t token_stride) {
  const uint32_t rows = pick(1, 9);
  for (uint32_t start = 0; start < tokens; start += rows * kvk::kRowsInFlight)
    for (uint32_t row = 0; row < rows && start + row < tokens; ++row)
      for (uint32_t p = 0; p < shape.head_dim / 16; ++p)
        kvk::bring_rows<Codec>(side, shape, head, start + row, tokens, rows, p, Store<Dtype>{out, token_stride});
}

template <int Codec>
void bring_to(const Side& side, const Shape& shape, uint32_t heads, uint32_t tokens, uint32_t dtype, Bytes& out) {
  const int64_t token_stride = int64_t{shape.head_dim} * size_of(dtype);
  for (uint32_t head = 0; head < heads; ++head) {
    void* rows_of_head = out.data() + head * tokens * token_stride;
    if (dtype == KVK_F32) bring_as_threads_do<Codec, KVK_F32>(side, shape, head, tokens, rows_of_head, token_stride);
    if (dtype == KVK_F16) bring_as_threads_do<Codec, KVK_F16>(side, shape, head, tokens, rows_of_head, token_stride);
    if (dtype == KVK_BF16) bring_as_threads_do<Codec, KVK_BF16>(side, shape, head, tokens, rows_of_head, token_stride);
  }
}

Side side_of(const kvk_conversion& c) {
  return {c.codes, c.codes_head_stride, c.codes_token_stride, c.scale, c.zero, c.scale_head_stride, nullptr, c.codec, c.group};
}

Quantised some(uint32_t head_dim_step) {
  const uint32_t groups[] = {0, 32, 64, 128};
  return {pick(1, 3),        pick(1, 200), head_dim_step * pick(1, 128 / head_dim_step), pick(0, 2), pick(KVK_INT8, KVK_INT4),
          groups[pick(0, 3)]};
}

}  // namespace

TEST(quantising_writes_the_cpu_librarys_bytes) {
  for (int round = 0; round < 60; ++round) {
    Quantised q = some(2);
    if (round % 3 == 0) kvk::put(q.args.dtype, q.source.data(), 0, -0.0f), kvk::put(q.args.dtype, q.source.data(), 1, 0.0f);
    if (round % 5 == 0) std::fill(q.source.begin(), q.source.end(), uint8_t{0});
    CHECK_EQ(kvk_quantise(&q.args), KVK_OK);
    for (bool naive : {false, true}) {
      Bytes codes(q.codes.size(), 0xcc);
      std::vector<uint16_t> scale(q.scale.size(), 7), zero(q.zero.size(), 7);
      kvk_conversion c = q.args;
      c.codes = codes.data(), c.scale = scale.data(), c.zero = zero.data();
      if (naive)
        quantise_naively(c);
      else if (c.dtype == KVK_F32)
        quantise_as_threads_do<KVK_F32>(c);
      else if (c.dtype == KVK_F16)
        quantise_as_threads_do<KVK_F16>(c);
      else
        quantise_as_threads_do<KVK_BF16>(c);
      CHECK(codes == q.codes);
      CHECK(scale == q.scale);
      CHECK(zero == q.zero);
    }
  }
}

TEST(what_cannot_be_held_is_found) {
  for (float bad : {65600.0f, -INFINITY, NAN}) {
    Quantised q(1, 40, 16, KVK_F32, KVK_INT8, 32);
    kvk::put(KVK_F32, q.source.data(), 39 * 16 + 5, bad);
    CHECK(kvk::quantise_channels<KVK_F32>(q.args, 0, 0, 4) && !kvk::quantise_channels<KVK_F32>(q.args, 0, 1, 4));
    CHECK(!kvk::row_extent<KVK_F32>(q.args, kvk::row_of(q.args, 0, 39), 2, 16).finite);
    CHECK(!kvk::quantise_plainly(q.args, 0, 32, 5) && kvk::quantise_plainly(q.args, 0, 0, 5));
  }
}

TEST(dequantising_writes_the_cpu_librarys_bytes) {
  for (int round = 0; round < 60; ++round) {
    Quantised q = some(16);
    for (auto& code : q.codes) code = static_cast<uint8_t>(pick(0, 255));
    for (auto* part : {&q.scale, &q.zero})
      for (auto& x : *part) x = static_cast<uint16_t>(pick(0, 1) << 15 | pick(0, 0x7bff));  // any finite number
    CHECK_EQ(kvk_dequantise(&q.args), KVK_OK);
    Bytes out(q.source.size(), 0xcc), plain(q.source.size());
    const kvk_conversion& c = q.args;
    const Shape shape{c.head_dim, KVK_ROPE_HALF, 0};
    if (c.codec == KVK_INT8)
      bring_to<KVK_INT8>(side_of(c), shape, c.heads, c.tokens, c.dtype, out);
    else
      bring_to<KVK_INT4>(side_of(c), shape, c.heads, c.tokens, c.dtype, out);
    CHECK(out == q.source);
    for (uint32_t row = 0; row < c.heads * c.tokens; ++row)
      for (uint32_t i = 0; i < c.head_dim; ++i)
        kvk::put(c.dtype, plain.data() + size_t{row} * c.head_dim * size_of(c.dtype), i,
                 kvk::value(side_of(c), shape, row / c.tokens, row % c.tokens, i));
    CHECK(plain == q.source);
  }
}

TEST(rotating_writes_the_cpu_librarys_bytes) {
  for (int round = 0; round < 60; ++round) {
    const uint32_t heads = pick(1, 3), tokens = pick(1, 40), head_dim = 16 * pick(1, 8), dtype = pick(0, 2), rope = pick(0, 1);
    const uint32_t rotary = 16 * pick(1, head_dim / 16);
    Bytes in = elements(dtype, size_t{heads} * tokens * head_dim), wanted(in.size()), out(in.size());
    std::vector<float> inv_freq(rotary / 2), turn(rotary);
    for (auto& f : inv_freq) f = std::fabs(noise());
    kvk_turn(inv_freq.data(), rotary / 2, static_cast<int64_t>(pick(0, 9000)) - 4500, turn.data());
    const int64_t row = int64_t{head_dim} * size_of(dtype);
    const kvk_rotation r{sizeof r,     KVK_ABI, heads,         tokens,       head_dim, dtype,       rope, rotary, in.data(),
                         row * tokens, row,     wanted.data(), row * tokens, row,      turn.data(), 0,    nullptr};
    CHECK_EQ(kvk_rotate(&r), KVK_OK);
    const Side side{in.data(), row * tokens, row, nullptr, nullptr, 0, turn.data(), dtype, 0};
    const Shape shape{head_dim, rope, rotary};
    if (dtype == KVK_F32) bring_to<KVK_F32>(side, shape, heads, tokens, dtype, out);
    if (dtype == KVK_F16) bring_to<KVK_F16>(side, shape, heads, tokens, dtype, out);
    if (dtype == KVK_BF16) bring_to<KVK_BF16>(side, shape, heads, tokens, dtype, out);
    CHECK(out == wanted);
    Bytes plain(in.size());
    for (uint32_t t = 0; t < heads * tokens; ++t)
      for (uint32_t i = 0; i < head_dim; ++i)
        kvk::put(dtype, plain.data() + t * row, i, kvk::value(side, shape, t / tokens, t % tokens, i));
    CHECK(plain == wanted);
  }
}

namespace {

// A segment of a block of any codec, and what it stands for, by the CPU library: dequantised and turned in fp32.
struct Loaded {
  Quantised k, v;
  std::vector<float> turn, exact[2];
  kvk_segment segment{};

  Loaded(uint32_t heads, uint32_t tokens, uint32_t head_dim, uint32_t codec, uint32_t rope, uint32_t rotary)
      : k(heads, tokens, head_dim, codec < KVK_INT8 ? codec : uint32_t{KVK_F32}, codec < KVK_INT8 ? uint32_t{KVK_INT8} : codec,
          32u << pick(0, 2)),
        v(heads, tokens, head_dim, k.args.dtype, k.args.codec, 0) {
    const uint32_t first = pick(0, tokens - 1);
    const int64_t head = k.args.head_stride, row = k.args.token_stride;
    segment = {k.source.data(),
               v.source.data(),
               head,
               row,
               head,
               row,
               nullptr,
               nullptr,
               nullptr,
               nullptr,
               0,
               0,
               nullptr,
               0,
               0,
               first,
               pick(0, tokens - first),
               codec,
               k.args.group};
    for (Quantised* q : {&k, &v}) {
      auto& x = exact[q == &v];
      x.resize(size_t{heads} * tokens * head_dim);
      if (codec >= KVK_INT8) {
        CHECK_EQ(kvk_quantise(&q->args), KVK_OK);
        kvk_conversion back = q->args;
        back.elements = x.data(), back.dtype = KVK_F32;
        CHECK_EQ(kvk_dequantise(&back), KVK_OK);
      } else {
        for (size_t i = 0; i < x.size(); ++i) x[i] = kvk::element(codec, q->source.data(), static_cast<uint32_t>(i));
      }
    }
    if (codec >= KVK_INT8) {
      segment.k = k.codes.data(), segment.v = v.codes.data();
      segment.k_head_stride = segment.v_head_stride = k.args.codes_head_stride;
      segment.k_token_stride = segment.v_token_stride = k.args.codes_token_stride;
      segment.k_scale = k.scale.data(), segment.k_zero = k.zero.data();
      segment.v_scale = v.scale.data(), segment.v_zero = v.zero.data();
      segment.k_scale_head_stride = k.args.scale_head_stride, segment.v_scale_head_stride = v.args.scale_head_stride;
    }
    if (rotary == 0) return;
    std::vector<float> inv_freq(rotary / 2, 0.7f);
    turn.resize(rotary);
    kvk_turn(inv_freq.data(), rotary / 2, 77, turn.data());
    segment.turn = turn.data(), segment.new_position = 77;
    const int64_t wide = int64_t{4} * head_dim;
    const kvk_rotation r{sizeof r,        KVK_ABI,       heads, tokens,          head_dim,      KVK_F32, rope,        rotary,
                         exact[0].data(), wide * tokens, wide,  exact[0].data(), wide * tokens, wide,    turn.data(), 0,
                         nullptr};
    CHECK_EQ(kvk_rotate(&r), KVK_OK);
  }
};

template <int Dtype>
void load_and_score(uint32_t codec, bool aligned) {
  const uint32_t heads = pick(1, 3), tokens = pick(1, 150), head_dim = 16 * pick(1, 8), rope = pick(0, 1);
  const uint32_t rotary = pick(0, 2) == 0 ? 0 : 16 * pick(1, head_dim / 16);
  Loaded block(heads, tokens, head_dim, codec, rope, rotary);
  kvk_segment& s = block.segment;
  Bytes moved(block.k.codes.size() + 1);
  if (!aligned && codec == KVK_INT8) {  // one byte off: the slow way
    std::copy(block.k.codes.begin(), block.k.codes.end(), moved.begin() + 1);
    s.k = moved.data() + 1;
  }
  const Shape shape{head_dim, rope, rotary};
  const int64_t row = int64_t{head_dim} * size_of(Dtype), stride = row * s.tokens;
  for (bool keys : {true, false}) {
    const Side side = keys ? kvk::keys_of(s) : kvk::values_of(s);
    Bytes out(heads * stride), wanted(heads * stride), computed = elements(Dtype, size_t{heads} * s.tokens * head_dim);
    std::vector<float> square(s.tokens), norm(s.tokens);
    std::vector<double> exact_square(s.tokens), exact_norm(s.tokens);
    for (uint32_t head = 0; head < heads; ++head) {
      const kvk::StoreAt<Dtype> store{out.data() + head * stride, row, s.first};
      for (uint32_t tile = 0; tile * kvk::tile_tokens(head_dim) < s.tokens; ++tile)
        for (uint32_t thread = 0; thread < kvk::kLoadThreads; ++thread) {
          kvk::bring_tile<Dtype>(side, shape, head, s.first, s.tokens, tile, thread, store);
          const uint32_t at_once = kvk::rows_at_once(head_dim), token_of_thread = thread / (head_dim / 16);
          float part[2][kvk::kRowsInFlight] = {};
          const uint32_t token = s.first + tile * kvk::tile_tokens(head_dim) + token_of_thread;
          const kvk::Compare<Dtype> compare{computed.data() + head * stride, row, s.first, token, at_once, part[0], part[1]};
          kvk::bring_tile<Dtype>(side, shape, head, s.first, s.tokens, tile, thread, compare);
          for (uint32_t r = 0; r < kvk::kRowsInFlight; ++r)
            if (const uint32_t t = token + r * at_once - s.first; token_of_thread < at_once && t < s.tokens)
              square[t] += part[0][r], norm[t] += part[1][r];
        }
      for (uint32_t t = 0; t < s.tokens; ++t)
        for (uint32_t i = 0; i < head_dim; ++i) {
          const float x = block.exact[!keys][(size_t{head} * tokens + s.first + t) * head_dim + i];
          const double y = kvk::element(Dtype, computed.data() + head * stride + t * row, i);
          kvk::put(Dtype, wanted.data() + head * stride + t * row, i, x);
          exact_square[t] += (x - y) * (x - y), exact_norm[t] += y * y;
        }
    }
    CHECK(out == wanted);
    for (uint32_t t = 0; t < s.tokens; ++t) {
      CHECK(std::fabs(square[t] - exact_square[t]) <= 1e-5 * exact_square[t] + 1e-6);
      CHECK(std::fabs(norm[t] - exact_norm[t]) <= 1e-5 * exact_norm[t] + 1e-6);
    }
  }
}

}  // namespace

TEST(loading_writes_what_dequantising_and_rotating_write) {
  for (int round = 0; round < 12; ++round)
    for (uint32_t codec = KVK_F32; codec <= KVK_INT4; ++codec) {
      load_and_score<KVK_F32>(codec, round % 2 == 0);
      load_and_score<KVK_F16>(codec, round % 2 == 0);
      load_and_score<KVK_BF16>(codec, round % 2 == 0);
    }
}

TEST(pages_arrive_whole) {
  for (int round = 0; round < 40; ++round) {
    const uint32_t pages = pick(1, 5), heads = pick(1, 3), tokens = pick(1, 9), row = 16 * pick(1, 5), step = pick(1, 40);
    kvk_pages a{sizeof a, KVK_ABI, pages, heads, tokens, row, 0, 0, nullptr, nullptr, 0, row, 0, 0, nullptr};
    a.from_head_stride = int64_t{row} * tokens;                        // [head][token]
    a.to_token_stride = int64_t{row} * heads, a.to_head_stride = row;  // [token][head]
    std::vector<std::vector<kvk::Words4>> from(pages), to(pages);
    std::vector<const void*> sources;
    std::vector<void*> targets;
    for (uint32_t i = 0; i < pages; ++i) {
      from[i].resize(size_t{heads} * tokens * row / 16), to[i].resize(from[i].size());
      for (auto& words : from[i]) words.w[0] = pick(0, 0xffffffff), words.w[3] = pick(0, 0xffffffff);
      sources.push_back(from[i].data()), targets.push_back(to[i].data());
    }
    a.from = sources.data(), a.to = targets.data();
    CHECK(kvk::strides_fit(a, 16));
    for (uint32_t thread = 0; thread < step; ++thread)
      round % 2 == 0 ? kvk::copy_words<kvk::Words4>(a, thread, step) : kvk::copy_words<uint8_t>(a, thread, step);
    for (uint32_t i = 0; i < pages; ++i)
      for (uint32_t head = 0; head < heads; ++head)
        for (uint32_t token = 0; token < tokens; ++token) {
          const auto* read = reinterpret_cast<const uint8_t*>(from[i].data()) + head * a.from_head_stride + token * row;
          const auto* other =
              reinterpret_cast<const uint8_t*>(to[i].data()) + head * a.to_head_stride + token * a.to_token_stride;
          CHECK(std::memcmp(read, other, row) == 0);
        }
  }
}
