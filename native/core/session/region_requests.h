// The messages about regions: blocks sealed where they lie, and given back. A session thread's, which has looked who asks.
#pragma once

#include <cstdint>
#include <vector>

#include "core/format/protocol.h"
#include "core/store/store.h"

namespace kv {

void need_end(const protocol::Reader& body);  // throws InvalidArgument: more follows than the count says, or less did

// Each throws InvalidArgument for a message that is none, and what the store throws. `body`: behind the Request.
std::vector<uint8_t> publish(Store& store, uint32_t session, uint32_t count, protocol::Reader body);
std::vector<uint8_t> publish_pieces(Store& store, uint32_t session, uint32_t count, protocol::Reader body);
std::vector<uint8_t> take_back(Store& store, uint32_t session, protocol::Op op, uint32_t count, protocol::Reader body);

}  // namespace kv
