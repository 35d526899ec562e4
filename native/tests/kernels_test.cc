// The CPU kernels over memory of exactly the size that the arguments describe, so that the sanitizers see every byte read or
// written outside it; each path's result against the naive one; and that no call allocates. The oracle in double is in
// tests/kernels.
#include "kernels.h"

#include <atomic>
#include <cmath>
#include <random>
#include <thread>

#include "tests/check.h"

namespace {
std::atomic<uint64_t> allocations{0};  // since the start; a sanitizer has malloc to itself, and none is counted
}
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void* malloc(size_t bytes) { return ++allocations, __libc_malloc(bytes); }
void* calloc(size_t count, size_t bytes) { return ++allocations, __libc_calloc(count, bytes); }
void* realloc(void* old, size_t bytes) { return ++allocations, __libc_realloc(old, bytes); }
void* aligned_alloc(size_t align, size_t bytes) { return ++allocations, __libc_memalign(align, bytes); }
}
#endif

namespace {

std::mt19937 noise_source(7);

float noise() { return std::normal_distribution<float>()(noise_source); }
uint32_t pick(uint32_t low, uint32_t high) { return std::uniform_int_distribution<uint32_t>(low, high)(noise_source); }

uint16_t bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// `count` elements, on the heap without room behind them.
std::vector<uint8_t> elements(uint32_t dtype, size_t count) {
  std::vector<uint8_t> bytes(count * (dtype == KVK_F32 ? 4 : 2));
  for (size_t i = 0; i < count; ++i) {
    const float x = noise();
    const uint16_t half = dtype == KVK_BF16 ? bf16(x) : static_cast<uint16_t>(0x3800 | pick(0, 0x3ff) | pick(0, 1) << 15);
    if (dtype == KVK_F32)
      std::memcpy(&bytes[4 * i], &x, 4);
    else
      std::memcpy(&bytes[2 * i], &half, 2);
  }
  return bytes;
}

struct Block {
  std::vector<uint8_t> k, v;
  std::vector<uint16_t> k_scale, k_zero, v_scale, v_zero;
  std::vector<float> turn;
  kvk_segment segment{};
};

std::vector<uint8_t> quantised(const std::vector<uint8_t>& from, uint32_t heads, uint32_t tokens, uint32_t head_dim,
                               uint32_t codec, uint32_t group, std::vector<uint16_t>* scale, std::vector<uint16_t>* zero) {
  const uint32_t row = codec == KVK_INT8 ? head_dim : head_dim / 2;
  const uint32_t scales = group ? (tokens + group - 1) / group * head_dim : tokens;
  std::vector<uint8_t> codes(size_t{heads} * tokens * row), elements = from;
  scale->resize(heads * scales), zero->resize(heads * scales);
  kvk_conversion c{sizeof(kvk_conversion),
                   KVK_ABI,
                   heads,
                   tokens,
                   head_dim,
                   KVK_F32,
                   codec,
                   group,
                   elements.data(),
                   int64_t{4} * tokens * head_dim,
                   int64_t{4} * head_dim,
                   codes.data(),
                   int64_t{row} * tokens,
                   row,
                   scale->data(),
                   zero->data(),
                   int64_t{2} * scales,
                   0,
                   nullptr,
                   nullptr};
  std::vector<uint8_t> first;
  for (uint32_t path = KVK_CPU_REFERENCE; path <= KVK_CPU_AMX; ++path) {
    if (kvk_cpu_lacks(path) != nullptr) continue;
    c.path = path;
    const uint64_t before = allocations;
    const int done = kvk_quantise(&c), undone = kvk_dequantise(&c);
    CHECK_EQ(uint64_t{allocations}, before);
    CHECK_EQ(done, KVK_OK);
    CHECK_EQ(undone, KVK_OK);
    if (first.empty()) first = codes;
    CHECK(first == codes);
    for (size_t i = 0; i < elements.size(); i += 4) {
      float x, back;
      std::memcpy(&x, &from[i], 4), std::memcpy(&back, &elements[i], 4);
      CHECK(std::fabs(x - back) < (codec == KVK_INT8 ? 0.05f : 0.6f));
    }
    elements = from;
  }
  return codes;
}

Block block(uint32_t heads, uint32_t tokens, uint32_t head_dim, uint32_t codec, uint32_t group, int64_t position) {
  Block b;
  const uint32_t held = codec >= KVK_INT8 ? static_cast<uint32_t>(KVK_F32) : codec;
  const size_t count = size_t{heads} * tokens * head_dim;
  b.k = elements(held, count), b.v = elements(held, count);
  int64_t row = int64_t{head_dim} * (codec == KVK_F32 ? 4 : 2);
  if (codec >= KVK_INT8) {
    b.k = quantised(b.k, heads, tokens, head_dim, codec, group, &b.k_scale, &b.k_zero);
    b.v = quantised(b.v, heads, tokens, head_dim, codec, 0, &b.v_scale, &b.v_zero);
    row = codec == KVK_INT8 ? head_dim : head_dim / 2;
  }
  const uint32_t first = pick(0, tokens - 1);
  b.segment = {b.k.data(),
               b.v.data(),
               row * tokens,
               row,
               row * tokens,
               row,
               b.k_scale.data(),
               b.k_zero.data(),
               b.v_scale.data(),
               b.v_zero.data(),
               int64_t{2} * ((tokens + group - 1) / group) * head_dim,
               int64_t{2} * tokens,
               nullptr,
               position,
               position,
               first,
               pick(0, 3) ? tokens - first : 0,
               codec,
               group};
  if (head_dim >= 2 && pick(0, 1)) {
    b.turn.resize(head_dim / 2 * 2);
    std::vector<float> inv_freq(head_dim / 2, 0.3f);
    kvk_turn(inv_freq.data(), head_dim / 2, 5, b.turn.data());
    b.segment.turn = b.turn.data(), b.segment.base_position = position - 5;
  }
  return b;
}

struct Problem {
  uint32_t batch, heads, group, head_dim, tokens, dtype;
  std::vector<Block> blocks;
  std::vector<kvk_segment> segments;
  std::vector<uint8_t> q;
  std::vector<int64_t> positions;
  std::vector<float> sinks;
  std::vector<kvk_sequence> sequences;  // of each row the same
  kvk_attention args{};

