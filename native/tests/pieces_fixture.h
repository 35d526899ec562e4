// A region, and blocks published out of it in pieces of a page, by a session without a client. Asserts nothing.
#pragma once

#include <unistd.h>

#include <map>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/store_fixture.h"

namespace kv::test {

inline constexpr uint64_t kMiB = 1 << 20;
inline constexpr uint64_t kRegion = 77;

struct PiecesRig {
  explicit PiecesRig(uint64_t capacity = 16 * kMiB, uint32_t max_blocks = 256, uint32_t pages = 400, bool disk = false)
      : rig(capacity, max_blocks, disk) {
    region = make(pages, client.id, kRegion);
    KV_INVARIANT(region.status == Grant::Granted);
  }
  Granted make(uint32_t pages, uint32_t by, uint64_t number) {
    const CreateItem item{.key = key(1'000'000 + number), .fingerprint = number, .tokens = 1, .region_pages = pages};
    return rig.store->create({.owner = by, .layout = region_layout(), .items = {&item, 1}})[0];
  }
  uint32_t region_layout() { return rig.store->register_layout(layout_blob(1, 1, 1)); }
  // A piece of each page of the region named, in that order.
  Publish wanted(uint64_t number, const std::vector<uint32_t>& pages, std::vector<uint32_t> sums = {}) {
    Publish out{{.key = key(number), .tokens = static_cast<uint32_t>(pages.size())}, 0, !sums.empty(), {}, std::move(sums)};
    for (const uint32_t page : pages) out.pieces.push_back({region.extent.offset + page * kPageBytes, kPageBytes});
    return out;
  }
  RegionChange publish(const Publish& item, uint32_t by = 0) {
    return rig.store->publish({.owner = by ? by : client.id, .layout = rig.layout, .items = {}}, {&item, 1})[0];
  }
  Grant put(uint64_t number, const std::vector<uint32_t>& pages) {
    const RegionChange said = publish(wanted(number, pages));
    rig.store->check_integrity();
    return static_cast<Grant>(said.status);
  }
  Back take_back(Handle block, uint64_t number = kRegion) {
    const TakeBack item{block, number};
    const RegionChange said = rig.store->take_back(client.id, region_layout(), {&item, 1})[0];
    rig.store->check_integrity();
    return static_cast<Back>(said.status);
  }
  void fill(uint32_t page, char letter) {
    const std::string bytes(kPageBytes, letter);
    KV_INVARIANT(::pwrite(rig.segments.pool.get(), bytes.data(), bytes.size(),
                          static_cast<off_t>(region.extent.offset + page * kPageBytes)) == static_cast<ssize_t>(kPageBytes));
  }
  Extent extent(uint64_t number) { return rig.store->lookup(key(number)).snapshot.extent; }
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
  Granted region;
};

inline std::vector<uint32_t> apart(uint32_t from, uint32_t count, uint32_t step = 3) {  // backwards
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < count; ++i) out.push_back(from + (count - 1 - i) * step);
  return out;
}

}  // namespace kv::test
