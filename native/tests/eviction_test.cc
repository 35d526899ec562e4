// Goal: the policy names victims by value, in O(log n). Method: properties against a sorted model; comparisons are counted by the
// moves of places, because time is no measure on a shared machine.
#include "core/store/eviction.h"

#include <algorithm>
#include <optional>
#include <random>

#include "tests/check.h"

using namespace kv;

namespace {

struct Places {
  std::vector<uint32_t>* places;
  uint64_t* moves;
  uint32_t place(uint32_t record) const { return (*places)[record]; }
  void set_place(uint32_t record, uint32_t place) {
    ++*moves;
    (*places)[record] = place;
  }
};

struct Bench {
  explicit Bench(uint32_t records) : places(records), policy(Places{&places, &moves}) {}
  std::vector<uint32_t> places;
  uint64_t moves = 0;
  EvictionPolicy<Places> policy;
};

double weight(uint32_t tokens, uint64_t bytes, uint32_t priority = kDefaultPriority, uint32_t position = 0) {
  return block_weight(tokens, bytes, priority, position);
}

}  // namespace

TEST(the_least_valuable_goes_first_whatever_happened_before) {
  constexpr uint32_t kRecords = 1500;  // four levels of the heap
  Bench bench(kRecords);
  std::vector<std::optional<double>> model(kRecords);
  std::mt19937_64 random(1);
  for (int step = 0; step < 50'000; ++step) {
    const auto record = static_cast<uint32_t>(random() % kRecords);
    const double score = static_cast<double>(random() % 1000);
    if (!model[record]) {
      bench.policy.insert(4096, record, score);
      model[record] = score;
    } else if (random() % 2) {
      bench.policy.moved(4096, record, score);
      model[record] = score;
    } else if (random() % 2) {
      bench.policy.remove(4096, record);
      model[record].reset();
    } else {
      const auto popped = random() % 2 ? bench.policy.pop_least(4096) : bench.policy.pop_least(std::nullopt);
      CHECK(model[popped.record] && *model[popped.record] == popped.score);
      CHECK(!bench.policy.contains(4096, popped.record));
      for (const auto& s : model) CHECK(!s || *s >= popped.score);
      model[popped.record].reset();
    }
    double least = INFINITY;
    for (const auto& s : model) least = std::min(least, s.value_or(INFINITY));
    const auto found = bench.policy.least(4096);
    if (std::isinf(least))
      CHECK(found.record == decltype(bench.policy)::kNone);
    else
      CHECK(model[found.record] == least && found.score == least);
    CHECK_EQ(bench.policy.contains(4096, record), model[record].has_value());
  }
}

TEST(value_is_uses_times_tokens_per_byte_times_priority) {
  CHECK(weight(128, 1 << 20) > weight(128, 2 << 20));  // saves the same, holds less
  CHECK(weight(256, 1 << 20) > weight(128, 1 << 20));
  CHECK(weight(128, 1 << 20, 45) > 1.99 * weight(128, 1 << 20, 35));  // ten steps of priority are a factor of two
  CHECK(weight(128, 1 << 20, 45) < 2.01 * weight(128, 1 << 20, 35));
  CHECK(weight(128, 1 << 20, 0) > 0);
  CHECK(weight(128, 1 << 20, 100) < 1);
}

TEST(of_two_equal_blocks_the_later_in_a_prompt_goes_first_but_one_use_outweighs_it) {
  const double first = weight(128, 1 << 20, kDefaultPriority, 0);
  const double second = weight(128, 1 << 20, kDefaultPriority, 128);
  const double last = weight(128, 1 << 20, kDefaultPriority, kMaxBasePosition);
  CHECK(first > second && second > last);
  CHECK(first < 1.01 * last);
}

TEST(old_uses_fade_by_half_in_an_hour_without_a_rescan) {
  CHECK_EQ(use_value(0), 1.0);
  CHECK_EQ(use_value(kHalfLifeSeconds), 2 * use_value(0));
  // Three uses now are worth more than one in an hour, and less than one in two hours.
  CHECK(3 * use_value(0) > use_value(kHalfLifeSeconds));
  CHECK(3 * use_value(0) < use_value(2 * kHalfLifeSeconds));
}

TEST(scaling_all_scores_keeps_their_order) {
  constexpr uint32_t kRecords = 1000;
  Bench bench(kRecords);
  std::mt19937_64 random(2);
  std::vector<double> scores(kRecords);
  for (uint32_t r = 0; r < kRecords; ++r)
    bench.policy.insert(r % 3, r, scores[r] = use_value(static_cast<double>(random() % 2'000'000)));
  bench.policy.scale(std::exp2(-512));
  double before = 0;
  for (uint32_t i = 0; i < kRecords; ++i) {
    const auto least = bench.policy.least();
    CHECK_EQ(least.score, scores[least.record] * std::exp2(-512));
    CHECK(least.score >= before);
    before = least.score;
    bench.policy.remove(least.record % 3, least.record);
  }
  CHECK_EQ(bench.policy.size(), 0u);
}

TEST(queues_of_size_classes_are_apart) {
  Bench bench(4);
  bench.policy.insert(4096, 0, 5);
  bench.policy.insert(8192, 1, 1);
  bench.policy.insert(8192, 2, 2);
  CHECK_EQ(bench.policy.least(4096).record, 0u);
  CHECK_EQ(bench.policy.least(8192).record, 1u);
  CHECK_EQ(bench.policy.least().record, 1u);
  CHECK(bench.policy.least(12288).record == decltype(bench.policy)::kNone);
  CHECK(!bench.policy.contains(4096, 1));
  bench.policy.remove(4096, 0);
  CHECK(bench.policy.least(4096).record == decltype(bench.policy)::kNone);
}

// A million blocks: an operation moves at most the height of the heap, however adverse the order.
TEST(a_million_blocks_cost_logarithmic_work) {
  constexpr uint32_t kRecords = 1'000'000;
  constexpr uint64_t kHeight = 12;  // of a 4-ary heap: ceil(log4(3 * 10^6)) + 1
  Bench bench(kRecords);
  std::mt19937_64 random(3);
  uint64_t worst = 0;
  auto counted = [&](auto&& operation) {
    const uint64_t before = bench.moves;
    operation();
    worst = std::max(worst, bench.moves - before);
  };
  for (uint32_t r = 0; r < kRecords; ++r) counted([&] { bench.policy.insert(1, r, kRecords - r); });  // each becomes the least
  for (int i = 0; i < 200'000; ++i) {
    const auto record = static_cast<uint32_t>(random() % kRecords);
    counted([&] { bench.policy.moved(1, record, static_cast<double>(random() % kRecords)); });
  }
  double before = -1;
  for (int i = 0; i < 200'000; ++i) {
    const auto least = bench.policy.least(1);
    CHECK(least.score >= before);
    before = least.score;
    counted([&] { bench.policy.remove(1, least.record); });
  }
  CHECK(worst <= kHeight + 1);
  std::printf("     at most %lu moves an operation\n", worst);
}
