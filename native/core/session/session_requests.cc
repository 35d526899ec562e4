// What a session's requests mean: decode, call the store, encode. No policy of its own.

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/session/region_requests.h"
#include "core/session/session_thread.h"

namespace kv {
namespace {

using protocol::append;
using protocol::Op;

// A description of the same file without the right to write.
Fd read_only_copy(int fd) {
  Fd copy(::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC));
  if (!copy) throw Error(Code::Unavailable, errno_text("opening a segment read-only"));
  return copy;
}

std::vector<uint8_t> seal_all(Store& store, uint32_t session, const std::vector<protocol::BlockItem>& items) {
  std::vector<Seal> blocks;
  for (const auto& item : items) blocks.push_back({{item.record, item.generation}, item.checksummed != 0});
  std::vector<uint8_t> out;
  for (const Done done : store.seal(session, blocks)) out.push_back(static_cast<uint8_t>(done));
  return out;
}

std::vector<uint8_t> seal_or_abort(Store& store, uint32_t session, bool seal, uint32_t count, protocol::Reader body) {
  const auto items = body.take<protocol::BlockItem>(count);
  need_end(body);
  if (seal) return seal_all(store, session, items);
  std::vector<uint8_t> out;
  for (const auto& item : items) out.push_back(static_cast<uint8_t>(store.abort(session, {item.record, item.generation})));
  store.settle();
  return out;
}

// Who cannot read it misses it: told so, nobody waits for it.
bool cannot_read(const Connection& to, const Found& found) {
  return to.protocol < protocol::kVersionPieces && found.presence == Presence::Resident && found.snapshot.extent.in_pieces();
}

std::vector<uint8_t> look_up(Store& store, const Connection& from, const std::vector<Key>& keys) {
  std::vector<uint8_t> out;
  for (const Key& key : keys) {
    Found found = store.lookup(key);
    if (cannot_read(from, found)) found = {};
    append(out, protocol::LookUpItem{static_cast<uint32_t>(found.presence), found.snapshot.record, found.snapshot.control.word,
                                     found.snapshot.extent.pack(), found.snapshot.shape.pack()});
  }
  return out;
}

std::vector<uint8_t> by_key(Store& store, const Connection& from, Op op, const std::vector<Key>& keys) {
  if (op == Op::LookUp) return look_up(store, from, keys);
  std::vector<uint8_t> out;
  if (op == Op::Elsewhere) {
    const Fetcher* peers = store.peers();
    for (const Key& key : keys) out.push_back(peers && peers->known(key));
    return out;
  }
  if (op == Op::Touch) {
    const std::vector<bool> touched = store.touch(keys);
    return {touched.begin(), touched.end()};
  }
  for (const Key& key : keys) out.push_back(op == Op::Delete ? store.remove(key) : store.drop_if_corrupt(key));
  store.settle();
  return out;
}

std::vector<uint8_t> pin_terms(Store& store, uint32_t session, protocol::Reader body) {
  const auto terms = body.take<protocol::PinsOnTerms>();
  need_end(body);
  if (terms.owner > static_cast<uint32_t>(PinOwner::Engine))
    throw Error(Code::InvalidArgument, "owner is " + std::to_string(terms.owner) + ", a session's is 0 (client) or 1 (engine)");
  store.set_pin_terms(session, {static_cast<PinOwner>(terms.owner), terms.deadline_ms, terms.bytes});
  return {};
}

std::vector<uint8_t> device(Store& store, uint32_t session, protocol::Reader body) {
  const auto memory = body.take<protocol::DeviceMemory>();
  need_end(body);
  store.give_to_device(session, memory.writes != 0);
  return {};
}

std::string node_of(const protocol::PushHead& head) { return {head.node, ::strnlen(head.node, sizeof head.node - 1)}; }

std::vector<uint8_t> push(Store& store, uint32_t count, protocol::Reader body) {
  const auto head = body.take<protocol::PushHead>();
  const auto keys = body.take<Key>(count);
  need_end(body);
  std::vector<uint8_t> out;
  append(out, static_cast<uint32_t>(store.push(node_of(head), keys)));
  return out;
}

std::vector<uint8_t> promote(Store& store, const Connection& from, Op op, uint32_t count, protocol::Reader body) {
  const auto head = body.take<protocol::PromoteHead>();
  const std::string first = op == Op::PromoteFrom ? node_of(body.take<protocol::PushHead>()) : "";
  const auto keys = body.take<Key>(count);
  need_end(body);
  if (head.priority > kMaxPriority)
    throw Error(Code::InvalidArgument,
                "priority is " + std::to_string(head.priority) + ", the limit is " + std::to_string(kMaxPriority));
  Wanting wanting = Wanting::of(from.session, head.wanted_ms);
  if (const Fetcher* peers = store.peers(); peers && !first.empty()) wanting.first = peers->named(first);
  std::vector<Presence> there = store.promote(keys, head.priority, wanting);
  for (size_t i = 0; i < keys.size() && from.protocol < protocol::kVersionPieces; ++i)
    if (cannot_read(from, store.lookup(keys[i]))) there[i] = Presence::Missing;
  std::vector<uint8_t> out;
  for (const Presence its : there) append(out, protocol::PromiseItem{static_cast<uint32_t>(its), 0});
  return out;
}

// Reading, and what makes reading faster.
bool reader_may(Op op) {
  switch (op) {
    case Op::LookUp:
    case Op::Touch:
    case Op::Stats:
    case Op::Token:
    case Op::Promote:
    case Op::PromoteFrom:
    case Op::Suspect:
    case Op::AllowPins:
    case Op::Elsewhere:
    case Op::PinTerms:
    case Op::Device: return true;
    default: return false;
  }
}

}  // namespace

