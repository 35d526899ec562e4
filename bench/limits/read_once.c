/* Reads memory once, as a row of decoding reads weights: the most that their bytes could come at. Only a limit to compare with. */
#include <stddef.h>
#include <stdint.h>

typedef uint64_t lanes __attribute__((vector_size(64)));

uint64_t read_once(const void *from, size_t bytes) {
  const lanes *at = from;
  lanes sum[4] = {{0}};
  for (size_t i = 0; i + 4 <= bytes / sizeof(lanes); i += 4) {
    for (int j = 0; j < 4; ++j) sum[j] += at[i + j];
  }
  const lanes all = sum[0] + sum[1] + sum[2] + sum[3];
  uint64_t found = 0;
  for (size_t i = 0; i < sizeof all / sizeof(uint64_t); ++i) found += all[i];
  return found;
}
