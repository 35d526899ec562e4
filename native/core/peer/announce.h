// What a store holds, told to one peer over a connection of its own: first all, then each change, a few milliseconds behind at
// most; and what it is pushed, if it takes that. Reads the store's journal; waits for nobody but that peer.
#pragma once

#include "core/peer/channel.h"
#include "core/store/store.h"

namespace kv::peer {

inline constexpr int kHoldsMs = 5000;  // without a change, until a sign of life

// Until `over`, which who sets it follows by a wake() of the journal. `taker`: the peer's node; "" for one that takes nothing.
// Throws Broken when the other end is gone.
void announce(Store& store, Channel& channel, uint32_t request, const std::string& taker, const std::atomic<bool>& over);

}  // namespace kv::peer
