// Every pin that there is, for those parts of the store that scan them. Owns nothing.
//
// Invariant: what a client wrote is bounded here and believed nowhere.
#pragma once

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

}  // namespace kv
