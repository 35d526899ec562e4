// Who may attach to which namespace, from what the kernel says of the peer of a socket. Pure but for the two getsockopt calls.
//
// Trusted everywhere: root and the daemon's own user. An unmapped user or group (65534) matches no list: it is nobody in
// particular.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace kv {

inline constexpr uint32_t kUnmappedId = 65534;

enum class Right : uint8_t { None, Read, Write };

struct Principals {
  std::vector<uint32_t> users, groups;
};

// What the configuration says of a namespace beyond its memory. Who may write may read.
struct Tenant {
  Principals readers, writers;
  std::array<uint8_t, 32> salt{};  // zeros: none
};

struct Credentials {
  uint32_t pid = 0, uid = kUnmappedId;
  std::vector<uint32_t> groups;  // the primary one and the supplementary ones
};

// As they were when the peer connected; nothing if the kernel does not say.
std::optional<Credentials> credentials_of(int socket);

Right right_of(const Credentials& who, const Tenant& tenant, uint32_t owner);

}  // namespace kv