std::string stats_json(Store& store) {
  const Stats s = store.stats();
  std::string out = "{";
  auto field = [&](const char* name, uint64_t value) {
    out += std::string(out.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(value);
  };
#define X(name) field(#name, s.name);
  // clang-format off
  X(used_bytes) X(capacity_bytes) X(frontier_bytes) X(faulted_bytes) X(huge_bytes) X(slack_bytes) X(blocks) X(created)
  X(zombies) X(quarantined) X(on_disk) X(pending_writes) X(pins) X(sessions) X(max_blocks) X(epoch) X(fenced) X(draining)
  X(longest_hold_ns) X(long_holds)
  KV_STORE_COUNTERS(X);
  // clang-format on
#undef X
#define X(name, owner)                                                      \
  field("pins_" #name, s.held[static_cast<size_t>(PinOwner::owner)].count); \
  field("pinned_" #name "_bytes", s.held[static_cast<size_t>(PinOwner::owner)].bytes);
  KV_PIN_OWNERS(X)
#undef X
  LowerTier* lower = store.lower();
  const LowerTier::Figures disk = lower != nullptr ? lower->figures() : LowerTier::Figures{};
#define X(name) field("disk_" #name, disk.name);
  X(files) X(bytes) X(quota_bytes) X(loaded) X(written);
#undef X
  const Fetcher* peers = store.peers();
  return out + ", \"node\": \"" + (peers ? peers->node() : "") + "\"}";  // a name has nothing that JSON escapes
}

std::vector<uint8_t> SessionThread::answer(Connection& connection, const protocol::Request& request, protocol::Reader body) {
  Store& store = store_;
  const auto op = static_cast<Op>(request.op);
  if (connection.read_only && !reader_may(op))
    throw Error(Code::NotPermitted, "the session of namespace " + store.name() + " is read-only");
  switch (op) {
    case Op::RegisterLayout: {
      std::vector<uint8_t> out;
      append(out, store.register_layout(body.rest(), connection.session));
      return out;
    }
    case Op::Create: return create(connection, request, body);
    case Op::Seal: return seal_or_abort(store, connection.session, true, request.count, body);
    case Op::Abort: return seal_or_abort(store, connection.session, false, request.count, body);
    case Op::Publish: return publish(store, connection.session, request.count, body);
    case Op::PublishPieces: return publish_pieces(store, connection.session, request.count, body);
    case Op::TakeBack:
    case Op::TakeBackPieces: return take_back(store, connection.session, op, request.count, body);
    case Op::LookUp:
    case Op::Delete:
    case Op::Touch:
    case Op::Elsewhere:
    case Op::Suspect: {
      const auto keys = body.take<Key>(request.count);
      need_end(body);
      return by_key(store, connection, op, keys);
    }
    case Op::Promote:
    case Op::PromoteFrom: return promote(store, connection, op, request.count, body);
    case Op::Push: return push(store, request.count, body);
    case Op::Stats: {
      const std::string text = stats_json(store);
      return {text.begin(), text.end()};
    }
    case Op::Token: return token_of(connection);
    case Op::Keep: return keep(connection, request, body);
    case Op::AllowPins: {
      const auto wanted = body.take<protocol::PinsWanted>();
      need_end(body);
      std::vector<uint8_t> out;
      append(out, store.allow_pins(connection.session, wanted.slots, wanted.pages).pack());
      return out;
    }
    case Op::PinTerms: return pin_terms(store, connection.session, body);
    case Op::Device: return device(store, connection.session, body);
    case Op::Attach: break;
  }
  throw Error(Code::InvalidArgument, "unknown operation " + std::to_string(request.op));
}

std::vector<uint8_t> SessionThread::create(Connection& connection, const protocol::Request& request, protocol::Reader body) {
  const auto head = body.take<protocol::CreateHead>();
  if (head.seals > kMaxKeysPerMessage)
    throw Error(Code::InvalidArgument, "the message carries " + std::to_string(head.seals) + " seals, the limit is " +
                                           std::to_string(kMaxKeysPerMessage));
  const auto seals = body.take<protocol::BlockItem>(head.seals);
  const auto wanted = body.take<protocol::CreateItem>(request.count);
  need_end(body);
  // Both lists field by field: a copy of what was just written in parts waits for the parts.
  std::vector<CreateItem> items(wanted.size());
  for (size_t i = 0; i < items.size(); ++i) {
    items[i].key = wanted[i].key, items[i].fingerprint = wanted[i].fingerprint;
    items[i].tokens = wanted[i].tokens, items[i].base_position = wanted[i].base_position, items[i].parent = wanted[i].parent;
    items[i].region_pages = wanted[i].region_pages;
  }

  std::vector<uint8_t> out = seal_all(store_, connection.session, seals);
  out.reserve(round_up(out.size(), 8) + items.size() * sizeof(protocol::GrantItem));
  out.resize(round_up(out.size(), 8));
  const std::vector<Granted> granted = store_.create({connection.session, head.layout, head.priority, head.ttl_s, items});
  std::vector<protocol::GrantItem> grants(granted.size());
  for (size_t i = 0; i < grants.size(); ++i) {
    const Granted& from = granted[i];
    grants[i].record = from.handle.record, grants[i].status = static_cast<uint32_t>(from.status);
    grants[i].generation = from.handle.generation, grants[i].offset = from.extent.offset, grants[i].length = from.extent.length;
  }
  append(out, grants);
  return out;
}

// A list may take several messages. What is remembered of it is no more than what the session has.
std::vector<uint8_t> SessionThread::keep(Connection& connection, const protocol::Request& request, protocol::Reader body) {
  const auto head = body.take<protocol::KeepHead>();
  const auto items = body.take<protocol::BlockItem>(request.count);
  need_end(body);
  std::vector<Handle> open;
  for (const auto& item : items) open.push_back({item.record, item.generation});
  const size_t most = store_.keepable(connection.session, open);
  if (connection.kept.size() + open.size() > most)
    throw Error(Code::InvalidArgument, "a session keeps more than the " + std::to_string(most) + " blocks that it has open");
  connection.kept.insert(connection.kept.end(), open.begin(), open.end());
  if (!head.more) store_.keep_only(connection.session, std::exchange(connection.kept, {}));
  return {};
}

// The same token however often it is asked for: a session has one at most.
std::vector<uint8_t> SessionThread::token_of(Connection& connection) {
  if (!connection.token) connection.token = shared_.tokens.issue({store_.name(), connection.read_only, connection.who.uid});
  return {connection.token->begin(), connection.token->end()};
}

void SessionThread::admit(Arrival arrival) {
  Connection& connection = *arrival.connection;
  const uint64_t began_ns = monotonic_ns();
  try {
    attach(connection, arrival.request, arrival.wanted);
  } catch (const Error& error) {  // the end of this connection: the door takes none back
    if (connection.attached) store_.end_session(connection.session);
    shared_.refused.fetch_add(1);
    send_reply(connection.socket.get(), {protocol::kMagic, arrival.request.op, status_of(error), 0, arrival.request.tag},
               text_of(error));
    return;
  }
  const int socket = connection.socket.get();
  if (connection.process) watch(epoll_.get(), connection.process.get()), process_sockets_[connection.process.get()] = socket;
  watch(epoll_.get(), socket);
  connections_.emplace(socket, std::move(arrival.connection));
  measure(arrival.request.op, began_ns);
}

// A session costs memory and a guard until nobody maps its page any more, also one whose connection was closed. Other namespaces
// are waited for only where that may save a user who is over the limit.
void SessionThread::bound_left_sessions(uint32_t uid) {
  const size_t most = shared_.seats.most_of(uid);
  store_.reap_left_sessions();
  size_t left = 0;
  for (const Store* store : shared_.stores) left += store->left_sessions(uid);
  if (left < most) return;
  left = 0;
  for (Store* store : shared_.stores) store->reap_left_sessions(), left += store->left_sessions(uid);
  if (left >= most)
    throw Error(Code::NoSpace, std::to_string(left) + " sessions of user " + std::to_string(uid) +
                                   " have ended while their processes still map them, the limit is " + std::to_string(most));
}

void SessionThread::attach(Connection& connection, const protocol::Request& request, const protocol::Attach& wanted) {
  connection.read_only = wanted.read_only != 0;
  if (!may_stay(connection)) throw Error(Code::NotPermitted, "this user may no longer use namespace " + store_.name());
  const Store::Options& segments = store_.options();
  Fd table = read_only_copy(segments.table_fd);
  Fd progress, pool;
  if (wanted.read_only) progress = read_only_copy(segments.progress_fd), pool = read_only_copy(segments.pool_fd);

  Id token;
  std::copy(std::begin(wanted.resume_token), std::end(wanted.resume_token), token.begin());
  protocol::Attached reply{};
  Fd page;
  reply.resumed = wanted.resume_session &&
                  store_.resume_session(wanted.resume_session, token, connection.who.pid, connection.who.uid, wanted.version);
  if (reply.resumed) {
    reply.session = wanted.resume_session;
  } else {
    bound_left_sessions(connection.who.uid);
    std::tie(reply.session, page) =
        store_.open_session(wanted.max_pins, connection.who.pid, connection.who.uid, wanted.read_only != 0, wanted.version);
  }
  connection.attached = true;
  connection.session = reply.session, connection.protocol = wanted.version;
  connection.mailbox = std::make_unique<DaemonMailbox>(store_.session_page_head(reply.session));
  const TableHeader& header = store_.header();
  reply.epoch = header.epoch.load(std::memory_order_acquire);
  reply.table_bytes = header.total_bytes;
  reply.progress_bytes = round_up(Store::progress_bytes(header.max_blocks), kPageBytes);
  reply.pool_bytes = header.capacity_bytes & ~kTableHasPieces;
  reply.page_bytes = store_.session_page_bytes(reply.session);
  std::copy(segments.pool_id.begin(), segments.pool_id.end(), reply.pool_id);
  std::copy(tenant_.salt.begin(), tenant_.salt.end(), reply.salt);

  std::vector<uint8_t> bytes;
  append(bytes, reply);
  std::vector<int> descriptors{table.get(), wanted.read_only ? progress.get() : segments.progress_fd,
                               wanted.read_only ? pool.get() : segments.pool_fd};
  if (page) descriptors.push_back(page.get());
  if (!send_reply(connection.socket.get(), {protocol::kMagic, request.op, protocol::kOk, 1, request.tag}, bytes, descriptors))
    ::shutdown(connection.socket.get(), SHUT_RDWR);  // and ends as any other does
}

}  // namespace kv
