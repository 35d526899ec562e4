// The way to the daemon's session socket. Owns what a client is told where it does not get there; never sends a message.
#pragma once

#include <string>

#include "core/format/segment.h"

namespace kv {

// A socket whose calls wait so many seconds at most. Throws Unavailable where no daemon is, and NotPermitted where anybody could
// have made its directory or socket first (in /tmp, where it is neither this user's nor root's: blocks would be read from whoever
// did), and where it is closed to this user and stays so for half a second, as one is that is about to be opened, unless the
// daemon is `known`: then it is one that starts, and tried again like any that is away.
Fd connect_to(const std::string& path, double timeout_s, bool known);

}  // namespace kv
