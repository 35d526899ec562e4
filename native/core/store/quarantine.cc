#include "core/store/quarantine.h"

#include <utility>

#include "core/base/error.h"

namespace kv {

uint64_t Quarantine::epoch() const {
  const std::lock_guard lock(mutex_);
  return epoch_;
}

uint64_t Quarantine::lend(const Key& key, Handle handle, uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  if (epoch != epoch_) return 0;
  const std::optional<ReadJob> held = store_.begin_read(key);
  if (!held) return 0;
  if (held->handle.record != handle.record || held->handle.generation != handle.generation) {
    store_.end_read(held->handle);
    return 0;
  }
  loans_.emplace(++last_, handle);
  return last_;
}

void Quarantine::over(uint64_t loan) {
  const std::lock_guard lock(mutex_);
  if (const auto node = loans_.extract(loan)) store_.end_read(node.mapped());
}

void Quarantine::process_ended() {
  const std::lock_guard lock(mutex_);
  epoch_ += 1;
  for (const auto& [loan, handle] : std::exchange(loans_, {})) store_.end_read(handle);
}

uint64_t Quarantine::lent() const {
  const std::lock_guard lock(mutex_);
  return loans_.size();
}

}  // namespace kv
