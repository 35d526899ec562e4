// Goal: a client that has not used parts of the pool for a while has them in its page tables no longer, and loses nothing by it.
// Method: what the kernel says of the client's own mappings (/proc/self/smaps), with a moment instead of ten seconds.
//
// Seen failing: where what runs ahead counts as used and nobody is asked to look; where the end of a view counts as no use.
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <thread>

#include "core/base/polling.h"
#include "core/client/recent_chunks.h"
#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kBlocks = 48, kTokens = 255, kBlockBytes = (kTokens + 1) * kPageBytes;  // of a MiB

// Bytes of the mapping at this address that are in the page tables.
uint64_t resident(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin, end, kib;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
      here = begin <= reinterpret_cast<uintptr_t>(address) && reinterpret_cast<uintptr_t>(address) < end;
    else if (here && std::sscanf(line.c_str(), "Rss: %lu kB", &kib) == 1)
      return kib << 10;
  }
  return ~0ull;
}

// Longer than the test takes to read its blocks, which under a sanitizer is long: what went meanwhile came back unseen.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint32_t kMomentMs = 1000;
#else
constexpr uint32_t kMomentMs = 20;
#endif

struct Quick {
  Quick() { PageTables::idle_ms = kMomentMs; }
  ~Quick() { PageTables::idle_ms = 10'000; }
};

// No thread can be started: there is no address space for its stack.
struct NoThreads {
  NoThreads() {
    pthread_attr_t none;
    KV_INVARIANT(::pthread_getattr_default_np(&usual) == 0 && ::pthread_attr_init(&none) == 0);
    KV_INVARIANT(::pthread_attr_setstacksize(&none, size_t{1} << 47) == 0 && ::pthread_setattr_default_np(&none) == 0);
  }
  ~NoThreads() { KV_INVARIANT(::pthread_setattr_default_np(&usual) == 0); }
  pthread_attr_t usual;
};

}  // namespace

TEST(a_sweep_finds_what_was_not_used_since_the_last) {
  constexpr uint64_t k = RecentChunks::kChunk;
  RecentChunks chunks(130 * k + 5);
  std::vector<uint64_t> found;
  const auto sweep = [&] {
    found.clear();
    chunks.sweep([&](Extent idle) { found.push_back(idle.offset / k), CHECK(idle.end() <= 130 * k + 5); });
  };
  CHECK(chunks.use({k - 1, 2}) && chunks.use({64 * k, 1}) && chunks.use({130 * k, 5}));
  CHECK(!chunks.use({0, 1}));
  CHECK_EQ(chunks.bytes(), 4 * k);
  sweep();
  CHECK(found.empty());
  CHECK(chunks.use({64 * k, 1}));
  sweep();
  CHECK(found == (std::vector<uint64_t>{0, 1, 130}));
  CHECK_EQ(chunks.bytes(), k);
  sweep();
  CHECK(found == std::vector<uint64_t>{64});
  sweep();
  CHECK(found.empty() && chunks.bytes() == 0);
}

// Fails where a use that meets a sweep leaves a chunk that was used lately and is not there: no sweep looks at it again.
TEST(a_use_that_meets_a_sweep_is_swept_once_it_is_idle) {
  constexpr uint64_t k = RecentChunks::kChunk, kUses = 500'000;
  RecentChunks chunks(k);
  std::atomic<bool> over{false};
  std::jthread user([&] {
    for (uint64_t i = 0; i < kUses; ++i) {
      chunks.use({0, 1});
      for (uint64_t pause = i % 64; pause > 0; --pause) relax();  // long enough for a sweep to find it idle, sometimes
    }
    over = true;
  });
  while (!over.load()) chunks.sweep([](Extent) {});
  user.join();
  chunks.use({0, 1});
  uint64_t found = 0;
  for (int i = 0; i < 2; ++i) chunks.sweep([&](Extent) { ++found; });
  CHECK_EQ(found, 1u);
  CHECK_EQ(chunks.bytes(), 0u);
}

TEST(what_is_not_used_goes_from_the_tables_and_no_byte_with_it) {
  const Quick quick;
  Daemon daemon(128 * kMiB, 256);
  auto client = daemon.client();
  const auto at = client->attachment();
  for (int round = 0; round < 2; ++round) {
    for (uint64_t i = 0; i < kBlocks; ++i)
      put(*client, key(100 * static_cast<uint64_t>(round) + i), static_cast<uint8_t>(i), kTokens);
    CHECK(eventually([&] { return resident(at->writable(0)) == 0; }));
    std::vector<std::shared_ptr<BlockBatch>> views;
    for (uint64_t i = 0; i < kBlocks; ++i) views.push_back(get(*client, key(100 * static_cast<uint64_t>(round) + i)));
    const auto intact = [&] {
      for (uint64_t i = 0; i < kBlocks; ++i) {
        if (!CHECK(views[i]->item(0).state == ItemState::Hit)) return;
        const auto* bytes = reinterpret_cast<const uint8_t*>(at->readable(views[i]->item(0).at.extent.offset));
        for (uint64_t b = 0; b < kTokens * kPageBytes; b += kPageBytes) CHECK_EQ(bytes[b], static_cast<uint8_t>(i));
      }
    };
    CHECK(eventually([&] { return resident(at->readable(0)) == 0; }));
    intact();  // views that were made before
    CHECK(resident(at->readable(0)) >= kBlocks * kTokens * kPageBytes);
    views.clear();
    CHECK(eventually([&] { return resident(at->readable(0)) == 0; }));
  }
}

// Whoever uses the same all the time has it, also while the rest goes.
TEST(what_is_used_all_the_time_stays_known) {
  const Quick quick;
  Daemon daemon(128 * kMiB, 256);
  auto client = daemon.client();
  const auto at = client->attachment();
  for (uint64_t i = 0; i < kBlocks; ++i) put(*client, key(i), static_cast<uint8_t>(i), kTokens);
  CHECK(eventually([&] { return get(*client, key(0))->item(0).state == ItemState::Hit && at->tables->bytes() <= 4 * kMiB; }));
}

// Fails where who could not be given a thread is taken for one that looks.
TEST(a_thread_that_cannot_start_fails_nobody_and_starts_with_a_later_use) {
  constexpr uint64_t kBytes = 64 * kMiB;
  const Quick quick;
  const Fd file(::memfd_create("pool", 0));
  KV_INVARIANT(::ftruncate(file.get(), kBytes) == 0);
  const Mapping readable(file.get(), kBytes, false), writable(file.get(), kBytes, true);
  const std::atomic<uint64_t> frontier{kBytes};
  PageTables tables(readable, writable, frontier);
  const auto use = [&](Extent extent) { tables.writing(extent), tables.used(extent); };
  const std::vector<Extent> read{{0, 16 * kMiB}};
  {
    const NoThreads none;
    for (uint64_t at = 0; at < 32 * kMiB; at += kMiB) use({at, kMiB});
    tables.reading(read);
  }
  CHECK(resident(writable.data()) >= 32 * kMiB);
  CHECK_EQ(tables.bytes(), 32 * kMiB);  // nothing is said to be there that nobody asked for
  tables.used({0, 1});
  CHECK(eventually([&] { return resident(writable.data()) == 0 && tables.bytes() == 0; }));
}
