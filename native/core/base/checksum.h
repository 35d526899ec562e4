// CRC32C (Castagnoli), the checksum of every layer of a block; alone, or of bytes on their way through a copy.
//
// Four paths, the best that the CPU has is chosen at run time: carry-less multiplication in AVX-512 (folds 64 bytes at a
// time) or AVX2 (32 bytes; of half of a long input, beside the crc32 instruction for the other half), SSE 4.2 (that
// instruction alone), and tables. A long input is worked on as four stretches side by side, whose checksums are combined at the
// end: one stretch alone would wait for its own results. A shorter one is folded in four registers, from 256 bytes on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// The checksum of a message whose beginning has the checksum `crc` and whose rest is `data`.
uint32_t crc32c(const void* data, size_t n, uint32_t crc = 0);

// crc32c(src, n, crc); the bytes also go to `dst`, past the caches. Requires that dst is a multiple of 64.
uint32_t crc32c_stream(void* dst, const void* src, size_t n, uint32_t crc = 0);
bool copies_down();  // where the source trails the destination, see stream.h; the crc32 instruction cannot

enum class ChecksumPath { Portable, Sse42, Avx2, Avx512 };
bool supported(ChecksumPath path);
void use(ChecksumPath path);  // for tests: what all of the above use from now on

}  // namespace kv
