// The answer to one Fetch: each block's head, then its layers as they become ready, in order. Blocks of one answer take turns, so
// that one whose writer still computes holds up no other. Holds the blocks against reuse while it sends.
#pragma once

#include <array>
#include <list>
#include <set>
#include <vector>

#include "core/peer/channel.h"
#include "core/peer/window.h"

namespace kv::peer {

class BlockSender {
 public:
  BlockSender(Store& store, const Window& window, Channel& channel) : store_(store), window_(window), channel_(channel) {}

  struct Sent {
    uint64_t blocks = 0, bytes = 0;
  };
  // Throws Broken if the other end does not take it in time.
  Sent answer(uint32_t request, std::span<const Key> keys);

 private:
  struct Block;

  void begin(Block& block, const Key& key);
  bool advance(Block& block);
  void send_meta(Block& block);
  void send_layer(Block& block, uint32_t layer);
  Frame frame(Kind kind, const Block& block) const;

  Store& store_;
  const Window& window_;
  Channel& channel_;
  uint32_t request_ = 0;
  Sent sent_;
  std::set<std::array<uint64_t, 4>> told_;  // layouts that the other end has been told on this connection
};

}  // namespace kv::peer
