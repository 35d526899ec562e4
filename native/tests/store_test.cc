// Goal: what clients ask of a store, one operation after another: create, seal, abort, delete, look up, layouts, time to live,
// bytes, checksums, broken memory. Method: a store on memfds; check_integrity and the sum of memory after each test.
#include "core/store/store.h"

#include <thread>

#include "core/base/checksum.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kMiB = 1 << 20;

// Everything given up: nothing is left in use, whatever happened before (invariant 5).
void check_empty_after_flush(Rig& rig) {
  rig.store->check_integrity();
  rig.store->end_session(rig.owner);
  rig.store->flush();
  rig.store->settle();
  const Stats s = rig.store->stats();
  CHECK_EQ(s.used_bytes, 0u);
  CHECK_EQ(s.slack_bytes, 0u);
  CHECK_EQ(s.blocks + s.created + s.zombies + s.quarantined, 0u);
  rig.store->check_integrity();
  rig.owner = rig.store->open_owner();
}

std::vector<uint8_t> pattern(size_t size, uint64_t seed) {
  std::vector<uint8_t> out(size);
  for (size_t i = 0; i < size; ++i) out[i] = static_cast<uint8_t>(mixed(seed + i / 8) >> i % 8 * 8);
  return out;
}

}  // namespace

TEST(a_block_is_pending_then_resident_then_gone) {
  Rig rig(16 * kMiB, 64);
  CHECK(rig.presence(1) == Presence::Missing);
  const Granted granted = rig.create(1, 5);
  CHECK(granted.status == Grant::Granted);
  CHECK_EQ(granted.extent.length, 5 * kPageBytes);
  CHECK(rig.presence(1) == Presence::Pending);
  CHECK(!rig.store->read(key(1), 0, 10).has_value());  // found by nobody before the seal
  CHECK(!rig.store->remove(key(1)));
  CHECK(!touch(*rig.store, key(1)));
  CHECK(rig.seal(granted.handle) == Done::Ok);
  CHECK(rig.resident(1));
  CHECK(rig.seal(granted.handle) == Done::Stale);
  CHECK(rig.store->abort(rig.owner, granted.handle) == Done::Stale);
  CHECK(touch(*rig.store, key(1)));
  CHECK(rig.store->remove(key(1)));
  CHECK(!rig.store->remove(key(1)));
  CHECK(rig.presence(1) == Presence::Missing);
  check_empty_after_flush(rig);
}

TEST(two_writers_of_one_key_and_the_rest_of_their_batches) {
  Rig rig(16 * kMiB, 64);
  const uint32_t other = rig.store->open_owner();
  CHECK(rig.put(3, 2) == Grant::Granted);
  const uint64_t first[] = {1, 2}, second[] = {4, 2, 3, 5, 5};
  const auto mine = rig.create(first, 2);
  const auto theirs = rig.create(second, 2, other);
  CHECK(mine[0].status == Grant::Granted && mine[1].status == Grant::Granted);
  CHECK(theirs[0].status == Grant::Granted);
  CHECK(theirs[1].status == Grant::Pending && theirs[1].handle.record == mine[1].handle.record &&
        theirs[1].handle.generation == mine[1].handle.generation);
  CHECK(theirs[2].status == Grant::Exists);
  CHECK(theirs[3].status == Grant::Granted && theirs[4].status == Grant::Pending);  // twice in one batch: one extent
  CHECK(rig.seal(mine[1].handle, other) == Done::NotOwner);
  CHECK(rig.store->abort(other, mine[1].handle) == Done::NotOwner);
  CHECK(rig.store->abort(rig.owner, mine[1].handle) == Done::Ok);
  CHECK(rig.create(2, 2, other).status == Grant::Granted);
  rig.store->end_session(other);
  CHECK(rig.presence(4) == Presence::Missing);  // an owner inside the process leaves nothing in quarantine
  CHECK_EQ(rig.store->stats().quarantined, 0u);
  check_empty_after_flush(rig);
}

