// What a use of a block counts for, and the clock that says so: nanoseconds that this pool has been served, from the monotonic
// clock, and a half life for each quarter of the pool (or of the table) that new blocks took meanwhile. Kept in the table, so
// that it goes on where the daemon before left it; while none runs it stands still. No date enters it: a clock that ran ahead and
// was put right would leave scores that no new block reaches for as long.
//
// By the hour alone, a pool full of blocks that were used twice would give up each new prompt before its second use.
//
// Invariant: what a use counts for never falls, not over a restart either, but where all scores are divided together.

#include <time.h>

#include <algorithm>
#include <cmath>

#include "core/base/error.h"
#include "core/store/store.h"

namespace kv {
namespace {

// Scores are divided by 2^kRebaseExponent once uses count for more than that.
constexpr double kRebaseExponent = 512;
constexpr double kMostUses = 0x1p20;  // at once: a score above is of a clock that was ahead of this one
constexpr double kNs = 1e9;

double half_lives(uint64_t score_ns) { return static_cast<double>(score_ns) / kNs / kHalfLifeSeconds; }

uint64_t nanoseconds(double half_lives) { return static_cast<uint64_t>(std::max(0.0, half_lives) * kHalfLifeSeconds * kNs); }

}  // namespace

// The same for all blocks of a request, so that their places in the prompt decide among them, and more than in any request
// before.
double Store::use_now() {
  const uint64_t now = monotonic_ns();
  auto& clock = index_.header().score_ns;
  const uint64_t turned = nanoseconds(std::exchange(clock_.sealed, 0) / kHalfLifePools);
  uint64_t score = clock.load(std::memory_order_relaxed) + (now - std::exchange(clock_.read_ns, now)) + turned;
  while (half_lives(score) > kRebaseExponent) {
    const double factor = std::exp2(-kRebaseExponent);
    for (uint32_t r = 0; r < index_.max_blocks(); ++r)
      index_.upkeep(r).rank.store(std::bit_cast<uint64_t>(rank(r) * factor), std::memory_order_relaxed);
    policy_.scale(factor);
    disk_.blocks.scale(factor);
    clock_.value *= factor;
    disk_.writes.score_again([this](uint32_t record) { return rank(record); });
    score -= nanoseconds(kRebaseExponent);
  }
  clock.store(std::max<uint64_t>(score, 1), std::memory_order_relaxed);
  return clock_.value = std::max(use_value(static_cast<double>(score) / kNs), clock_.value * (1 + 0x1p-40));
}

// Of a table that was just taken over. One of a daemon before 2026-11-25 counts from a date. One whose scores are above what any
// number of uses gives by its clock has a clock that is wrong, or is of a daemon whose date was: then it is put where the highest
// score comes from one use now, so that new blocks stand beside the old ones.
void Store::adopt_clock() {
  auto& header = index_.header();
  uint64_t score = header.score_ns.load(std::memory_order_relaxed);
  if (score == 0) {
    const auto passed = ::time(nullptr) - static_cast<time_t>(header.origin_s.load(std::memory_order_relaxed));
    score = nanoseconds(static_cast<double>(passed) / kHalfLifeSeconds);
  }
  double most = 0;
  for (uint32_t r = 0; r < index_.max_blocks(); ++r) {
    if (control(r).state() != State::Sealed) continue;
    const Shape shape = shape_of(r);
    most = std::max(most, rank(r) / block_weight(shape.tokens, extent_of(r).length, shape.priority, shape.base_position));
  }
  const double highest = std::log2(most);
  if (half_lives(score) > 2 * kRebaseExponent || highest > half_lives(score) + std::log2(kMostUses)) score = nanoseconds(highest);
  header.score_ns.store(std::max<uint64_t>(score, 1), std::memory_order_relaxed);
}

// For a daemon before 2026-11-25, should one take the table over: it counts from this date.
void Store::keep_origin() {
  auto& header = index_.header();
  const auto passed = static_cast<time_t>(header.score_ns.load(std::memory_order_relaxed) / 1'000'000'000);
  header.origin_s.store(static_cast<uint64_t>(std::max<time_t>(0, ::time(nullptr) - passed)), std::memory_order_relaxed);
}

// Counts a use in the record and returns its new score.
double Store::add_use(uint32_t record, double now) {
  const Shape shape = shape_of(record);
  const double weight = block_weight(shape.tokens, extent_of(record).length, shape.priority, shape.base_position);
  const double score = rank(record) + weight * now;
  index_.upkeep(record).rank.store(std::bit_cast<uint64_t>(score), std::memory_order_relaxed);
  return score;
}

double Store::uses(uint32_t record) const {
  const Shape shape = shape_of(record);
  const double weight = block_weight(shape.tokens, extent_of(record).length, shape.priority, shape.base_position);
  return rank(record) / (weight * std::max(clock_.value, 1.0));
}

void Store::use(uint32_t record, double now) {
  KV_INVARIANT(control(record).state() == State::Sealed);
  if (options_.disk) forget_wish(record);  // its score changes
  const double score = add_use(record, now);
  if (!is_parked(record)) policy_.moved(class_of(record), record, score);
  if (options_.disk) wish_to_write(record, true);  // at least its second use: it was used when it was sealed
}

}  // namespace kv
