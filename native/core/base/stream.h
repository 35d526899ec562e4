// The step that long copies are made of: one cache line of each of four stretches, past the caches. Private to copy.cc
// and checksum.cc. Four stretches side by side keep more of the memory's channels and the prefetcher's streams busy
// than one.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kv {

inline constexpr size_t kStretches = 4;

// Whether a copy upwards would load what is, modulo 4 KiB, the place of a store not yet done: such a load waits, and the copy
// takes up to ten times as long (docs/log.md). Downwards it does not.
inline bool trails(const void* dst, const void* src) {
  const uintptr_t ahead = (reinterpret_cast<uintptr_t>(dst) - reinterpret_cast<uintptr_t>(src)) % 4096;
  return 0 < ahead && ahead <= 256;
}

#if defined(__x86_64__)
// All loads of a step come before its stores: a load waits for a store just before it whose address is the same modulo
// 4 KiB, and source and destination often lie alike in their pages. copy.cc sees to sources a little before that.
inline void stream_lines(uint8_t* dst, const uint8_t* src, size_t stretch) {
  __m128i lines[kStretches][4];
#pragma GCC unroll 4
  for (size_t s = 0; s < kStretches; ++s)
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) lines[s][j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + s * stretch) + j);
#pragma GCC unroll 4
  for (size_t s = 0; s < kStretches; ++s)
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) _mm_stream_si128(reinterpret_cast<__m128i*>(dst + s * stretch) + j, lines[s][j]);
}
#endif

}  // namespace kv