  Problem()
      : batch(pick(1, 2)),
        heads(pick(1, 3)),
        group(pick(1, 9)),
        head_dim(pick(0, 2) ? 2 * pick(1, 80) : 64 * pick(1, 4)),
        tokens(pick(0, 2) ? pick(1, 20) : pick(1, 2)),
        dtype(pick(0, 2)) {
    int64_t position = 0;
    for (uint32_t i = pick(0, 4); i-- > 0; position += 150)
      blocks.push_back(block(heads, pick(1, 150), head_dim, pick(0, 4), 32u << pick(0, 2), position));
    for (const Block& b : blocks) segments.push_back(b.segment);
    blocks.push_back(block(heads, tokens, head_dim, dtype, 32, position));
    sequences.assign(batch, {segments.data(), segments.size(), blocks.back().segment});
    q = elements(dtype, size_t{batch} * heads * group * tokens * head_dim);
    for (uint32_t b = 0; b < batch; ++b)
      for (uint32_t t = 0; t < tokens; ++t) positions.push_back(position + t);
    if (pick(0, 1))
      for (uint32_t h = 0; h < heads * group; ++h) sinks.push_back(noise());
    const int64_t row = int64_t{head_dim} * (dtype == KVK_F32 ? 4 : 2);
    args = {sizeof(kvk_attention),
            KVK_ABI,
            batch,
            heads * group,
            heads,
            head_dim,
            tokens,
            dtype,
            q.data(),
            row * tokens * heads * group,
            row * tokens,
            row,
            nullptr,
            row * tokens * heads * group,
            row * tokens,
            row,
            nullptr,
            positions.data(),
            sequences.data(),
            sinks.empty() ? nullptr : sinks.data(),
            0.2f,
            pick(0, 1) ? 0.0f : 9.0f,
            pick(0, 3) ? 1u : 0u,
            pick(0, 1) ? 0u : 100u,
            pick(0, 1),
            head_dim / 2 * 2,
            1,
            0,
            nullptr,
            0,
            nullptr};
  }

