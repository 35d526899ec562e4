#include "core/session/session_access.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace kv {
namespace {

bool has(const std::vector<uint32_t>& list, uint32_t id) {
  return id != kUnmappedId && std::find(list.begin(), list.end(), id) != list.end();
}

bool named_in(const Principals& list, const Credentials& who) {
  return has(list.users, who.uid) ||
         std::any_of(who.groups.begin(), who.groups.end(), [&](uint32_t group) { return has(list.groups, group); });
}

}  // namespace

std::optional<Credentials> credentials_of(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return std::nullopt;
  Credentials who{static_cast<uint32_t>(peer.pid), peer.uid, {}};
  who.groups.resize(32);
  for (;;) {
    length = static_cast<socklen_t>(who.groups.size() * sizeof(gid_t));
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, who.groups.data(), &length) == 0) break;
    if (errno != ERANGE) return std::nullopt;
    who.groups.resize(length / sizeof(gid_t));  // the kernel's own limit is 65,536 groups
  }
  who.groups.resize(length / sizeof(gid_t));
  who.groups.push_back(peer.gid);
  return who;
}

Right right_of(const Credentials& who, const Tenant& tenant, uint32_t owner) {
  // A daemon that itself runs as the unmapped user names nobody else, and its socket is closed to all but that user.
  if (who.uid == 0 || who.uid == owner) return Right::Write;
  if (who.uid == kUnmappedId) return Right::None;  // whatever its groups
  if (named_in(tenant.writers, who)) return Right::Write;
  return named_in(tenant.readers, who) ? Right::Read : Right::None;
}

}  // namespace kv