TEST(a_generation_changes_when_a_block_is_given_up_and_nowhere_else) {
  Rig rig(16 * kMiB, 1);
  const Granted a = rig.create(1, 2);
  CHECK(rig.seal(a.handle) == Done::Ok);
  CHECK_EQ(rig.control(0).generation(), a.handle.generation);  // a follower keeps its pin over the seal
  rig.store->remove(key(1));
  CHECK_EQ(rig.control(0).generation(), a.handle.generation + 1);
  rig.store->settle();
  CHECK_EQ(rig.control(0).generation(), a.handle.generation + 1);
  const Granted b = rig.create(2, 2);
  CHECK_EQ(b.handle.generation, a.handle.generation + 1);
  CHECK(rig.seal(a.handle) == Done::Stale);
  CHECK(rig.store->abort(rig.owner, a.handle) == Done::Stale);
  CHECK(thrown([&] { rig.store->mark_layer(a.handle, 1); }) == Code::BlockLost);
  CHECK(rig.store->abort(rig.owner, b.handle) == Done::Ok);
  check_empty_after_flush(rig);
}

TEST(arguments_out_of_range_are_refused_and_change_nothing) {
  Rig rig(16 * kMiB, 64);
  auto create = [&](CreateItem item, uint32_t layout, uint32_t priority, uint32_t owner) {
    return thrown([&] { rig.store->create({.owner = owner, .layout = layout, .priority = priority, .items = {&item, 1}}); });
  };
  CHECK(create({.key = key(1), .tokens = 1}, 99, 35, rig.owner) == Code::InvalidArgument);
  CHECK(create({.key = key(1), .tokens = 1}, ~0u, 35, rig.owner) == Code::InvalidArgument);
  CHECK(create({.key = key(1), .tokens = 0}, 0, 35, rig.owner) == Code::InvalidArgument);
  CHECK(create({.key = key(1), .tokens = Rig::kMaxTokens + 1}, 0, 35, rig.owner) == Code::InvalidArgument);
  CHECK(create({.key = key(1), .tokens = 1, .base_position = kMaxBasePosition + 1}, 0, 35, rig.owner) == Code::InvalidArgument);
  CHECK(create({.key = key(1), .tokens = 1}, 0, 101, rig.owner) == Code::InvalidArgument);
  CHECK(create({.key = key(1), .tokens = 1}, 0, 35, rig.owner + 1) == Code::FailedPrecondition);
  std::vector<CreateItem> many(kMaxKeysPerMessage + 1, {.key = key(1), .tokens = 1});
  CHECK(thrown([&] { rig.store->create({.owner = rig.owner, .layout = 0, .items = many}); }) == Code::InvalidArgument);
  for (const uint32_t record : {64u, 65u, ~0u}) {
    CHECK(rig.seal({record, 1}) == Done::Stale);
    CHECK(rig.store->abort(rig.owner, {record, 1}) == Done::Stale);
    CHECK(thrown([&] { rig.store->write({record, 1}, 0, {}); }) == Code::InvalidArgument);
    CHECK(thrown([&] { rig.store->mark_layer({record, 1}, 1); }) == Code::InvalidArgument);
    CHECK(thrown([&] { rig.store->read_at({record, 1}, 0, 1); }) == Code::InvalidArgument);
  }
  CHECK_EQ(rig.store->stats().creates, 0u);
  check_empty_after_flush(rig);
}

