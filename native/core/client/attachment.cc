#include "core/client/attachment.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "core/base/processor.h"
#include "core/client/client.h"
#include "core/client/connect.h"
#include "core/client/exchange.h"

namespace kv {
namespace {

std::atomic<uint64_t>* token_page() {
  static auto* word = [] {
    void* page = ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    KV_INVARIANT(page != MAP_FAILED && ::madvise(page, kPageBytes, MADV_WIPEONFORK) == 0);
    return new (page) std::atomic<uint64_t>(0);
  }();
  return word;
}

uint64_t next_number() {
  static std::atomic<uint64_t> made{0};
  return ++made;
}

std::optional<Layout> parsed(std::span<const uint8_t> blob) {
  try {
    return Layout::parse(blob);
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

uint64_t process_token() {
  std::atomic<uint64_t>* word = token_page();
  uint64_t token = word->load(std::memory_order_relaxed);
  if (token) return token;
  uint64_t fresh = 0;
  while (fresh == 0) KV_INVARIANT(::getrandom(&fresh, sizeof fresh, 0) == sizeof fresh);
  return word->compare_exchange_strong(token, fresh) ? fresh : token;
}

// ---------------------------------------------------------------- the socket

std::vector<uint8_t> Attachment::ask(protocol::Op op, uint32_t count, std::span<const uint8_t> body,
                                     const std::function<void()>& meanwhile,
                                     const std::function<void(std::span<const uint8_t>)>& taken) {
  if (foreign()) throw Error(Code::Detached, "this process was forked: its copy of the session is the parent's");
  const WithoutHeldLock unheld;
  std::lock_guard lock(socket_mutex_);
  if (!socket_) throw Error(Code::Detached, "the session is not attached");
  try {
    const protocol::Request request = request_of(op, count, ++tag_);
    board->mailbox().processor.store(this_processor(), std::memory_order_relaxed);
    std::optional<std::vector<uint8_t>> mailed = exchange_by_mailbox(board->mailbox(), socket_.get(), request, body, meanwhile);
    mailed_.fetch_add(mailed ? 1 : 0, std::memory_order_relaxed);
    std::vector<uint8_t> answer = mailed ? *std::move(mailed) : exchange(socket_.get(), request, body, nullptr, meanwhile);
    if (taken) taken(answer);
    return answer;
  } catch (const Error& error) {
    if (error.code != Code::Detached && error.code != Code::DeadlineExceeded) throw;
    hang_up();
    throw;
  } catch (...) {  // of `meanwhile`: the reply that is on its way would be taken for another's
    hang_up();
    throw;
  }
}

std::array<uint8_t, 32> Attachment::salt() {
  if (foreign()) return salt_;  // nobody writes it here, and the lock may be held by a thread of the parent's
  std::lock_guard lock(socket_mutex_);
  return salt_;
}

void Attachment::opened(const void* writer, std::span<const Handle> blocks) {
  if (foreign()) return;  // the parent's, and the lock may be held by a thread of the parent's
  std::lock_guard lock(open_mutex_);
  std::vector<Handle>& open = open_[writer];
  open.insert(open.end(), blocks.begin(), blocks.end());
}

void Attachment::ended(const void* writer, std::span<const protocol::BlockItem> blocks) {
  if (foreign()) return;
  std::lock_guard lock(open_mutex_);
  const auto found = open_.find(writer);
  if (found == open_.end()) return;
  if (blocks.size() < found->second.size()) {
    std::set<std::pair<uint32_t, uint64_t>> over;
    for (const protocol::BlockItem& block : blocks) over.emplace(block.record, block.generation);
    std::erase_if(found->second, [&](const Handle& open) { return over.contains({open.record, open.generation}); });
  } else {  // all that it had
    open_.erase(found);
  }
}

// The caller holds open_mutex_.
std::vector<protocol::BlockItem> Attachment::open_items() const {
  std::vector<protocol::BlockItem> out;
  for (const auto& [writer, blocks] : open_)
    for (const Handle& block : blocks) out.push_back({block.record, 0, block.generation});
  return out;
}

// To a daemon that has just resumed the session. The caller holds socket_mutex_: no answer is being read, none is read before.
void Attachment::tell_open(int socket) {
  std::unique_lock lock(open_mutex_);
  const std::vector<protocol::BlockItem> open = open_items();
  lock.unlock();
  size_t at = 0;
  do {
    const size_t count = std::min<size_t>(kMaxKeysPerMessage, open.size() - at);
    std::vector<uint8_t> body;
    protocol::append(body, protocol::KeepHead{at + count < open.size(), 0});
    for (const auto& block : std::span(open).subspan(at, count)) protocol::append(body, block);
    exchange(socket, request_of(protocol::Op::Keep, static_cast<uint32_t>(count), ++tag_), body, nullptr);
    at += count;
  } while (at < open.size());
}

// A daemon of before knows no terms, and asks nothing back. The caller holds socket_mutex_.
void Attachment::tell_terms(int socket) {
  const PinTerms& terms = options_.terms;
  if (!terms.bounded() && terms.owner == PinOwner::Client) return;
  std::vector<uint8_t> body;
  protocol::append(body, protocol::PinsOnTerms{static_cast<uint32_t>(terms.owner), terms.deadline_ms, terms.bytes});
  try {
    exchange(socket, request_of(protocol::Op::PinTerms, 1, ++tag_), body, nullptr);
  } catch (const Error& error) {
    if (error.code != Code::InvalidArgument) throw;
  }
}

bool Attachment::give_to_device(bool writes) {
  std::lock_guard lock(device_mutex_);
  const bool before = std::exchange(given_, writes);
  try {
    return tell_device();
  } catch (...) {
    given_ = before;
    throw;
  }
}

void Attachment::count_region(int more) {
  std::lock_guard lock(device_mutex_);
  const bool before = regions_ > 0;
  regions_ += more;
  if (before == (regions_ > 0)) return;
  try {
    tell_device();
  } catch (const Error&) {
    // The daemon cannot see this process, so the free lock alone says when it is done. Or it was not told that the last region
    // was closed: it waits for the process's end.
  }
}

bool Attachment::tell_device() {
  std::vector<uint8_t> body;
  protocol::append(body, protocol::DeviceMemory{given_ || regions_ > 0, 0});
  try {
    ask(protocol::Op::Device, 1, body);
    return true;
  } catch (const Error& error) {
    if (error.code != Code::InvalidArgument) throw;
    return false;
  }
}

void Attachment::watch(const std::shared_ptr<BlockBatch>& batch) {
  if (!options_.terms.bounded()) return;
  std::lock_guard lock(watched_mutex_);
  watched_.push_back(batch);
  if (watched_.size() < sweep_at_) return;
  std::erase_if(watched_, [](const auto& batch) { return batch.expired(); });
  sweep_at_ = 2 * watched_.size() + 64;
}

void Attachment::let_go_of_asked() {
  const uint32_t asked = board->rounds().asked_back;
  if (asked_seen_.exchange(asked, std::memory_order_relaxed) == asked) return;
  std::vector<std::shared_ptr<BlockBatch>> back;  // closed, and perhaps gone, behind the lock
  {
    std::lock_guard lock(watched_mutex_);
    for (const auto& weak : watched_)
      if (auto batch = weak.lock(); batch && batch->asked_back()) back.push_back(std::move(batch));
  }
  for (const auto& batch : back) batch->close();
}

// A second call ends a session that was resumed while the first one ran.
void Attachment::close() {
  if (foreign()) return;
  const WithoutHeldLock unheld;  // another thread's copy may wait for that lock, and its answer for the daemon
  if (!closed_.exchange(true)) {
    {
      std::unique_lock copies(copying_mutex_);
    }  // none begins from here on
    give_up_open();
  }
  tables->stop();
  std::lock_guard lock(socket_mutex_);
  hang_up();
}

// Not by closing alone: a forked child may have the descriptor too, and the daemon would wait for its end. The caller holds
// socket_mutex_.
void Attachment::hang_up() {
  connected_.store(false, std::memory_order_release);
  if (socket_) ::shutdown(socket_.get(), SHUT_RDWR);
  socket_.reset();
  if (board) board->mailbox().attended.store(0, std::memory_order_relaxed);  // the next daemon says for itself that it looks
}

void Attachment::give_up_open() {
  std::vector<protocol::BlockItem> open;
  {
    std::lock_guard lock(open_mutex_);
    open = open_items();
    open_.clear();
  }
  try {
    for (size_t at = 0; at < open.size(); at += kMaxKeysPerMessage) {
      const size_t count = std::min<size_t>(kMaxKeysPerMessage, open.size() - at);
      ask(protocol::Op::Abort, static_cast<uint32_t>(count),
          {reinterpret_cast<const uint8_t*>(&open[at]), count * sizeof open[0]});
    }
  } catch (const Error&) {
    // Then the session's end gives them up.
  }
}

// ---------------------------------------------------------------- attaching

std::vector<uint8_t> Attachment::handshake(Fd& socket, const Attachment* previous, std::vector<Fd>& descriptors) {
  protocol::Attach attach{};
  attach.version = protocol::kVersion;
  attach.read_only = options_.read_only;
  attach.max_pins = options_.max_pins;
  if (options_.name.size() > protocol::kMaxNamespace)
    throw Error(Code::InvalidArgument, "the namespace's name has " + std::to_string(options_.name.size()) +
                                           " bytes, the limit is " + std::to_string(protocol::kMaxNamespace));
  std::copy(options_.name.begin(), options_.name.end(), attach.name);
  if (previous && !previous->foreign() && previous->resumable_.load(std::memory_order_relaxed)) {
    attach.resume_session = previous->session_;
    std::copy_n(previous->board->page().token, sizeof attach.resume_token, attach.resume_token);
  }
  for (;;) {
    std::vector<uint8_t> body;
    protocol::append(body, attach);
    protocol_.store(attach.version, std::memory_order_relaxed);
    try {
      return first_exchange(socket.get(), request_of(protocol::Op::Attach, 1, 0), body, &descriptors);
    } catch (const Error& error) {  // a daemon of before: the newest version that both speak
      if (error.code != Code::IncompatibleVersion || attach.version == protocol::kOldestVersion) throw;
      attach.version -= 1;
    }
  }
}

Attachment::Attachment() : number_(next_number()) {}

std::shared_ptr<Attachment> Attachment::make(const AttachOptions& options, const std::shared_ptr<Attachment>& previous) {
  std::shared_ptr<Attachment> fresh(new Attachment());
  fresh->options_ = options;
  fresh->token_ = process_token();
  if (previous && !previous->foreign()) {  // nobody asks by its page while another daemon takes it over
    std::lock_guard lock(previous->socket_mutex_);
    previous->hang_up();
  }
  Fd socket = connect_to(options.socket_path, options.timeout_s, previous != nullptr);
  std::vector<Fd> descriptors;
  std::vector<uint8_t> body;
  try {
    body = fresh->handshake(socket, previous.get(), descriptors);
  } catch (const Error& error) {
    if (error.code == Code::Detached)
      throw Error(Code::Unavailable, std::string("the daemon refused the session: ") + error.what());
    throw;
  }
  protocol::Reader reader(body);
  const auto reply = reader.take<protocol::Attached>();
  if (!reader.at_end() || descriptors.size() != (reply.resumed ? 3u : 4u))
    throw Error(Code::IncompatibleVersion, "the daemon's answer to attach cannot be read");
  if (reply.resumed) {
    Attachment& kept = *previous;
    std::lock_guard lock(kept.socket_mutex_);
    if (!options.read_only) kept.tell_open(socket.get());
    kept.tell_terms(socket.get());
    kept.socket_ = std::move(socket);
    std::copy(std::begin(reply.salt), std::end(reply.salt), kept.salt_.begin());
    kept.epoch_.store(reply.epoch, std::memory_order_relaxed);
    kept.protocol_.store(fresh->protocol(), std::memory_order_relaxed);
    kept.connected_.store(true, std::memory_order_release);
    return previous;
  }
  fresh->map(reply, descriptors);
  fresh->tell_terms(socket.get());
  fresh->socket_ = std::move(socket);
  std::copy(std::begin(reply.salt), std::end(reply.salt), fresh->salt_.begin());
  fresh->connected_.store(true);
  return fresh;
}

// What this user's sessions may hold together is bounded, and this one asks for its part when it needs it.
size_t Attachment::take_pins(std::span<const uint64_t> pins, std::span<const uint32_t> pages, uint32_t* slots) {
  size_t taken = board->take(pins, slots, pages);
  if (taken == pins.size() || !board->bounded() || !connected()) return taken;
  const size_t wanted = board->taken() + pins.size() - taken;
  std::vector<uint8_t> body;
  protocol::append(body, protocol::PinsWanted{static_cast<uint32_t>(std::min<size_t>(wanted, options_.max_pins)),
                                              *std::max_element(pages.begin() + static_cast<ptrdiff_t>(taken), pages.end())});
  try {
    ask(protocol::Op::AllowPins, 1, body);
  } catch (const Error&) {
    return taken;  // then these have no pin, as if there were none left
  }
  return taken + board->take(pins.subspan(taken), slots + taken, pages.subspan(taken));
}

std::string Attachment::exhausted() const {
  if (board->allowance().pages == PinAllowance::kAnyPages)
    return "the session holds its " + std::to_string(options_.max_pins) + " pins; release some blocks";
  const PinAllowance allowed = board->allowance();
  return "the session may hold " + std::to_string(allowed.slots) + " blocks of " + std::to_string(allowed.pages * kPageBytes) +
         " bytes now: a user holds a part of the namespace, with all its sessions; release some blocks";
}

void Attachment::map(const protocol::Attached& reply, std::vector<Fd>& descriptors) {
  session_ = reply.session;
  epoch_.store(reply.epoch);
  std::copy(std::begin(reply.pool_id), std::end(reply.pool_id), pool_id_.begin());
  board = std::make_unique<PinBoard>(Mapping(descriptors[3].get(), reply.page_bytes, true));
  table_ = Mapping(descriptors[0].get(), reply.table_bytes, false);
  progress_ = Mapping(descriptors[1].get(), reply.progress_bytes, !options_.read_only);
  progress_words_ = progress_.at<std::atomic<uint64_t>>(0);
  // Views are read through a mapping that cannot be written, whoever they are passed to.
  pool_ = Mapping(descriptors[2].get(), reply.pool_bytes, false);
  if (!options_.read_only) writable_ = Mapping(descriptors[2].get(), reply.pool_bytes, true);
  const auto* header = table_.at<TableHeader>(0);
  if (std::memcmp(header->magic, kTableMagic, sizeof kTableMagic) != 0 || header->version < kOldestFormat ||
      header->version > kFormatVersion || header->total_bytes > table_.size())
    throw Error(Code::IncompatibleVersion, "the block table is of version " + std::to_string(header->version) +
                                               ", this client reads " + std::to_string(kOldestFormat) + " to " +
                                               std::to_string(kFormatVersion));
  index = Index(table_.data());
  tables = std::make_unique<PageTables>(pool_, writable_, index.header().frontier);
}

Attachment::~Attachment() {
  if (!foreign())
    hang_up();
  else if (tables)
    tables->abandon();
}

// ---------------------------------------------------------------- what the memory holds

Attachment::Known Attachment::layout(uint32_t id) {
  const Known known =
      layout_slot(id) < index.header().layouts.load(std::memory_order_acquire) ? layout_in(layout_slot(id)) : nullptr;
  if (!known && layout_generation(id) == 0)
    throw Error(Code::InvalidArgument, "layout " + std::to_string(id) + " is not registered");
  if (!known || known->id != id)
    throw Error(Code::LayoutLost,
                "layout " + std::to_string(id) + " had no block left and its slot was given to another: register it again");
  return known;
}

Attachment::Known Attachment::layout_in(uint32_t slot) {
  const TableHeader& header = index.header();
  if (slot >= std::min(LayoutSlot::count(header), kMaxLayouts)) return nullptr;
  const LayoutSlot there(table_.data(), slot);
  std::lock_guard lock(layouts_mutex_);
  layouts_.resize(std::max<size_t>(layouts_.size(), slot + 1));
  Known& known = layouts_[slot];
  const uint32_t id = layout_id(slot, there.generation());
  if (known && known->id == id) return known;
  const auto blob = there.blob();
  if (!blob || there.generation() != layout_generation(id)) return nullptr;
  std::optional<Layout> layout = parsed(*blob);
  if (!layout) return nullptr;  // of a table that is damaged
  const Key digest = layout_digest(*layout);
  return known = std::make_shared<const KnownLayout>(KnownLayout{id, digest, *std::move(layout)});
}

}  // namespace kv