  // `allocated`: becomes how often memory was asked for by a call whose threads run already.
  std::vector<uint8_t> run(uint32_t path, uint32_t threads = 1, uint64_t* allocated = nullptr) {
    kvk_attention a = args;
    std::vector<uint8_t> out(q.size(), 0xff);
    std::vector<float> lse(size_t{batch} * heads * group * tokens);
    a.out = out.data(), a.lse = lse.data(), a.path = path, a.threads = threads;
    std::vector<uint8_t> workspace(kvk_attention_workspace(&a));
    CHECK(!workspace.empty());
    a.workspace = workspace.data(), a.workspace_bytes = workspace.size();
    CHECK_EQ(kvk_attend(&a), KVK_OK);
    if (allocated != nullptr) {
      const uint64_t before = allocations;
      kvk_attention_workspace(&a), kvk_attend(&a);
      *allocated = allocations - before;
    }
    return out;
  }
};

// K of exactly its size, turned where it lies: [head][token][element].
std::vector<uint8_t> turned(uint32_t path, uint32_t dtype, uint32_t head_dim, uint32_t rotary_dim, uint32_t rope,
                            const std::vector<uint8_t>& from, const std::vector<float>& turn) {
  std::vector<uint8_t> keys = from;
  const int64_t row = int64_t{head_dim} * (dtype == KVK_F32 ? 4 : 2);
  const auto tokens = static_cast<uint32_t>(from.size() / row / 2);
  const kvk_rotation r{
      sizeof(kvk_rotation), KVK_ABI, 2,           tokens,       head_dim, dtype,       rope, rotary_dim, keys.data(),
      row * tokens,         row,     keys.data(), row * tokens, row,      turn.data(), path, nullptr};
  const uint64_t before = allocations;
  const int done = kvk_rotate(&r);
  CHECK_EQ(uint64_t{allocations}, before);
  CHECK_EQ(done, KVK_OK);
  return keys;
}

float value(uint32_t dtype, const std::vector<uint8_t>& bytes, size_t i) {
  uint32_t bits;
  uint16_t half;
  if (dtype == KVK_F32) {
    std::memcpy(&bits, &bytes[4 * i], 4);
  } else {
    std::memcpy(&half, &bytes[2 * i], 2);
    bits = static_cast<uint32_t>(half) << 16;
    if (dtype == KVK_F16) {
      const float rest = std::ldexp(static_cast<float>((half & 0x3ff) | ((half & 0x7c00) ? 0x400 : 0)),
                                    ((half >> 10 & 31) ? (half >> 10 & 31) : 1) - 25);
      return half & 0x8000 ? -rest : rest;
    }
  }
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

}  // namespace

TEST(this_cpu) {
  for (uint32_t path = KVK_CPU_REFERENCE; path <= KVK_CPU_AMX; ++path)
    std::printf("  path %u: %s\n", path, kvk_cpu_lacks(path) == nullptr ? "tested" : kvk_cpu_lacks(path));
  CHECK(kvk_cpu_lacks(KVK_CPU_REFERENCE) == nullptr);
  CHECK(kvk_cpu_lacks(99) != nullptr);
}

TEST(what_other_libraries_allocate_is_counted) {
  [[maybe_unused]] const uint64_t before = allocations;
  std::thread([] {}).join();  // as the pool starts one
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(allocations > before);
#endif
}

TEST(every_path_agrees_with_the_naive_one) {
  for (int i = 0; i < 120; ++i) {
    Problem problem;
    const auto naive = problem.run(KVK_CPU_REFERENCE);
    const size_t count = naive.size() / (problem.dtype == KVK_F32 ? 4 : 2);
    for (uint32_t path = KVK_CPU_AVX2; path <= KVK_CPU_AMX; ++path) {
      if (kvk_cpu_lacks(path) != nullptr) continue;
      for (uint32_t threads : {1u, 3u}) {
        uint64_t allocated = 0;
        const auto fast = problem.run(path, threads, &allocated);
        CHECK_EQ(allocated, uint64_t{0});
        float worst = 0;
        for (size_t j = 0; j < count; ++j)
          worst = std::fmax(worst, std::fabs(value(problem.dtype, naive, j) - value(problem.dtype, fast, j)));
        CHECK(worst < 0.06f);
      }
    }
  }
}

TEST(every_path_turns_keys_into_the_same_bytes) {
  for (int i = 0; i < 60; ++i) {
    const uint32_t head_dim = pick(2, 130), rotary_dim = 2 * pick(1, head_dim / 2), dtype = pick(0, 2), rope = pick(0, 1);
    const auto keys = elements(dtype, size_t{2} * pick(1, 9) * head_dim);
    std::vector<float> inv_freq(rotary_dim / 2, 0.3f), turn(rotary_dim);
    kvk_turn(inv_freq.data(), rotary_dim / 2, pick(0, 5000), turn.data());
    const auto naive = turned(KVK_CPU_REFERENCE, dtype, head_dim, rotary_dim, rope, keys, turn);
    for (uint32_t path = KVK_CPU_AVX2; path <= KVK_CPU_AMX; ++path)
      if (kvk_cpu_lacks(path) == nullptr) CHECK(turned(path, dtype, head_dim, rotary_dim, rope, keys, turn) == naive);
  }
}

TEST(two_callers_at_once_do_not_share) {
  Problem problem, again;
  const auto first = problem.run(0), second = again.run(0);
  std::thread beside([&] {
    for (int i = 0; i < 50; ++i) CHECK(again.run(0, 3) == second || again.run(0, 1) == second);
  });
  for (int i = 0; i < 50; ++i) CHECK(problem.run(0, 1) == first);
  beside.join();
}