TEST(a_time_to_live_ends_everywhere_and_its_entries_do_not_pile_up) {
  Rig rig(16 * kMiB, 16);
  auto expire = [&](uint64_t i) { StoreTest::index(*rig.store).record(rig.handle(i).record).expiry_s.store(1); };
  CHECK(rig.put(1, 2, 1000) == Grant::Granted && rig.put(2, 2, 1000) == Grant::Granted && rig.put(3, 2) == Grant::Granted);
  CHECK(rig.resident(1));
  expire(1);
  CHECK(rig.presence(1) == Presence::Missing);
  CHECK(!touch(*rig.store, key(1)));
  CHECK(!rig.store->read(key(1), 0, 1).has_value());
  CHECK(rig.put(1, 2) == Grant::Granted);  // an expired block does not keep its key
  expire(2);
  CHECK(!rig.store->remove(key(2)));
  CHECK_EQ(rig.store->stats().expired, 2u);
  // A second that does not fit is no second in the past.
  CHECK(rig.put(4, 2, ~0u) == Grant::Granted);
  CHECK(rig.resident(4));
  // Blocks with long lives, made and deleted for ever: the heap of ends is bounded by the records.
  for (uint64_t i = 0; i < 5000; ++i) {
    CHECK(rig.put(100 + i, 2, 1000 + static_cast<uint32_t>(i)) == Grant::Granted);
    CHECK(rig.store->remove(key(100 + i)));
    rig.store->settle();
  }
  CHECK(StoreTest::expiries(*rig.store) <= 2 * 16 + 1);
  check_empty_after_flush(rig);
}

TEST(the_clock_ends_a_block_by_itself) {
  Rig rig(16 * kMiB, 16);
  CHECK(rig.put(1, 2, 1) == Grant::Granted && rig.put(2, 2, 3600) == Grant::Granted);
  CHECK(eventually([&] {
    rig.store->tick();
    return rig.store->stats().blocks == 1;
  }));
  CHECK_EQ(rig.store->stats().expired, 1u);
  CHECK(rig.resident(2));
  check_empty_after_flush(rig);
}

TEST(a_draining_store_serves_and_grants_nothing) {
  Rig rig(16 * kMiB, 16);
  CHECK(rig.put(1, 2) == Grant::Granted);
  const Granted open = rig.create(2, 2);
  rig.store->drain(true);
  CHECK(rig.create(3, 2).status == Grant::NoSpace);
  CHECK(rig.create(1, 2).status == Grant::Exists);
  CHECK(rig.seal(open.handle) == Done::Ok);  // what was begun may end
  CHECK(rig.resident(1) && rig.resident(2));
  rig.store->drain(false);
  CHECK(rig.create(3, 2).status == Grant::Granted);
  check_empty_after_flush(rig);
}

TEST(bytes_go_in_and_out_and_not_beside) {
  Rig rig(16 * kMiB, 16);
  const Granted granted = rig.create(1, 9);
  const std::vector<uint8_t> bytes = pattern(8 * kPageBytes, 5);
  rig.store->write(granted.handle, 0, bytes);
  const uint64_t all = 8 * kPageBytes + kLayerAlign;  // layers and checksums
  CHECK(thrown([&] { rig.store->write(granted.handle, all - 1, {bytes.data(), 2}); }) == Code::InvalidArgument);
  CHECK(thrown([&] { rig.store->write(granted.handle, ~0ull, {bytes.data(), 2}); }) == Code::InvalidArgument);
  CHECK(rig.store->read_at(granted.handle, 100, 50) == std::vector<uint8_t>(bytes.begin() + 100, bytes.begin() + 150));
  CHECK(rig.seal(granted.handle) == Done::Ok);
  CHECK(thrown([&] { rig.store->write(granted.handle, 0, bytes); }) == Code::BlockLost);  // immutable
  CHECK(rig.store->read(key(1), 0, ~0ull) == bytes);
  CHECK(rig.store->read(key(1), 8 * kPageBytes, 10)->empty());
  CHECK(thrown([&] { rig.store->read(key(1), 8 * kPageBytes + 1, 1); }) == Code::InvalidArgument);
  rig.store->remove(key(1));
  CHECK(!rig.store->read_at(granted.handle, 0, 1).has_value());
  CHECK_EQ(rig.store->stats().hits, 3u);
  check_empty_after_flush(rig);
}

