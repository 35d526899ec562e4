// Every pin that there is, for those parts of the store that scan them. Owns nothing.
//
// Invariant: what a client wrote is bounded here and believed nowhere.
#pragma once

#include <algorithm>

#include "core/store/store.h"

namespace kv {

template <class F>
void Store::each_pin_of(F&& f) {
  const uint32_t records = index_.max_blocks();
  for (auto& [id, session] : sessions_) {
    if (!session->file) continue;
    const PinAllowance allowance = session->allowance;
    for (const auto& word : session->file->pin_words(allowance.slots))
      if (const uint64_t pin = word.load(std::memory_order_acquire); pin && pin_record(pin) < records)
        f(id, pin_record(pin), pin_generation(pin), allowance.pages);
  }
  for (auto& [record, pin] : own_pins_) f(0, record, pin.generation, PinAllowance::kAnyPages);
}

template <class F>
void Store::each_pin(F&& f) {
  each_pin_of([this, &f](uint32_t, uint32_t record, uint64_t generation, uint32_t pages)
                  REQUIRES(mutex_) { f(record, generation, pages); });
}

// Lets go of the lock after each slice, unless there are few: a pin that was there from the beginning to the end is seen, one
// that came or went meanwhile perhaps. Session 0 is the daemon itself.
template <class F>
void Store::each_pin_of_in_slices(Slice& slice, uint32_t first, uint32_t last, F&& f) {
  constexpr size_t kWordsAtOnce = 4096, kWordsOfASession = 64;  // what its page costs
  const uint32_t records = index_.max_blocks();
  uint32_t id = first;
  size_t from = 0, words = 0;
  for (auto at = sessions_.at_least(id); at != sessions_.end() && at->first <= last; at = sessions_.at_least(id)) {
    if (at->first != id) id = at->first, from = 0;
    if (!at->second->file) {
      ++id;
      continue;
    }
    const PinAllowance allowance = at->second->allowance;
    const auto all = at->second->file->pin_words(allowance.slots);
    const size_t until = std::min(all.size(), from + kWordsAtOnce);
    for (size_t i = from; i < until; ++i)
      if (const uint64_t pin = all[i].load(std::memory_order_acquire); pin && pin_record(pin) < records)
        f(id, pin_record(pin), pin_generation(pin), allowance.pages);
    words += kWordsOfASession + (until > from ? until - from : 0);
    from = until;
    if (from >= all.size()) ++id, from = 0;
    if (words >= kWordsAtOnce && slice.over_now()) mutex_.give_way(), slice.again();
    if (words >= kWordsAtOnce) words = 0;
    if (id == 0) break;  // behind the last number that there is
  }
  if (first == 0)
    for (auto& [record, pin] : own_pins_) f(0, record, pin.generation, PinAllowance::kAnyPages);
}

// f(record, generation, most pages).
template <class F>
void Store::each_pin_in_slices(Slice& slice, F&& f) {
  each_pin_of_in_slices(slice, 0, ~0u,
                        [this, &f](uint32_t, uint32_t record, uint64_t generation, uint32_t pages)
                            REQUIRES(mutex_) { f(record, generation, pages); });
}

}  // namespace kv
