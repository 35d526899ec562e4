#include "core/client/client.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "core/base/atomics.h"
#include "core/base/error.h"

namespace kv {
namespace {

uint32_t coarse_realtime_s() {
  timespec now;
  ::clock_gettime(CLOCK_REALTIME_COARSE, &now);
  return static_cast<uint32_t>(now.tv_sec);
}

bool readable(const Snapshot& s, bool follow) {
  const State state = s.control.state();
  if (state == State::Created) return follow;
  return state == State::Sealed && (s.expiry_s == 0 || coarse_realtime_s() < s.expiry_s);
}

Presence presence(Find found, const Snapshot& s) {
  if (found != Find::Hit) return Presence::Missing;
  if (s.control.state() == State::Created) return Presence::Pending;
  if (s.control.state() == State::Disk) return Presence::OnDisk;
  return readable(s, false) ? Presence::Resident : Presence::Missing;
}

struct Reading {  // memory of a look-up or a get, kept by its thread for the next
  std::vector<Find> found;
  std::vector<Snapshot> where;
  std::vector<uint32_t> hits;
};

struct Pinning {
  std::vector<uint64_t> pins;
  std::vector<uint32_t> keys, pages, slots, lost;  // of each pin: which key's, pages of its block, where it stands

  void fit(size_t count) {
    lost.clear();
    if (pins.size() >= count) return;
    pins.resize(count), keys.resize(count), pages.resize(count), slots.resize(count);
  }
};

// Functions that are called once: where a thread's variables lie is asked for by a call, which a loop would repeat.
[[gnu::noinline]] Reading& reading() {
  thread_local Reading kept;
  return kept;
}
[[gnu::noinline]] Pinning& pinning() {
  thread_local Pinning kept;
  return kept;
}

}  // namespace

timespec deadline_in(double seconds) {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  const double bounded = std::clamp(seconds, 0.0, 1e9);
  t.tv_sec += static_cast<time_t>(bounded);
  t.tv_nsec += static_cast<long>((bounded - static_cast<double>(static_cast<time_t>(bounded))) * 1e9);
  if (t.tv_nsec >= 1'000'000'000) t.tv_sec += 1, t.tv_nsec -= 1'000'000'000;
  return t;
}

// ---------------------------------------------------------------- the attachment

std::shared_ptr<Attachment> Client::attachment() const {
  std::lock_guard lock(mutex_);
  if (!attachment_) throw Error(Code::Closed, "the client was closed");
  return attachment_;
}

std::shared_ptr<Attachment> Client::usable() const {
  std::shared_ptr<Attachment> at = attachment();
  if (at->foreign()) throw Error(Code::Detached, "this process was forked since it attached");
  if (!at->current()) throw Error(Code::Detached, "another daemon has taken over, or is about to");
  return at;
}

bool Client::attached() const {
  std::lock_guard lock(mutex_);
  return attachment_ && !attachment_->foreign() && attachment_->current() && attachment_->connected();
}

bool Client::answers() const {
  const std::shared_ptr<Attachment> at = attachment();
  return !at->foreign() && at->current();
}

bool Client::awaited() const {
  const std::shared_ptr<Attachment> at = attachment();
  return !at->foreign() && !at->current() && at->index.header().epoch.load(std::memory_order_acquire) != kEpochRetired;
}

void Client::reattach() {
  const std::shared_ptr<Attachment> before = attachment();
  std::shared_ptr<Attachment> after = Attachment::make(options_, before);
  std::unique_lock lock(mutex_);
  if (after != before && attachment_) std::swap(attachment_, after);
  const bool closed = !attachment_;
  lock.unlock();
  if (closed) after->close();  // close() came in between
}

void Client::close() {
  if (closed_.exchange(true)) return;
  std::shared_ptr<Attachment> last;
  {
    std::lock_guard lock(mutex_);
    last = std::exchange(attachment_, nullptr);
  }
  last->close();
}

// ---------------------------------------------------------------- reading

void Client::find_all(Attachment& at, std::span<const Key> keys, std::vector<Find>& found, std::vector<Snapshot>& where) {
  found.assign(keys.size(), Find::Torn);
  where.resize(keys.size());
  std::vector<size_t> unclear;
  if (door_ == Door::SharedMemory) {
    at.index.find_each(keys, found, where);
    for (size_t i = 0; i < keys.size(); ++i)
      if (found[i] == Find::Torn) unclear.push_back(i);
  } else {
    for (size_t i = 0; i < keys.size(); ++i) unclear.push_back(i);
  }
  if (!unclear.empty()) ask_where(at, keys, unclear, found, where);
}

void Client::ask_where(Attachment& at, std::span<const Key> keys, std::span<const size_t> which, std::vector<Find>& found,
                       std::vector<Snapshot>& where) {
  for (size_t first = 0; first < which.size(); first += kMaxKeysPerMessage) {
    const auto part = which.subspan(first, std::min<size_t>(kMaxKeysPerMessage, which.size() - first));
    std::vector<uint8_t> body;
    for (size_t i : part) protocol::append(body, keys[i]);
    const std::vector<uint8_t> answer = at.ask(protocol::Op::LookUp, static_cast<uint32_t>(part.size()), body);
    protocol::Reader reader(answer);
    for (size_t i : part) {
      const auto item = reader.take<protocol::LookUpItem>();
      if (!reader.ok() || item.record >= at.index.max_blocks())
        throw Error(Code::Detached, "the daemon's answer to a look-up cannot be read");
      found[i] = item.presence == static_cast<uint32_t>(Presence::Missing) ? Find::Miss : Find::Hit;
      where[i] = {item.record, Control{item.control}, Extent::unpack(item.extent), Shape::unpack(item.shape), 0};
    }
  }
}

std::vector<uint8_t> Client::lookup(std::span<const Key> keys) {
  const std::shared_ptr<Attachment> at = usable();
  auto& [found, where, hits] = reading();
  find_all(*at, keys, found, where);
  std::vector<uint8_t> out(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) out[i] = static_cast<uint8_t>(presence(found[i], where[i]));
  if (!at->current()) throw Error(Code::Detached, "another daemon took over during the look-up");
  return out;
}

// Writes the pins, one fence for all, then looks whether any block changed before its pin could be seen.
void Client::pin_all(Attachment& at, BlockBatch& batch, bool follow, std::vector<Find>& found,
                     const std::vector<Snapshot>& where) {
  Pinning& kept = pinning();
  kept.fit(found.size());
  const std::span<uint64_t> pins(kept.pins);
  const std::span<uint32_t> keys(kept.keys), pages(kept.pages), slots(kept.slots);
  size_t wanted = 0;
  bool apart = false;  // some lie in pieces
  for (size_t i = 0; i < found.size(); ++i) {
    const Snapshot& there = where[i];
    if (found[i] != Find::Hit || !readable(there, follow)) continue;
    if (there.extent.end() > at.pool_bytes()) {
      if (!there.extent.in_pieces()) continue;
      apart = true;
    }
    pins[wanted] = pin_word(there.record, there.control.generation());
    keys[wanted] = static_cast<uint32_t>(i);
    pages[wanted++] = static_cast<uint32_t>(there.extent.length / kPageBytes);
  }
  const size_t taken = at.take_pins(pins.first(wanted), pages.first(wanted), slots.data());
  fence_full();
  const bool current = at.current();
  const PinAllowance allowed = at.board->allowance();  // behind the fence: are pins there still honoured?
  uint64_t bytes = 0;
  const KnownLayout* layout = nullptr;
  uint32_t slot = 0;
  {
    PageTables::Uses uses(*at.tables);
    for (size_t k = 0; k < wanted; ++k) {
      const size_t i = keys[k];
      const Snapshot& there = where[i];
      BlockBatch::Item& item = batch.item(i);
      if (k >= taken || !allowed.covers(slots[k], pages[k])) {
        item.state = ItemState::Exhausted;
        if (k < taken) kept.lost.push_back(slots[k]);  // taken back before this pin could be seen
        continue;
      }
      const Control now = at.index.control(there.record);
      if (!current || now.generation() != there.control.generation()) {
        kept.lost.push_back(slots[k]);
        found[i] = Find::Torn;  // it changed under us: worth another look
        continue;
      }
      const bool in_pieces = apart && there.extent.in_pieces();
      if (!layout || there.shape.layout != slot) layout = batch.keep(at.layout_in(slot = there.shape.layout));
      if (!layout || (in_pieces && at.index.pieces(there.extent, at.pool_bytes()).empty())) {  // of a table that is damaged
        kept.lost.push_back(slots[k]);
        continue;
      }
      item.at = there;
      item.at.control = now;
      item.at.shape.layout = layout->id;
      item.layout = &layout->layout;
      item.slot = slots[k];
      item.state = ItemState::Hit;
      item.holders.store(1, std::memory_order_relaxed);
      if (in_pieces) continue;
      bytes += there.extent.length;
      uses.add(there.extent);
    }
  }
  if (!kept.lost.empty()) at.board->clear(kept.lost);
  if (!current) throw Error(Code::Detached, "another daemon took over during the get");
  if (bytes < PageTables::kWorthAThread) return;
  std::vector<Extent> extents;
  for (size_t k = 0; k < wanted; ++k)
    if (batch.item(keys[k]).state == ItemState::Hit && !where[keys[k]].extent.in_pieces())
      extents.push_back(where[keys[k]].extent);
  at.tables->reading(extents);
}

// Looks one block up again and pins it: one that changed between look-up and pin may be there again.
Find Client::pin_one(const std::shared_ptr<Attachment>& at, BlockBatch& batch, std::span<const Key> keys, size_t i, bool follow,
                     Snapshot& there) {
  std::vector<Find> found;
  std::vector<Snapshot> where;
  find_all(*at, keys.subspan(i, 1), found, where);  // asks the daemon if the index cannot be read whole
  there = where[0];
  BlockBatch single(at, 1);
  pin_all(*at, single, follow, found, where);
  BlockBatch::Item& mine = batch.item(i);
  batch.keep_all(single);
  mine.at = single.item(0).at, mine.layout = single.item(0).layout, mine.state = single.item(0).state;
  mine.slot = std::exchange(single.item(0).slot, PinBoard::kNoSlot);  // the pin stays where it is; only its holder changes
  mine.holders.store(single.item(0).holders.exchange(0));
  single.item(0).state = ItemState::Miss;
  return found[0];
}

std::shared_ptr<BlockBatch> Client::get(std::span<const Key> keys, bool follow) {
  std::shared_ptr<Attachment> at = usable();
  if (options_.terms.bounded()) at->let_go_of_asked();
  auto batch = std::make_shared<BlockBatch>(at, keys.size());
  auto& [found, where, hits] = reading();
  find_all(*at, keys, found, where);
  pin_all(*at, *batch, follow, found, where);
  hits.clear();
  uint64_t misses = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    Snapshot there;
    for (uint32_t tries = 0; found[i] == Find::Torn && tries < kProbeTries; ++tries)
      found[i] = pin_one(at, *batch, keys, i, follow, there);
    const BlockBatch::Item& item = batch->item(i);
    if (item.state == ItemState::Hit) hits.push_back(item.at.record);
    misses += item.state == ItemState::Miss;
  }
  at->board->touched(hits);
  at->board->count(hits.size(), misses);
  return batch;
}

// ---------------------------------------------------------------- by message

uint32_t Client::count_over(protocol::Op op, std::span<const Key> keys) {
  const std::shared_ptr<Attachment> at = usable();
  uint32_t count = 0;
  for (size_t first = 0; first < keys.size(); first += kMaxKeysPerMessage) {
    const auto part = keys.subspan(first, std::min<size_t>(kMaxKeysPerMessage, keys.size() - first));
    for (uint8_t there :
         at->ask(op, static_cast<uint32_t>(part.size()), {reinterpret_cast<const uint8_t*>(part.data()), part.size_bytes()}))
      count += there;
  }
  return count;
}

uint32_t Client::push(std::span<const Key> keys, const std::string& node) {
  protocol::PushHead head{};
  if (node.empty() || node.size() >= sizeof head.node)
    throw Error(Code::InvalidArgument, "a host's name has 1 to " + std::to_string(sizeof head.node - 1) + " bytes, this one " +
                                           std::to_string(node.size()));
  std::memcpy(head.node, node.data(), node.size());
  const std::shared_ptr<Attachment> at = usable();
  uint32_t count = 0;
  for (size_t first = 0; first < keys.size(); first += kMaxKeysPerMessage) {
    const auto part = keys.subspan(first, std::min<size_t>(kMaxKeysPerMessage, keys.size() - first));
    std::vector<uint8_t> body;
    protocol::append(body, head);
    protocol::append_bytes(body, part.data(), part.size_bytes());
    const std::vector<uint8_t> answer = at->ask(protocol::Op::Push, static_cast<uint32_t>(part.size()), body);
    protocol::Reader reader(answer);
    count += reader.take<uint32_t>();
  }
  return count;
}

uint32_t Client::register_layout(std::span<const uint8_t> blob) {
  Layout::parse(blob);  // what the daemon would refuse does not travel: it may be longer than any message
  const std::vector<uint8_t> answer = usable()->ask(protocol::Op::RegisterLayout, 1, blob);
  protocol::Reader reader(answer);
  return reader.take<uint32_t>();
}

std::vector<uint8_t> Client::token() { return usable()->ask(protocol::Op::Token, 0, {}); }

std::string Client::stats() {
  const std::vector<uint8_t> answer = usable()->ask(protocol::Op::Stats, 0, {});
  return {answer.begin(), answer.end()};
}

}  // namespace kv
