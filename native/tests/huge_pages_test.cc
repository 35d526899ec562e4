// Goal: a pool that the file system made of small pages becomes one of huge pages while it is used, without a wrong byte, and who
// maps it then takes a page fault for each of them, not for each 4 KiB. Method: real memory (memfd), threads that write and read
// all of it meanwhile, and the faults that the kernel counts. Where the kernel has no such call it says so and proves nothing.
//
// Seen failing: without the address that map_aligned() chooses 4,096 faults in place of 8; with huge_after_ms 0 none is made.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <thread>

#include "core/store/pool.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kBytes = 8 * kHugePageBytes;

long faults() {
  rusage used;
  ::getrusage(RUSAGE_THREAD, &used);
  return used.ru_minflt;
}

bool has_the_call() {
  if (!Pool::collapses_pages()) {
    std::fprintf(stderr, "proves nothing: a kernel before 6.6\n");
    return false;
  }
  const Fd fd(::memfd_create("probe", MFD_CLOEXEC));
  KV_INVARIANT(::ftruncate(fd.get(), kHugePageBytes) == 0);
  const Mapping probe(fd.get(), kHugePageBytes, true);
  probe.data()[0] = std::byte{1};
  const bool has = ::madvise(probe.data(), kHugePageBytes, 25) == 0;
  if (!has) std::fprintf(stderr, "proves nothing: MADV_COLLAPSE answers %s\n", std::strerror(errno));
  return has;
}

}  // namespace

TEST(a_mapping_begins_where_huge_pages_do) {
  const Fd fd(::memfd_create("pool", MFD_CLOEXEC));
  KV_INVARIANT(::ftruncate(fd.get(), kBytes) == 0);
  const Mapping first(fd.get(), kBytes, true), second(fd.get(), kBytes - kPageBytes, false), third(fd.get(), kBytes, true);
  for (const Mapping* mapping : {&first, &second, &third})
    CHECK_EQ(reinterpret_cast<uintptr_t>(mapping->data()) % kHugePageBytes, 0u);
  first.data()[kBytes - kPageBytes - 1] = std::byte{7};
  CHECK(second.data()[kBytes - kPageBytes - 1] == std::byte{7});
}

TEST(a_pool_becomes_one_of_huge_pages_under_its_users) {
  if (!has_the_call()) return;
  const Fd fd(::memfd_create("pool", MFD_CLOEXEC));
  KV_INVARIANT(::ftruncate(fd.get(), kBytes) == 0);
  Pool pool(fd.get(), kBytes, 0, 1);
  CHECK(pool.grow());
  const Mapping mapping(fd.get(), kBytes, true);
  std::atomic<bool> over{false};
  std::atomic<uint64_t> wrong{0}, rounds{0};
  const auto use = [&](uint64_t from) {  // every other page
    for (uint64_t round = 1; !over; ++round, ++rounds)
      for (uint64_t at = from * kPageBytes; at < kBytes; at += 2 * kPageBytes) {
        auto* const word = mapping.at<volatile uint64_t>(at + from * 8);
        if (*word != (round == 1 ? 0 : round - 1)) ++wrong;
        *word = round;
      }
  };
  std::thread even(use, 0), odd(use, 1);
  pool.start([](uint64_t) {}, [](uint64_t) {});
  CHECK(eventually([&] { return pool.huge() == kBytes; }));
  const uint64_t then = rounds;
  CHECK(eventually([&] { return rounds > then + 4; }));
  over = true;
  even.join(), odd.join();
  CHECK_EQ(wrong.load(), 0u);
  const Mapping later(fd.get(), kBytes, true);
  const long before = faults();
  for (uint64_t at = 0; at < kBytes; at += kPageBytes) *later.at<volatile uint64_t>(at + 64) = 1;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose shadows take faults of their own
  CHECK(faults() - before <= static_cast<long>(2 * kBytes / kHugePageBytes));
#endif
}
