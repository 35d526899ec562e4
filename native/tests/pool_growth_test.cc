// Goal: a pool that met a full file system grows again once there is room. Method: the limit on a file's size refuses what a full
// tmpfs refuses, at the same call; the limit is raised while the store is used.
//
// A pool is faulted in by calls each of which keeps whoever maps memory in this process waiting, with the store's lock in its
// hands: a create of a length that is new.
//
// Seen failing: with the refusal remembered for ever, the pool stayed at 64 of 192 MiB; with steps of 8 MiB, which a create
// waited 50 to 300 ms for.
#include <signal.h>
#include <sys/resource.h>

#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

TEST(a_pool_that_found_no_room_grows_when_there_is_some) {
  constexpr uint64_t kCapacity = 3 * kGrowStep;
  Segments segments(kCapacity, 256);
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  CHECK(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit low{kGrowStep + 1, before.rlim_max};
  CHECK(::setrlimit(RLIMIT_FSIZE, &low) == 0);
  auto store = segments.open();
  CHECK(eventually([&] { return !store->problem().empty(); }));
  CHECK_EQ(store->header().frontier.load(), kGrowStep);
  const uint32_t layout = store->register_layout(layout_blob(1, kPageBytes, 4096));
  const uint32_t owner = store->open_owner();
  const auto create = [&](uint64_t number) {
    const CreateItem item{.key = key(number), .tokens = 4095};  // 16 MiB
    return store->create({.owner = owner, .layout = layout, .items = {&item, 1}})[0].status;
  };
  uint64_t fits = 0;
  while (create(fits) == Grant::Granted) ++fits;  // unsealed: nothing of it can be evicted
  CHECK(fits >= 3 && fits <= 4);
  CHECK(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK(eventually([&] { return store->header().frontier.load() == kCapacity; }));
  CHECK(store->problem().empty());
  CHECK(create(100) == Grant::Granted);
  store->check_integrity();
}

TEST(a_pool_is_faulted_in_by_short_calls) {
  constexpr uint64_t kShort = 512 << 10;
  const Fd file(::memfd_create("pool", MFD_CLOEXEC));
  CHECK(::ftruncate(file.get(), kGrowStep) == 0);
  Pool pool(file.get(), kGrowStep, 0, 0);
  std::atomic<uint64_t> last{0}, longest{0};
  pool.start([](uint64_t) {},
             [&](uint64_t at) {
               longest = std::max(longest.load(), at - last.load());
               last = at;
             });
  CHECK(eventually([&] { return last.load() == kGrowStep; }));
  pool.stop();
  CHECK(longest.load() <= kShort);
}
