// Who is at the other end: both prove that they know the namespace's salt, by a keyed digest of what was said; the salt itself
// is not sent. Names no store and keeps no state.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "core/peer/channel.h"

namespace kv::peer {

using Secret = std::array<uint8_t, 32>;

inline constexpr int kHandshakeMs = 1000;  // for each step of it

Secret hmac_sha256(const Secret& key, std::span<const uint8_t> message);

// As the one that connects. Returns the version that is spoken. Throws Broken if the other is not that node, or has another salt.
uint32_t introduce(Channel& channel, const std::string& node, const std::string& space, const Secret& salt,
                   const std::string& expected_node);

// As the one that was called. `secret_of(space, node)` is the salt of a namespace that is shared with that node, if there is
// one. Returns the namespace's name. Throws Broken for a stranger, who learns nothing from how.
std::string admit(Channel& channel, const std::string& node,
                  const std::function<std::optional<Secret>(const std::string& space, const std::string& node)>& secret_of);

}  // namespace kv::peer
