// Copies of whole layers and blocks into the pool: past the caches, because the writer will not read them again and
// the caches are better used for something else; with the checksum on the way, because the bytes pass by anyway.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// memcpy that returns the CRC32C of the bytes. Fastest where dst is a multiple of 64.
uint32_t copy_crc32c(void* dst, const void* src, size_t n);

// The same for who reads the copy next: it stays in the caches. `crc`: of what came before, as of crc32c().
uint32_t copy_and_sum(void* dst, const void* src, size_t n, uint32_t crc = 0);

// memcpy with non-temporal stores for long copies.
void copy_stream(void* dst, const void* src, size_t n);

// A few whole lines into memory that is in no cache: past the caches they need not be read first. Requires that dst and n are
// multiples of 64, and lines_written() before anybody is told of them.
void write_lines(void* dst, const void* src, size_t n);
void lines_written();

// Zeros into memory that is in no cache and that nobody reads soon; lines_written() before anybody is told of them.
void write_zeros(void* dst, size_t n);

}  // namespace kv
