// holds: for how long one operation keeps the store's lock, and what it costs in all. `python -m bench.crowd --holds` runs it.
//
//   holds BLOCKS SESSIONS
//
// A full pool of BLOCKS blocks of 4 KiB. Holds are counted in processor time of the thread that has the lock, so that an idle
// machine is not needed; a slice ends where whoever waits would have the lock. Prints a line of JSON for each case: the longest
// hold in µs, how many were over 500 (a virtual processor that its host takes away counts as a hold, one of thousands), the whole
// in ms.
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

uint64_t cpu_ns() {
  timespec now;
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

struct House {
  House(uint64_t count, uint32_t session_count)
      : segments(count * kPageBytes, static_cast<uint32_t>(count + count / 8)),
        store(segments.open()),
        blocks(count),
        sessions(session_count) {
    start();
    KV_INVARIANT(eventually([&] { return store->header().frontier.load() == segments.capacity; }));
  }
  void start() {
    layout = store->register_layout(layout_blob(1, 1, 3072));
    owner = store->open_owner();
  }
  template <class F>
  void measure(const char* name, F&& operation) {
    StoreTest::forget_holds(*store);
    const uint64_t begin = cpu_ns();
    operation();
    const double all_ms = static_cast<double>(cpu_ns() - begin) * 1e-6;
    const SlicedMutex::Holds holds = StoreTest::holds(*store);
    std::printf("{\"case\": \"%s\", \"blocks\": %lu, \"longest_hold_us\": %.1f, \"holds_over_500_us\": %lu, \"all_ms\": %.2f}\n",
                name, blocks, static_cast<double>(holds.longest_ns) * 1e-3, holds.count_over, all_ms);
    std::fflush(stdout);
  }
  Grant put(uint32_t ttl_s = 0) {
    const CreateItem item{.key = key(next++), .tokens = 3072};
    const Granted granted = store->create({.owner = owner, .layout = layout, .ttl_s = ttl_s, .items = {&item, 1}})[0];
    const Seal block{granted.handle};
    if (granted.status == Grant::Granted) store->seal(owner, {&block, 1});
    return granted.status;
  }
  void fill(uint32_t ttl_s = 0) {
    for (uint64_t i = 0; i < blocks; ++i) KV_INVARIANT(put(ttl_s) == Grant::Granted);
  }
  // As many as one message has.
  void batches() {
    std::vector<Key> keys;
    for (uint64_t i = 0; i < kMaxKeysPerMessage; ++i) keys.push_back(key(next - 1 - mixed(i) % blocks));
    measure("20 touches of 1,024 blocks", [&] {
      for (int i = 0; i < 20; ++i) store->touch(keys);
    });
    std::vector<std::vector<Seal>> seals;
    measure("20 creates of 1,024 blocks", [&] {
      for (int i = 0; i < 20; ++i) {
        std::vector<CreateItem> items;
        for (uint64_t k = 0; k < kMaxKeysPerMessage; ++k) items.push_back({.key = key(next++), .tokens = 3072});
        auto& sealed = seals.emplace_back();
        for (const Granted& granted : store->create({.owner = owner, .layout = layout, .items = items}))
          if (granted.status == Grant::Granted) sealed.push_back({granted.handle});
        store->finish_claims();
      }
    });
    measure("20 seals of 1,024 blocks", [&] {
      for (const auto& sealed : seals) store->seal(owner, sealed), store->make_room_ahead();
    });
  }
  // Every block pinned, by one client.
  std::unique_ptr<Page> pin_all() {
    auto page = std::make_unique<Page>(*store, static_cast<uint32_t>(blocks));
    store->allow_pins(page->id, static_cast<uint32_t>(blocks), PinAllowance::kAnyPages);
    for (uint64_t back = 1; back <= blocks; ++back) {
      const Snapshot at = store->lookup(key(next - back)).snapshot;
      KV_INVARIANT(page->pin({at.record, at.control.generation()}) != PinBoard::kNoSlot);
    }
    return page;
  }

  Segments segments;
  std::unique_ptr<Store> store;
  uint64_t blocks, next = 0;
  uint32_t sessions, layout = 0, owner = 0;
};

// A region of 512 MiB, and blocks in it of so many pieces of a page each that lie apart, as many at once as a message has.
void blocks_in(uint32_t pieces) {
  constexpr uint32_t pages = 1 << 17;
  const uint32_t count = pages / 2 / pieces, at_once = protocol::kMaxPiecesPerMessage / (pieces + 1);
  const std::string such = std::to_string(count) + " blocks of " + std::to_string(pieces) + " pieces ";
  House house(2 * pages, 0);
  Store& store = *house.store;
  const uint32_t layout = store.register_layout(layout_blob(1, kPageBytes, pieces));
  const uint32_t page = store.register_layout(layout_blob(1, 1, 1));
  auto owner = std::make_unique<Page>(store, 2 * count);
  uint64_t next_key = 1'000'000;
  const auto run = [&](uint32_t length) {
    const CreateItem item{.key = key(++next_key), .fingerprint = 7, .tokens = 1, .region_pages = length};
    const Granted granted = store.create({.owner = owner->id, .layout = page, .items = {&item, 1}})[0];
    KV_INVARIANT(granted.status == Grant::Granted);
    return granted.extent.offset;
  };
  const uint64_t region = run(pages), behind = run(count);
  std::vector<Publish> blocks;
  for (uint32_t i = 0; i < count; ++i) {
    Publish& block = blocks.emplace_back(Publish{{.key = key(100 + i), .tokens = pieces}, 0, key(++next_key), false});
    for (uint64_t piece = 0; piece < pieces; ++piece)
      block.pieces.push_back({region + 2 * (piece * count + i) * kPageBytes, kPageBytes});
    block.pieces.push_back({behind + i * kPageBytes, kPageBytes});
  }
  std::vector<TakeBack> back;
  const auto publish = [&] {
    back.clear();
    for (Publish& block : blocks) block.rest = key(++next_key);
    for (uint32_t first = 0; first < count; first += at_once)
      for (const RegionChange& change : store.publish({.owner = owner->id, .layout = layout, .items = {}},
                                                      std::span(blocks).subspan(first, std::min(at_once, count - first)))) {
        KV_INVARIANT(change.status == static_cast<uint8_t>(Grant::Granted));
        back.push_back({change.block, key(++next_key), 7});
      }
  };
  house.measure((such + "published").c_str(), publish);
  house.measure((such + "taken back").c_str(), [&] {
    for (uint32_t first = 0; first < count; first += at_once)
      for (const RegionChange& change :
           store.take_back(owner->id, page, std::span(back).subspan(first, std::min(at_once, count - first))))
        KV_INVARIANT(change.status == static_cast<uint8_t>(Back::Taken));
  });
  publish();
  house.measure((such + "adopted, and their region").c_str(), [&] {
    house.store.reset();
    house.store = house.segments.open(true);
  });
  house.store->check_integrity();
  owner->unmap();
  house.measure((such + "whose owner ends").c_str(), [&] { house.store->tick(); });
  house.measure((such + "flushed").c_str(), [&] { house.store->flush(), house.store->settle(); });
  KV_INVARIANT(house.store->stats().used_bytes == 0);
}

}  // namespace

