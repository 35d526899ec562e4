// The answer to one Fetch: each block's head, then its layers as they become ready, in order. Blocks of one answer take turns, so
// that one whose writer still computes holds up no other; what lies on this host's disk is loaded first. Holds the blocks against
// reuse while it sends.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <list>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "core/base/processor.h"
#include "core/peer/channel.h"
#include "core/placement/policy.h"
#include "core/store/pool_window.h"

namespace kv::peer {

// Checksums that were computed for a first reader of blocks whose writers left none, until all of a block's layers have theirs:
// then they are the block's, and the next reader costs no second pass over the bytes. A block may go in two halves, over two
// connections at once. A hint and nothing more: what is forgotten is computed again.
class ServedSums {
 public:
  // Those of the layers from `first` on. All of the block's, once all of its `layers` are there; else none.
  std::vector<uint32_t> add(Handle block, uint32_t layers, uint32_t first, std::span<const uint32_t> sums) {
    if (first == 0 && sums.size() == layers) return {sums.begin(), sums.end()};
    const std::lock_guard lock(mutex_);
    const auto same = [&](const Half& half) { return half.block == block; };
    const auto other = std::find_if(halves_.begin(), halves_.end(), same);
    if (other == halves_.end()) {
      if (halves_.size() == kHalves) halves_.pop_front();
      halves_.push_back({block, first, {sums.begin(), sums.end()}});
      return {};
    }
    const auto& [begin, end] = std::minmax(other->first, first);
    std::vector<uint32_t> all = other->first == begin ? other->sums : std::vector<uint32_t>(sums.begin(), sums.end());
    const bool fits = begin == 0 && all.size() == end && other->sums.size() + sums.size() == layers;
    const std::span<const uint32_t> rest = other->first == begin ? sums : std::span<const uint32_t>(other->sums);
    all.insert(all.end(), rest.begin(), rest.end());
    halves_.erase(other);
    return fits ? all : std::vector<uint32_t>{};
  }

 private:
  static constexpr size_t kHalves = 64;  // that wait for their other halves
  struct Half {
    Handle block;
    uint32_t first;
    std::vector<uint32_t> sums;
  };
  std::mutex mutex_;  // guards what follows
  std::deque<Half> halves_;
};

class BlockSender {
 public:
  // `node`: who is at the other end.
  BlockSender(Store& store, const Window& window, Admission& admission, ServedSums& sums, Channel& channel, std::string node)
      : store_(store), window_(window), admission_(admission), sums_(sums), channel_(channel), node_(std::move(node)) {}

  struct Sent {
    uint64_t blocks = 0, bytes = 0;
  };
  // `from`: layers before it are there already: of these the checksums are sent. `half`: as Fetch has
  // it. Throws Broken if the other end does not take it in time.
  Sent answer(uint32_t request, std::span<const Key> keys, uint32_t from = 0, bool half = false);

 private:
  struct Block;

  void begin(Block& block);
  void keep_apart(const std::list<Block>& blocks);
  void tell_layout(const Block& block);
  bool load(Block& block);
  static bool has_time(uint64_t& until_ms);
  bool has_no_more(const Block& block) const;
  bool is_second() const { return from_ && half_; }  // half of a block whose first goes to the same host
  uint32_t end_of(const Block& block) const;
  void miss(Block& block);
  void refer(Block& block, const std::vector<std::string>& instead);
  void wait_for_more(const std::list<Block>& blocks);
  bool advance(Block& block);
  bool send_ready(Block& block);
  uint32_t sum_of(std::span<const std::byte> bytes) const;
  std::span<const std::byte> gather(const ReadJob& job, uint64_t offset, uint64_t length);
  void check_pool() const;
  void send_meta(Block& block);
  void send_layer(Block& block, uint32_t layer);
  void keep_sums(const Block& block);
  Frame frame(Kind kind, const Block& block) const;

  Store& store_;
  const Window& window_;
  std::vector<std::byte> gathered_;  // a layer of a block in pieces
  Admission& admission_;
  ServedSums& sums_;
  Channel& channel_;
  const std::string node_;
  Apart apart_;
  uint32_t request_ = 0, from_ = 0;
  bool half_ = false;
  bool crowded_ = false;  // peers hold as much as they may, as one of this pass was told
  Sent sent_;
  std::set<std::array<uint64_t, 4>> told_;  // layouts that the other end has been told on this connection, and remembers
};

}  // namespace kv::peer
