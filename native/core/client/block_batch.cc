// The blocks one get pinned: who still holds them, and waiting for the layers of those that are being written.

#include <time.h>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/client/client.h"
#include "core/format/meta.h"

namespace kv {

size_t BlockBatch::hits() const {
  size_t count = 0;
  for (const Item& item : items_) count += item.state == ItemState::Hit;
  return count;
}

const KnownLayout* BlockBatch::keep(Attachment::Known layout) {
  if (!layout) return nullptr;
  return layouts_.emplace_back(std::move(layout)).get();
}

namespace {
// Called once a batch: where a thread's variable lies is asked for by a call, which a loop would repeat.
[[gnu::noinline]] std::vector<uint32_t>& slots_to_clear() {
  thread_local std::vector<uint32_t> slots;
  return slots;
}
}  // namespace

// Without an export nobody else lets go of a block, so none is counted down. hold() and close() each say what they do before
// they look what the other does: one of the two sees the other.
void BlockBatch::close() {
  if (closed_.exchange(true)) return;
  const bool alone = !exported_.load();
  std::vector<uint32_t>& slots = slots_to_clear();
  slots.clear();
  if (attachment_->foreign()) return;
  PageTables::Uses uses(*attachment_->tables);
  for (Item& item : items_) {
    if (item.state != ItemState::Hit || !item.holders.load(std::memory_order_relaxed)) continue;
    if (alone)
      item.holders.store(0, std::memory_order_relaxed);
    else if (item.holders.fetch_sub(1, std::memory_order_acq_rel) != 1)
      continue;
    slots.push_back(item.slot);
    if (item.at.extent.in_pieces())
      unmap(static_cast<size_t>(&item - items_.data()));
    else
      uses.add(item.at.extent);
  }
  if (!slots.empty()) attachment_->board->clear(slots);
}

void BlockBatch::check_held() {
  if (!asked_back()) return;
  close();
  const PinTerms& terms = attachment_->options().terms;
  throw Error(Code::BlockLost,
              "the daemon asked these blocks back" +
                  (terms.deadline_ms ? ", held for " + std::to_string(terms.deadline_ms) + " ms" : std::string()) +
                  (terms.bytes ? ", of at most " + std::to_string(terms.bytes) + " bytes" : std::string()));
}

void BlockBatch::hold(size_t i) {
  check_held();
  if (!exported_.load()) exported_.store(true);
  uint32_t holders = items_[i].holders.load(std::memory_order_relaxed);
  do
    if (holders == 0 || closed_.load()) throw Error(Code::Closed, "the blocks this view belongs to were released");
  while (!items_[i].holders.compare_exchange_weak(holders, holders + 1, std::memory_order_acq_rel));
}

// A child's copy must not clear its parent's pins.
void BlockBatch::let_go(size_t i) {
  if (items_[i].holders.fetch_sub(1, std::memory_order_acq_rel) != 1 || attachment_->foreign()) return;
  if (items_[i].at.extent.in_pieces())
    unmap(i);
  else
    attachment_->tables->used(items_[i].at.extent);
  attachment_->board->clear({&items_[i].slot, 1});
}

std::vector<Extent> BlockBatch::pieces(size_t i) const {
  const Extent& at = items_[i].at.extent;
  return at.in_pieces() ? attachment_->index.pieces(at, attachment_->pool_bytes()) : std::vector<Extent>{at};
}

const std::byte* BlockBatch::mapped(size_t i) const {
  const std::lock_guard lock(mapped_mutex_);
  if (const auto known = mapped_.find(i); known != mapped_.end()) return known->second.data();
  return mapped_.try_emplace(i, attachment_->readable(0), pieces(i)).first->second.data();
}

void BlockBatch::unmap(size_t i) {
  const std::lock_guard lock(mapped_mutex_);
  mapped_.erase(i);
}

void BlockBatch::give_up(size_t i) {
  let_go(i);
  items_[i].state = ItemState::Miss;
}

bool BlockBatch::sealed(size_t i) const {
  const Snapshot& at = items_[i].at;
  if (at.control.state() == State::Sealed || items_[i].complete.load(std::memory_order_relaxed)) return true;
  const Control now = attachment_->index.control(at.record);
  if (now.generation() != at.control.generation() || now.state() != State::Sealed) return false;
  items_[i].complete.store(true, std::memory_order_relaxed);
  return true;
}

// The record decides: while it has our generation, the progress word is about our block.
uint32_t BlockBatch::layers_ready(size_t i) const {
  const Item& item = items_[i];
  if (sealed(i)) return item.layout->num_layers();
  const uint64_t word = attachment_->progress(item.at.record).load(std::memory_order_acquire);
  const uint64_t generation = item.at.control.generation();
  if (progress_generation(word) != generation || attachment_->index.control(item.at.record).generation() != generation) return 0;
  return std::min(progress_layers(word), item.layout->num_layers());
}

bool BlockBatch::lost(size_t i) const {
  const Item& item = items_[i];
  return !sealed(i) && attachment_->index.control(item.at.record).generation() != item.at.control.generation();
}

void BlockBatch::wait_layer(size_t i, uint32_t layer, const timespec& deadline) const {
  const Item& item = items_[i];
  if (!item.layout) throw Error(Code::InvalidArgument, "the block was not found");
  if (layer >= item.layout->num_layers())
    throw Error(Code::InvalidArgument,
                "layer is " + std::to_string(layer) + ", must be 0 to " + std::to_string(item.layout->num_layers() - 1));
  std::atomic<uint64_t>& word = attachment_->progress(item.at.record);
  const PinBoard::Waiting waiting(*attachment_->board);
  for (;;) {
    const uint64_t seen = word.load(std::memory_order_acquire);
    if (layers_ready(i) > layer) return;
    if (attachment_->index.control(item.at.record).generation() != item.at.control.generation())
      throw Error(Code::BlockLost, "the block's writer ended before layer " + std::to_string(layer) + " was there");
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec > deadline.tv_sec || (now.tv_sec == deadline.tv_sec && now.tv_nsec >= deadline.tv_nsec))
      throw Error(Code::DeadlineExceeded,
                  "layer " + std::to_string(layer) + " did not come in time; " + std::to_string(layers_ready(i)) + " are there");
    futex_wait(word, static_cast<uint32_t>(seen), deadline);
  }
}

