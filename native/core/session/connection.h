// A client's socket and what goes over it. Owns the descriptors; knows no namespace. The door's (session_server.h) until it
// attaches, then its namespace's thread's (session_thread.h): one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/format/protocol.h"
#include "core/format/segment.h"
#include "core/format/store_types.h"
#include "core/session/mailbox.h"
#include "core/session/seats.h"
#include "core/session/session_access.h"
#include "core/session/session_tokens.h"

namespace kv {

struct Connection {
  Fd socket;
  Fd process;  // pidfd
  Credentials who;
  uint64_t since_ms = 0;
  bool attached = false;
  uint32_t session = 0, protocol = 0;
  bool read_only = false;
  std::optional<Tokens::Token> token;
  std::vector<Handle> kept;  // of a list that takes several messages
  std::unique_ptr<DaemonMailbox> mailbox;
  Seats::Seat seat;  // the last: given back first
};

// Wakes whoever waits on `epoll` when `fd` can be read.
void watch(int epoll, int fd);
// No longer, and by hand: a descriptor that a forked child still holds would go on waking under a number that is another's by
// then.
void unwatch(int epoll, const Connection& connection);
// The next message, in `buffer`. None: none had come. Empty: the peer is gone, or sent more than a message may have.
std::optional<std::span<const uint8_t>> receive(int socket, std::vector<uint8_t>& buffer);
// An answer, with up to four descriptors. False if the client does not read.
bool send_reply(int socket, const protocol::Reply& reply, std::span<const uint8_t> body, std::span<const int> descriptors = {});
// What an error says, as the body of its answer.
uint16_t status_of(const Error& error);
std::span<const uint8_t> text_of(const Error& error);
double cpu_of(const std::thread& thread);         // seconds; 0: it does not run
void need_few(const protocol::Request& request);  // throws InvalidArgument

}  // namespace kv
