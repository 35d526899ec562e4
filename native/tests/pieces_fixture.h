// A region, and blocks published out of it in pieces of a page, by a session without a client. Asserts nothing.
#pragma once

#include <unistd.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/store_fixture.h"

namespace kv::test {

inline constexpr uint64_t kMiB = 1 << 20;
inline constexpr uint64_t kRegion = 77;
inline constexpr uint32_t kBehind = 64;  // pages for what stands behind the layers of as many blocks

struct PiecesRig {
  explicit PiecesRig(uint64_t capacity = 16 * kMiB, uint32_t max_blocks = 1024, uint32_t pages = 400, bool disk = false)
      : rig(capacity, max_blocks, disk) {
    region = make(pages, client.id, kRegion);
    behind = make(kBehind, client.id, kRegion);
    KV_INVARIANT(region.status == Grant::Granted && behind.status == Grant::Granted);
    for (uint32_t i = kBehind; i-- > 0;) free_behind.push_back(behind.extent.offset + i * kPageBytes);
    open = {region.handle.record, behind.handle.record};
  }
  Granted make(uint32_t pages, uint32_t by, uint64_t number) {
    const CreateItem item{.key = key(++keys), .fingerprint = number, .tokens = 1, .region_pages = pages};
    return rig.store->create({.owner = by, .layout = region_layout(), .items = {&item, 1}})[0];
  }
  uint32_t region_layout() { return rig.store->register_layout(layout_blob(1, 1, 1)); }
  Extent page(uint32_t number) const { return {region.extent.offset + number * kPageBytes, kPageBytes}; }
  // A piece for each page of the region named, in that order, and for what stands behind them.
  Publish wanted(uint64_t number, const std::vector<uint32_t>& pages, bool checksummed = false) {
    Publish out{{.key = key(number), .tokens = static_cast<uint32_t>(pages.size())}, 0, key(keys += 5000), checksummed};
    for (const uint32_t at : pages) out.pieces.push_back(page(at));
    out.pieces.push_back({free_behind.back(), kPageBytes});
    return out;
  }
  RegionChange publish(const Publish& item, uint32_t by = 0) {
    const RegionChange said = rig.store->publish(
        {.owner = by ? by : client.id, .layout = rig.layout, .priority = priority, .items = {}}, {&item, 1})[0];
    note(said);
    if (said.status == static_cast<uint8_t>(Grant::Granted))
      places[said.block.record] = free_behind.back(), free_behind.pop_back();
    return said;
  }
  Grant put(uint64_t number, const std::vector<uint32_t>& pages) {
    const RegionChange said = publish(wanted(number, pages));
    rig.store->check_integrity();
    return static_cast<Grant>(said.status);
  }
  Back take_back(Handle block) {
    const TakeBack item{block, key(keys += 5000), kRegion};
    const RegionChange said = rig.store->take_back(client.id, region_layout(), {&item, 1})[0];
    note(said);
    rig.store->check_integrity();
    if (said.status == static_cast<uint8_t>(Back::Taken))
      free_behind.push_back(places.at(block.record)), places.erase(block.record);
    return static_cast<Back>(said.status);
  }
  // What its client would know of the parts that are still to be written.
  void note(const RegionChange& said) {
    for (const Handle& part : said.opened) KV_INVARIANT(open.insert(part.record).second);
    for (const Handle& part : said.ended) KV_INVARIANT(open.erase(part.record) == 1);
    const Stats now = rig.store->stats();
    KV_INVARIANT(open.size() == now.created + now.quarantined);
  }
  void fill(uint64_t offset, const std::string& bytes) {
    KV_INVARIANT(::pwrite(rig.segments.pool.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset)) ==
                 static_cast<ssize_t>(bytes.size()));
  }
  void fill(uint32_t number, char letter) { fill(page(number).offset, std::string(kPageBytes, letter)); }
  Extent extent(uint64_t number) { return rig.store->lookup(key(number)).snapshot.extent; }
  std::vector<Extent> pieces(uint64_t number) {
    return StoreTest::index(*rig.store).pieces(extent(number), rig.segments.capacity);
  }
  uint64_t used() { return rig.store->stats().used_bytes; }
  void end() {
    client.unmap();
    rig.store->end_session(client.id);
    rig.store->tick();
  }
  void nothing_is_left() {
    rig.store->flush();
    rig.store->tick();
    rig.store->check_integrity();
    CHECK_EQ(used(), 0u);
    CHECK_EQ(rig.store->stats().blocks, 0u);
  }

  Rig rig;
  Page client{*rig.store, 256};
  Granted region, behind;
  uint64_t keys = 1'000'000;
  uint32_t priority = kDefaultPriority;
  std::vector<uint64_t> free_behind;
  std::map<uint32_t, uint64_t> places;  // by record, where what stands behind a block lies
  std::set<uint32_t> open;
};

inline std::vector<uint32_t> apart(uint32_t from, uint32_t count, uint32_t step = 3) {  // backwards
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < count; ++i) out.push_back(from + (count - 1 - i) * step);
  return out;
}

}  // namespace kv::test