std::optional<uint32_t> BlockBatch::checksum(size_t i, uint32_t layer) const {
  const Item& item = items_[i];
  const uint8_t flags = item.at.control.flags() | attachment_->index.control(item.at.record).flags();
  if (!sealed(i) || !(flags & kFlagChecksummed)) return std::nullopt;
  const uint64_t offset = item.layout->checksums_offset(item.at.shape.tokens);
  const uint64_t place = item.at.extent.in_pieces() ? place_of(pieces(i), offset) : item.at.extent.offset + offset;
  return reinterpret_cast<const uint32_t*>(attachment_->readable(place))[layer];
}

bool BlockBatch::verify(size_t i) const {
  const Item& item = items_[i];
  // A block that goes while it is pinned loses the flag; one that is followed gets it at its seal.
  const uint8_t flags = item.at.control.flags() | attachment_->index.control(item.at.record).flags();
  if (!(flags & kFlagChecksummed)) return true;
  const uint32_t tokens = item.at.shape.tokens;
  const auto* stored = reinterpret_cast<const uint32_t*>(bytes(i) + item.layout->checksums_offset(tokens));
  for (uint32_t layer = 0; layer < item.layout->num_layers(); ++layer)
    if (crc32c(bytes(i) + item.layout->layer_offset(layer, tokens), item.layout->layer_bytes(layer, tokens)) != stored[layer])
      return false;
  return true;
}

}  // namespace kv
