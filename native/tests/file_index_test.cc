// Goal: the index of files agrees with a plain map through any sequence of additions and removals, its bytes are the sum of its
// entries, it refuses what is above its bound, and old_one() prefers what was used long ago.

#include "core/files/file_index.h"

#include <map>

#include "check.h"
#include "store_fixture.h"

namespace kv {
namespace {

TEST(it_agrees_with_a_map) {
  constexpr uint32_t kFiles = 300;
  FileIndex index(kFiles);
  std::map<uint64_t, uint32_t> model;
  uint64_t bytes = 0;
  for (uint64_t step = 0; step < 50'000; ++step) {
    const uint64_t number = test::mixed(step) % 500;
    Key key = test::key(number);
    key.words[3] &= 63;  // few homes: long probes, many of them around the end
    if (test::mixed(step * 7 + 1) % 2) {
      const auto pages = static_cast<uint32_t>(1 + number % 9);
      const bool full = model.size() == kFiles && !model.contains(number);
      CHECK_EQ(index.add(key, pages, 0, 0) == nullptr, full);
      if (!full && model.emplace(number, pages).second) bytes += pages * kPageBytes;
    } else {
      index.erase(key);
      if (auto found = model.find(number); found != model.end()) bytes -= found->second * kPageBytes, model.erase(found);
    }
    CHECK_EQ(index.size(), model.size());
    CHECK_EQ(index.bytes(), bytes);
    if (step % 100) continue;
    for (uint64_t i = 0; i < 500; ++i) {
      Key wanted = test::key(i);
      wanted.words[3] &= 63;
      const FileIndex::Entry* found = index.find(wanted);
      CHECK_EQ(found != nullptr, model.contains(i));
      if (found) CHECK_EQ(found->pages, model[i]);
    }
  }
}

TEST(old_files_go_first) {
  FileIndex index(10'000);
  for (uint32_t i = 0; i < 10'000; ++i) index.add(test::key(i), 1, 0, i);
  uint64_t sum = 0;
  for (int i = 0; i < 2'000; ++i) {
    const FileIndex::Entry* old = index.old_one([](const FileIndex::Entry&) { return true; });
    CHECK(old != nullptr);
    sum += old->used_s;
    index.erase(old->key);
  }
  CHECK(sum / 2'000 < 2'500);  // by exact order it would be 1,000, by chance 5,000
}

TEST(unusable_files_stay) {
  FileIndex index(100);
  for (uint32_t i = 0; i < 100; ++i) index.add(test::key(i), 1, 0, i)->doomed = i != 50;
  const FileIndex::Entry* only = nullptr;
  for (int i = 0; i < 1000 && !only; ++i) only = index.old_one([](const FileIndex::Entry& e) { return !e.doomed; });
  CHECK(only != nullptr && only->used_s == 50);
  index.find(test::key(50))->doomed = true;
  CHECK(index.old_one([](const FileIndex::Entry& e) { return !e.doomed; }) == nullptr);
}

}  // namespace
}  // namespace kv
