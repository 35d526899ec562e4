// What is pushed to a host: each of its connections hears all of it, a new one what is not old, and nothing that was not heard is
// forgotten while somebody may hear it. All who sleep hear of a change.
#include "core/store/journal.h"

#include <thread>

#include "tests/check.h"

using namespace kv;
using namespace kv::test;

namespace {

std::vector<Key> keys_from(uint64_t first, size_t count) {
  std::vector<Key> keys(count);
  for (Key& key : keys) key.words[0] = first++;
  return keys;
}

constexpr uint64_t kLater = Journal::kToldAgainNs + 1'000'000'000;

TEST(each_connection_of_a_host_hears_all_that_is_pushed) {
  Journal journal;
  CHECK(!journal.push("b", keys_from(0, 1)));  // nobody is there
  uint64_t first = journal.take_for("b", 1), other = journal.take_for("b", 1);
  const std::vector<Key> keys = keys_from(1, 3);
  CHECK(journal.push("b", keys) == 3);
  CHECK(journal.take("b", first) == keys && journal.take("b", other) == keys);
  CHECK(journal.take("b", first).empty() && journal.take("a", first).empty());
}

TEST(a_new_connection_is_told_again_what_is_not_old) {
  Journal journal;
  uint64_t from = journal.take_for("b", 1);
  const std::vector<Key> keys = keys_from(1, 3);
  journal.push("b", keys);
  CHECK(journal.take("b", from) == keys);
  journal.take_for("b", -1);
  CHECK(journal.takers().empty() && !journal.push("b", keys));
  from = journal.take_for("b", 1);
  CHECK(journal.take("b", from) == keys);
  journal.take_for("b", -1);
  from = journal.take_for("b", 1, monotonic_ns() + kLater);
  CHECK(journal.take("b", from).empty());
}

TEST(a_connection_that_is_slow_loses_nothing_because_another_comes) {
  Journal journal;
  uint64_t from = journal.take_for("b", 1);
  const std::vector<Key> keys = keys_from(1, 3);
  journal.push("b", keys);
  journal.take_for("c", 1, monotonic_ns() + kLater);
  CHECK(journal.take("b", from) == keys);
}

// Fails (it never ends) if a change wakes fewer than all who sleep.
TEST(all_who_sleep_hear_of_a_change) {
  Journal journal;
  std::atomic<bool> over{false};
  std::atomic<uint64_t> heard{0};
  constexpr uint64_t kListeners = 8, kChanges = 200;
  std::vector<std::jthread> listeners;
  for (uint64_t i = 0; i < kListeners; ++i)
    listeners.emplace_back([&] {
      std::vector<uint64_t> marks;
      for (uint64_t from = 0; from != kChanges;) {
        journal.wait(from, "", 0, std::chrono::hours(1), over);
        CHECK(journal.read(from, marks));
        heard = std::max(heard.load(), from);
      }
      CHECK_EQ(marks.size(), kChanges);
    });
  for (uint64_t change = 1; change <= kChanges; ++change) {
    journal.note(keys_from(change, 1)[0], true);
    while (change % 2 && heard < change) std::this_thread::yield();
  }
}

TEST(no_more_wait_for_a_host_than_may) {
  Journal journal;
  uint64_t from = journal.take_for("b", 1);
  CHECK(journal.push("b", keys_from(0, Journal::kMostPushed + 5)) == Journal::kMostPushed);
  CHECK(journal.push("b", keys_from(9000, 1)) == size_t{0});
  CHECK(journal.take("b", from).size() == Journal::kMostPushed);
  CHECK(journal.push("b", keys_from(9000, 2)) == 2);
  CHECK(journal.take("b", from) == keys_from(9000, 2));
}

}  // namespace
