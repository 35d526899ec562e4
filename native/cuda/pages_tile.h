// What one thread does of kvk_copy_pages: words of rows of pages, several on their way at once.
//
// Owns the walk from an index to a place; host and device alike. Never allocates. Invariant: index runs over page, head, token
// and word, in this order, and every word of every page has exactly one.
#pragma once

#include "cuda/numbers.h"

namespace kvk {

constexpr uint32_t kPageThreads = 256;
constexpr uint32_t kWordsInFlight = 8;

KVK_BOTH uint64_t words_of(const kvk_pages& a, uint32_t word_bytes) {
  return static_cast<uint64_t>(a.count) * a.heads * a.tokens * (a.row_bytes / word_bytes);
}

struct Places {
  const void* from;
  void* to;
};

KVK_BOTH Places places_of(const kvk_pages& a, uint64_t index, uint32_t word_bytes) {
  const uint32_t row_words = a.row_bytes / word_bytes;
  const uint64_t row = index / row_words;
  const uint32_t word = static_cast<uint32_t>(index % row_words), token = static_cast<uint32_t>(row % a.tokens);
  const uint32_t head = static_cast<uint32_t>(row / a.tokens % a.heads), page = static_cast<uint32_t>(row / a.tokens / a.heads);
  const int64_t inside = static_cast<int64_t>(word) * word_bytes;
  return {at(a.from[page], head * a.from_head_stride + token * a.from_token_stride + inside),
          at(a.to[page], head * a.to_head_stride + token * a.to_token_stride + inside)};
}

// Words first, first + step, ... of type Word. Pages are not checked for alignment here: `aligned` says whether all are.
template <class Word>
KVK_BOTH void copy_words(const kvk_pages& a, uint64_t first, uint64_t step) {
  const uint64_t words = words_of(a, sizeof(Word));
  for (uint64_t index = first; index < words; index += step * kWordsInFlight) {
    Word held[kWordsInFlight];
    void* to[kWordsInFlight];
    KVK_UNROLL
    for (uint32_t i = 0; i < kWordsInFlight; ++i) {
      const uint64_t word = index + i * step;
      const Places places = places_of(a, word < words ? word : index, sizeof(Word));
      held[i] = *static_cast<const Word*>(places.from);
      to[i] = places.to;
    }
    KVK_UNROLL
    for (uint32_t i = 0; i < kWordsInFlight; ++i)
      if (index + i * step < words) *static_cast<Word*>(to[i]) = held[i];
  }
}

KVK_BOTH bool strides_fit(const kvk_pages& a, uint32_t bytes) {
  return a.row_bytes % bytes == 0 && a.from_head_stride % bytes == 0 && a.from_token_stride % bytes == 0 &&
         a.to_head_stride % bytes == 0 && a.to_token_stride % bytes == 0;
}

}  // namespace kvk
