// Goal: checksums that a scrub computes, or that were computed for another host, are not written behind a block while the block
// waits for the disk or is being written there: its file has a checksum of those bytes.
//
// Method: a write begins while the scrub reads the block, which is seen by its hold on it; then the bytes are looked at.
//
// Proven against verify_one() as it was, which wrote them whatever had begun meanwhile, and against keep_checksums() without
// its look for a block that waits: each fails.
#include <unistd.h>

#include <thread>

#include "check.h"
#include "store_fixture.h"

namespace kv {
namespace {

using test::key;
using test::Rig;

TEST(a_write_that_begins_during_a_scrub_finds_its_bytes_unchanged) {
  constexpr uint32_t kPages = Rig::kMaxTokens + 1;  // of a block that takes a while to sum up
  Rig rig(4 * uint64_t{kPages} * kPageBytes, 16, true);
  uint32_t caught = 0;
  for (uint64_t i = 0; i < 200 && caught < 3; ++i) {
    CHECK_EQ(rig.put(i, kPages), Grant::Granted);
    const Snapshot at = rig.store->lookup(key(i)).snapshot;
    const auto behind = static_cast<off_t>(at.extent.end() - kPageBytes);  // the checksums' page
    const auto sum = [&] {
      uint32_t word = 0;
      CHECK_EQ(::pread(rig.segments.pool.get(), &word, sizeof word, behind), 4);
      return word;
    };
    std::atomic<bool> done{false};
    std::thread scrubbing([&] { rig.store->scrub(0, ~0ull), done = true; });
    while (!done && !StoreTest::is_read(*rig.store, at.record)) continue;
    test::touch(*rig.store, key(i));  // used twice: it wishes to be written
    const bool during = StoreTest::is_read(*rig.store, at.record);
    const auto job = rig.store->begin_write();
    const uint32_t before = sum();
    scrubbing.join();
    if (job && !job->checksummed && during) CHECK_EQ(sum(), before), ++caught;
    if (job) CHECK(rig.store->end_write(job->handle, true));
    CHECK(rig.store->scrub(0, ~0ull).corrupt == 0);
    CHECK(rig.control(at.record).flags() & kFlagChecksummed);
    CHECK(rig.store->remove(key(i)));
    rig.store->settle();
    rig.store->take_deleted();
    rig.store->file_gone(key(i));
  }
  CHECK_EQ(caught, 3u);
  rig.store->check_integrity();
}

TEST(checksums_are_kept_of_no_block_that_waits_for_the_disk) {
  Rig rig(4 << 20, 16, true);
  CHECK_EQ(rig.put(1, 3), Grant::Granted);
  const Handle block = rig.handle(1);
  const auto behind = static_cast<off_t>(rig.store->lookup(key(1)).snapshot.extent.end() - kPageBytes);
  uint32_t before = 0;
  CHECK_EQ(::pread(rig.segments.pool.get(), &before, sizeof before, behind), 4);
  const uint32_t sums[] = {~before};
  const auto kept = [&] {
    rig.store->keep_checksums(block, sums);
    uint32_t now = 0;
    CHECK_EQ(::pread(rig.segments.pool.get(), &now, sizeof now, behind), 4);
    const bool said = (rig.control(block.record).flags() & kFlagChecksummed) != 0;
    CHECK_EQ(said, now != before);
    return said;
  };
  test::touch(*rig.store, key(1));  // used twice: it waits to be written
  CHECK(rig.control(block.record).flags() & kFlagQueued);
  CHECK(!kept());
  const auto job = rig.store->begin_write();
  CHECK(job && !job->checksummed);
  CHECK(!kept());  // while its file is written
  CHECK(rig.store->end_write(job->handle, true));
  CHECK(kept());
  rig.store->check_integrity();
}

}  // namespace
}  // namespace kv
