/* The best plain copy a machine has: non-temporal stores, one or four interleaved streams, no checksum.
 * Only a limit to compare with; the library's own copy is native/core/base/copy.cc. Sizes and addresses are multiples of 4096. */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

typedef void copy_fn(uint8_t *to, const uint8_t *from, size_t bytes);

__attribute__((target("avx512f"))) static void nt512_1(uint8_t *to, const uint8_t *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) {
    _mm512_stream_si512((void *)(to + at), _mm512_loadu_si512(from + at));
  }
  _mm_sfence();
}

__attribute__((target("avx512f"))) static void nt512_4(uint8_t *to, const uint8_t *from, size_t bytes) {
  const size_t part = bytes / 4;
  for (size_t at = 0; at < part; at += 64) {
    const __m512i a = _mm512_loadu_si512(from + at), b = _mm512_loadu_si512(from + part + at);
    const __m512i c = _mm512_loadu_si512(from + 2 * part + at), d = _mm512_loadu_si512(from + 3 * part + at);
    _mm512_stream_si512((void *)(to + at), a);
    _mm512_stream_si512((void *)(to + part + at), b);
    _mm512_stream_si512((void *)(to + 2 * part + at), c);
    _mm512_stream_si512((void *)(to + 3 * part + at), d);
  }
  _mm_sfence();
}

__attribute__((target("avx2"))) static void nt256_1(uint8_t *to, const uint8_t *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 32) {
    _mm256_stream_si256((void *)(to + at), _mm256_loadu_si256((const void *)(from + at)));
  }
  _mm_sfence();
}

__attribute__((target("avx2"))) static void nt256_4(uint8_t *to, const uint8_t *from, size_t bytes) {
  const size_t part = bytes / 4;
  for (size_t at = 0; at < part; at += 64) {
    for (size_t stream = 0; stream < 4; ++stream) {
      const uint8_t *source = from + stream * part + at;
      uint8_t *target = to + stream * part + at;
      const __m256i low = _mm256_loadu_si256((const void *)source), high = _mm256_loadu_si256((const void *)(source + 32));
      _mm256_stream_si256((void *)target, low);
      _mm256_stream_si256((void *)(target + 32), high);
    }
  }
  _mm_sfence();
}

__attribute__((target("avx2"))) static void nt256_pages(uint8_t *to, const uint8_t *from, size_t bytes) {
  /* Four neighbouring pages at a time: the order a prefetcher and the memory controller like best on some machines. */
  for (size_t block = 0; block < bytes; block += 16384) {
    const size_t part = bytes - block < 16384 ? (bytes - block) / 4 : 4096;
    for (size_t at = 0; at < part; at += 64) {
      for (size_t stream = 0; stream < 4; ++stream) {
        const uint8_t *source = from + block + stream * part + at;
        uint8_t *target = to + block + stream * part + at;
        _mm_prefetch((const char *)(source + 512), _MM_HINT_NTA);
        const __m256i low = _mm256_loadu_si256((const void *)source);
        const __m256i high = _mm256_loadu_si256((const void *)(source + 32));
        _mm256_stream_si256((void *)target, low);
        _mm256_stream_si256((void *)(target + 32), high);
      }
    }
  }
  _mm_sfence();
}

static void movsb(uint8_t *to, const uint8_t *from, size_t bytes) {
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes)::"memory");
}

static const struct {
  const char *name;
  copy_fn *copy;
  const char *needs;
} variants[] = {
    {"avx512, 1 stream", nt512_1, "avx512f"}, {"avx512, 4 streams", nt512_4, "avx512f"},
    {"avx2, 1 stream", nt256_1, "avx2"},      {"avx2, 4 streams", nt256_4, "avx2"},
    {"avx2, 4 pages", nt256_pages, "avx2"},   {"rep movsb", movsb, ""},
};

int variant_count(void) { return (int)(sizeof variants / sizeof variants[0]); }

const char *variant_name(int which) { return variants[which].name; }

int variant_runs(int which) {
  if (variants[which].copy == movsb) return 1;
  return variants[which].needs[3] == '5' ? __builtin_cpu_supports("avx512f") : __builtin_cpu_supports("avx2");
}

void variant_copy(int which, uint8_t *to, const uint8_t *from, size_t bytes) { variants[which].copy(to, from, bytes); }