int main(int argc, char** argv) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  SlicedMutex::clock = cpu_ns;
  House house(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 65536,
              argc > 2 ? static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10)) : 200);
  house.measure("create, one at a time", [&] { house.fill(); });
  house.measure("look-up of 64, by message", [&] {
    for (uint64_t i = 0; i < 1000 * 64; ++i) house.store->lookup(key(mixed(i) % house.next));
  });
  house.measure("adopt", [&] {
    house.store.reset();
    house.store = house.segments.open(true);
    house.start();
  });
  {
    auto page = house.pin_all();
    house.measure("the first create that finds every block pinned", [&] { KV_INVARIANT(house.put() == Grant::NoSpace); });
    house.measure("100 refused creates after it", [&] {
      for (int i = 0; i < 100; ++i) KV_INVARIANT(house.put() == Grant::NoSpace);
    });
    page->unmap(), house.store->end_session(page->id);
    house.measure("a tick that finds them free", [&] { house.store->tick(); });
  }
  house.measure("flush", [&] { house.store->flush(); });
  house.store->settle();
  house.fill(1);
  const uint64_t until = monotonic_ns() + 3'000'000'000;
  eventually([&] { return monotonic_ns() > until; });
  house.measure("mass expiry", [&] { house.store->tick(); });
  {
    std::vector<std::unique_ptr<Page>> pages;
    for (uint32_t i = 0; i < house.sessions; ++i) pages.push_back(std::make_unique<Page>(*house.store, 64));
    for (auto& page : pages) house.store->end_session(page->id);
    house.measure("a create beside sessions that ended and are still mapped", [&] { house.put(); });
    pages.clear();
    house.measure("a tick that reaps them", [&] { house.store->tick(); });
  }
  house.fill();
  house.batches();
  blocks_in(64), blocks_in(1024);
  return 0;
}