TEST(layers_are_waited_for_and_a_lost_writer_is_told) {
  Rig rig(16 * kMiB, 16);
  rig.layout = rig.store->register_layout(layout_blob(4, kPageBytes, 8));
  const Granted a = rig.create(1, 2), b = rig.create(2, 2);
  CHECK_EQ(rig.store->wait_layers(a.handle, 1, 0), 0u);
  rig.store->mark_layer(a.handle, 2);
  CHECK_EQ(rig.store->wait_layers(a.handle, 2, 0), 2u);
  CHECK(thrown([&] { rig.store->mark_layer(a.handle, 5); }) == Code::InvalidArgument);
  // Waits of long deadlines: each ends by a wake, or the test takes minutes.
  std::thread sealer([&] {
    rig.store->mark_layer(a.handle, 3);
    rig.seal(a.handle);
    rig.store->abort(rig.owner, b.handle);
  });
  CHECK_EQ(rig.store->wait_layers(a.handle, 4, 60'000), 4u);
  CHECK(thrown([&] { rig.store->wait_layers(b.handle, 1, 60'000); }) == Code::BlockLost);
  sealer.join();
  check_empty_after_flush(rig);
}

// Waits of an hour: each ends by a wake, or the test never does.
constexpr uint64_t kHourUs = 3'600'000'000;
TEST(whichever_of_several_blocks_gets_a_layer_ends_the_wait) {
  Rig rig(16 * kMiB, 16);
  rig.layout = rig.store->register_layout(layout_blob(4, kPageBytes, 8));
  std::vector<Awaited> awaited;
  for (uint64_t i = 1; i <= 3; ++i) awaited.push_back({rig.create(i, 2).handle, 0});
  const auto until = [&](size_t which, auto&& change) {
    std::thread changer(change);
    while (rig.store->layers_now(awaited[which].handle).layers == awaited[which].layers) rig.store->wait_any(awaited, kHourUs);
    awaited[which].layers = rig.store->layers_now(awaited[which].handle).layers;
    changer.join();
  };
  until(1, [&] { rig.store->mark_layer(awaited[1].handle, 2); });
  until(2, [&] { rig.store->mark_layer(awaited[2].handle, 1); });
  until(1, [&] { rig.seal(awaited[1].handle); });
  rig.store->wait_any(awaited, kHourUs);  // one is sealed: there is nothing to wait for
  awaited.erase(awaited.begin() + 1);
  std::thread aborter([&] { rig.store->abort(rig.owner, awaited[0].handle); });
  const auto lost = [&] {
    for (;;) rig.store->wait_any(awaited, kHourUs);
  };
  CHECK(thrown(lost) == Code::BlockLost);
  aborter.join();
  rig.store->abort(rig.owner, awaited[1].handle);
  check_empty_after_flush(rig);
}

TEST(scrub_computes_verifies_and_drops_what_was_flipped) {
  Rig rig(16 * kMiB, 16);
  std::vector<Granted> blocks;
  for (uint64_t i = 0; i < 4; ++i) {
    blocks.push_back(rig.create(i, 4));
    rig.store->write(blocks.back().handle, 0, pattern(3 * kPageBytes, i));
    if (i == 3) {  // its writer left a checksum
      const uint32_t sum = crc32c(pattern(3 * kPageBytes, i).data(), 3 * kPageBytes);
      rig.store->write(blocks.back().handle, 3 * kPageBytes, {reinterpret_cast<const uint8_t*>(&sum), 4});
    }
    CHECK(rig.seal(blocks.back().handle, 0, i == 3) == Done::Ok);
  }
  auto all = [&] {
    ScrubResult sum;
    for (ScrubResult part; !part.done;) {
      part = rig.store->scrub(part.next, kPageBytes);
      sum.verified += part.verified, sum.computed += part.computed, sum.corrupt += part.corrupt;
    }
    return sum;
  };
  ScrubResult first = all();
  CHECK(first.computed == 3 && first.verified == 1 && first.corrupt == 0);
  CHECK(!rig.store->scrub(0, kPageBytes).done);  // another caller's, which stops half way
  ScrubResult second = all();
  CHECK(second.computed == 0 && second.verified == 4 && second.corrupt == 0);
  const uint8_t flipped = static_cast<uint8_t>(pattern(3 * kPageBytes, 2)[777] ^ 4);
  CHECK(::pwrite(rig.segments.pool.get(), &flipped, 1, static_cast<off_t>(blocks[2].extent.offset + 777)) == 1);
  ScrubResult third = all();
  CHECK(third.verified == 4 && third.corrupt == 1);
  CHECK(rig.presence(2) == Presence::Missing);
  CHECK(rig.resident(1) && rig.resident(3));
  CHECK_EQ(rig.store->stats().corrupt, 1u);
  check_empty_after_flush(rig);
}

// A read in flight holds its block like a pin. Fails if each_pin passes over the daemon's own reads.
TEST(a_reading_daemon_holds_the_block) {
  Rig rig(256 * kMiB, 16);
  for (int round = 0; round < 20; ++round) {
    const Granted granted = rig.create(1, 2049);
    std::atomic<bool> reading{false};
    rig.store->write(granted.handle, 0, pattern(1000, 1));
    CHECK(rig.seal(granted.handle) == Done::Ok);
    std::thread reader([&] {
      reading = true;
      const auto bytes = rig.store->read(key(1), 0, ~0ull);
      if (bytes) CHECK(std::equal(bytes->begin(), bytes->begin() + 1000, pattern(1000, 1).begin()));
    });
    CHECK(eventually([&] { return reading.load(); }));
    rig.store->remove(key(1));
    rig.store->settle();
    const Granted next = rig.create(2, 2049);  // the same memory, if it was free
    rig.store->write(next.handle, 0, pattern(1000, 2));
    CHECK(rig.store->abort(rig.owner, next.handle) == Done::Ok);
    reader.join();
    rig.store->settle();
    rig.store->check_integrity();
  }
  check_empty_after_flush(rig);
}

TEST(truncated_memory_fences_one_namespace_and_ends_no_process) {
  Rig progress(16 * kMiB, 2048), pool(16 * kMiB, 64), page(16 * kMiB, 64), well(16 * kMiB, 64);
  CHECK(::ftruncate(progress.segments.progress.get(), 0) == 0);
  CHECK(progress.create(1, 2).status == Grant::Granted);  // met in the middle of an operation, which ends
  CHECK(thrown([&] { progress.create(2, 2); }) == Code::Fenced);
  CHECK(thrown([&] { progress.store->lookup(key(1)); }) == Code::Fenced);
  CHECK_EQ(progress.store->stats().fenced, 1u);
  CHECK(progress.store->problem().find("progress") != std::string::npos);

  const Granted granted = pool.create(1, 2);
  CHECK(::ftruncate(pool.segments.pool.get(), 0) == 0);
  CHECK(thrown([&] { pool.store->write(granted.handle, 0, pattern(8, 1)); }) == Code::Fenced);
  CHECK(thrown([&] { pool.create(2, 2); }) == Code::Fenced);
  CHECK(pool.store->problem().find("pool") != std::string::npos);

  Page client(*page.store, 2048);
  const Granted unsealed = page.create(1, 2, client.id);
  for (const auto& entry : std::filesystem::directory_iterator(page.segments.directory))
    std::filesystem::resize_file(entry.path(), 0);
  page.store->tick();
  page.store->tick();
  CHECK(page.seal(unsealed.handle, client.id) == Done::Stale);  // its session ended
  CHECK_EQ(page.store->stats().quarantined, 1u);                // and may still write
  CHECK(page.put(2, 2) == Grant::Granted);                      // the others are served
  CHECK_EQ(page.store->stats().fenced, 0u);
  client.unmap();
  page.store->tick();
  CHECK_EQ(page.store->stats().quarantined, 0u);

  CHECK(well.put(1, 2) == Grant::Granted);
  CHECK(well.resident(1));
}
