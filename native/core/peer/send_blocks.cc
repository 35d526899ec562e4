#include "core/peer/send_blocks.h"

#include <time.h>

#include <algorithm>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/files/block_file.h"
#include "core/format/meta.h"

namespace kv::peer {
namespace {
constexpr uint64_t kSliceUs = 20'000;     // between two looks whether the other end is still there
constexpr uint64_t kSignOfLifeMs = 500;   // of kStallMs
constexpr uint64_t kLongestMs = 120'000;  // for which the next layer of blocks that nobody finishes is waited for
constexpr uint64_t kLoadMs = 5000;        // for which one that lies on disk, or has no turn, is waited for
constexpr uint64_t kLoadLookUs = 500;     // of which nobody says that it has come
constexpr uint64_t kApartBytes = 4 << 20, kApartTlsBytes = 512 << 10;  // of an answer, worth a processor of its own

// Of what lies in that record since it was last taken: another for any other copy of the block that there was or will be, here or
// in another pool.
uint32_t number_of(const Store& store, const Handle& handle) {
  uint32_t pool;
  std::memcpy(&pool, store.header().pool_id, sizeof pool);
  return pool ^ handle.record * 0x9e3779b1u ^ static_cast<uint32_t>(handle.generation);
}
}  // namespace

struct BlockSender::Block {
  Block(BlockSender& sender, uint16_t item, const Key& key) : sender(sender), item(item), key(key) {}
  ~Block() { end(); }
  Block(const Block&) = delete;
  void end() {
    if (job) sender.store_.end_read(job->handle);
    if (std::exchange(admitted, false)) sender.admission_.end(key);
    job.reset();
  }

  BlockSender& sender;
  const uint16_t item;
  const Key key;
  uint64_t loading_until_ms = 0, turn_until_ms = 0;  // it lies on disk, and is being loaded; peers hold as much as they may
  bool admitted = false;
  std::optional<ReadJob> job;
  const Layout* layout = nullptr;
  std::vector<uint32_t> sums;      // of the layers, where they are known
  std::vector<uint32_t> computed;  // where they were not, of those that were sent
  uint32_t layers_sent = 0, last = 0, meta_crc = 0;
  bool meta_sent = false, done = false;
};

Frame BlockSender::frame(Kind kind, const Block& block) const {
  return {.kind = static_cast<uint16_t>(kind), .item = block.item, .request = request_};
}

BlockSender::Sent BlockSender::answer(uint32_t request, std::span<const Key> keys, uint32_t from, bool half) {
  request_ = request, from_ = from, half_ = half, sent_ = {};
  std::list<Block> blocks;
  for (const Key& key : keys) begin(blocks.emplace_back(*this, static_cast<uint16_t>(blocks.size()), key));
  keep_apart(blocks);
  uint64_t moved_ms = monotonic_ms();
  for (uint64_t told_ms = moved_ms;;) {
    Block* first = nullptr;
    crowded_ = false;
    const uint64_t sent_bytes = sent_.bytes;
    for (Block& block : blocks)
      if (!block.done && !advance(block) && !first) first = &block;
    const uint64_t now_ms = monotonic_ms();
    if (sent_.bytes != sent_bytes) moved_ms = now_ms;
    if (first && now_ms - told_ms > kSignOfLifeMs) channel_.put(frame(Kind::Waiting, *first), {}), told_ms = now_ms;
    channel_.flush();
    bool let_go = false;
    for (Block& block : blocks)
      if (block.done && block.job) block.end(), let_go = true;
    if (!first) return sent_;
    if (channel_.hung_up()) throw Broken(Broken::Why::Gone, "it hung up");
    if (now_ms - moved_ms > kLongestMs) throw Broken(Broken::Why::Stalled, "a block that nobody finishes");
    if (!let_go) wait_for_more(blocks);
  }
}

// Where who receives is on this host, as in tests and benchmarks: of little the way to another processor is the longer one.
void BlockSender::keep_apart(const std::list<Block>& blocks) {
  uint64_t bytes = 0;
  for (const Block& block : blocks)
    if (block.job) bytes += block.layout->extent_bytes(block.job->shape.tokens);
  const bool much = bytes >= (channel_.secured() ? kApartTlsBytes : kApartBytes);
  apart_.keep_off(much && !crowded() ? channel_.beside() : 0);
}

// For a moment at most.
void BlockSender::wait_for_more(const std::list<Block>& blocks) {
  std::vector<Awaited> awaited;
  uint64_t most_us = kSliceUs;
  for (const Block& block : blocks) {
    if (block.done) continue;
    if (block.job)
      awaited.push_back({block.job->handle, block.layers_sent});
    else
      most_us = kLoadLookUs;
  }
  try {
    store_.wait_any(awaited, most_us);
  } catch (const Error&) {
    // advance() says so.
  }
}

// Whether a block that lies on disk is on its way into memory. From other hosts nothing is fetched for another one.
bool BlockSender::load(Block& block) {
  LowerTier* below = store_.lower();
  if (!below || store_.lookup(block.key).presence != Presence::OnDisk) return false;
  return has_time(block.loading_until_ms) && below->promote(block.key, kDefaultPriority) != Presence::Missing;
}

bool BlockSender::has_time(uint64_t& until_ms) {
  const uint64_t now_ms = monotonic_ms();
  if (!until_ms) until_ms = now_ms + kLoadMs;
  return now_ms < until_ms;
}

// Of a block that comes here from another host, and which who asks has as much of: it may come from that very host, and each
// would wait for the other.
bool BlockSender::has_no_more(const Block& block) const {
  if (!from_ || !block.job->fetched || block.job->sealed) return false;
  try {
    return store_.layers_now(block.job->handle).layers <= from_;
  } catch (const Error&) {
    return true;  // it is lost
  }
}

void BlockSender::miss(Block& block) {
  channel_.put(frame(Kind::Missing, block), {});
  block.end();
  block.done = true;
}

void BlockSender::refer(Block& block, const std::vector<std::string>& instead) {
  std::vector<std::byte> names(instead.size() * (kMaxName + 1));
  for (size_t i = 0; i < instead.size(); ++i)
    std::memcpy(names.data() + i * (kMaxName + 1), instead[i].data(), std::min(instead[i].size(), kMaxName));
  channel_.put(frame(Kind::Busy, block), names);
  block.end();
  block.done = true;
}

// The end of the layers that are sent: all, or those of the first half.
uint32_t BlockSender::end_of(const Block& block) const {
  const uint32_t layers = block.layout->num_layers();
  const bool large = block.layout->extent_bytes(block.job->shape.tokens) >= kLargeBytes;
  return half_ && !from_ && large && block.job->sealed ? middle_of(layers) : layers;
}

void BlockSender::begin(Block& block) {
  const Key& key = block.key;
  bool crowded = crowded_ && block.turn_until_ms;  // of those that wait for a turn one asks at a time
  if (!crowded) block.job = store_.begin_read(key, &crowded);
  if (block.job && has_no_more(block)) block.end();
  if (is_second()) {  // who waits for it has another way to get it
    if (!block.job || !block.job->sealed || from_ >= block.job->layout->layout.num_layers()) return miss(block);
  }
  if (!block.job) {
    crowded_ |= crowded;
    if (crowded && !has_time(block.turn_until_ms)) return refer(block, {});
    if (crowded || load(block)) return;
    return miss(block);
  }
  std::vector<std::string> instead;
  if (!is_second() && !(block.admitted = admission_.begin(key, node_, instead))) return refer(block, instead);
  const ReadJob& job = *block.job;
  block.layout = &job.layout->layout;
  block.last = end_of(block), block.layers_sent = is_second() ? from_ : 0;
  tell_layout(block);
  if (job.checksummed) {
    block.sums.resize(block.layout->num_layers());
    std::memcpy(block.sums.data(), window_.at(place_of(job.pieces, block.layout->checksums_offset(job.shape.tokens))),
                4 * block.sums.size());
  }
  const auto now_s = static_cast<uint32_t>(::time(nullptr));
  const uint32_t ttl_s = job.expiry_s ? std::max(job.expiry_s, now_s + 1) - now_s : 0;
  const BlockHead head{key,        job.layout->digest, job.fingerprint, job.shape.tokens,          job.shape.base_position,
                       job.parent, job.shape.priority, ttl_s,           block.layout->num_layers()};
  Frame said = frame(Kind::Head, block);
  if (block.last < head.layers) said.layer = block.last;
  channel_.put(said, bytes_of(head));
}

void BlockSender::tell_layout(const Block& block) {
  const auto& digest = block.job->layout->digest.words;
  if (told_.contains(digest)) return;
  if (told_.size() == kMostLayoutsTold) told_.clear();  // from here on the other end forgets them one by one
  told_.insert(digest);
  channel_.put(frame(Kind::Layout, block), std::as_bytes(std::span(block.layout->blob)));
}

// Sends what is ready. True if that was the last of the block.
bool BlockSender::advance(Block& block) {
  if (!block.job) {
    begin(block);
    if (block.done || !block.job) return block.done;
  }
  try {
    if (!send_ready(block)) return false;
    keep_sums(block);
    const bool whole = block.last == block.layout->num_layers();
    channel_.put(frame(whole ? Kind::Whole : Kind::Half, block), {});
    sent_.blocks += whole;
  } catch (const Error&) {
    channel_.put(frame(Kind::Lost, block), {});
  }
  if (std::exchange(block.admitted, false)) admission_.end(block.key);
  return block.done = true;
}

// True if that was all of it. Throws Error if there is no more of it.
bool BlockSender::send_ready(Block& block) {
  check_pool();
  const uint32_t layers = block.layout->num_layers();
  const auto [ready, sealed, word] = block.job->sealed ? LayersNow{layers, true, 0} : store_.layers_now(block.job->handle);
  if (ready > block.layers_sent && !block.meta_sent) send_meta(block);
  for (; block.layers_sent < std::min(ready, block.last); ++block.layers_sent) send_layer(block, block.layers_sent);
  if (!sealed || ready < layers) return false;
  if (!block.job->sealed) send_meta(block);  // its writer may have changed it until the seal
  return true;
}

// Where a client has cut the pool there are zeros, whose sum would be right: it is found out by reading them.
uint32_t BlockSender::sum_of(std::span<const std::byte> bytes) const {
  const uint32_t crc = crc32c(bytes.data(), bytes.size());
  check_pool();
  return crc;
}

void BlockSender::check_pool() const {
  if (window_.truncated()) throw Error(Code::Fenced, "the pool's memory is gone");
}

void BlockSender::send_meta(Block& block) {
  const uint32_t tokens = block.job->shape.tokens;
  const std::span meta(window_.at(place_of(block.job->pieces, block.layout->meta_offset(tokens))),
                       block.layout->meta_bytes(tokens));
  const uint32_t crc = sum_of(meta);
  if (block.meta_sent && crc == block.meta_crc) return;
  block.meta_sent = true, block.meta_crc = crc;
  Frame head = frame(Kind::Meta, block);
  head.payload_crc = crc;
  if (half_) head.layer = number_of(store_, block.job->handle);
  channel_.put_summed(head, meta);
  sent_.bytes += meta.size();
}

void BlockSender::send_layer(Block& block, uint32_t layer) {
  const uint32_t tokens = block.job->shape.tokens;
  const uint64_t length = block.layout->layer_bytes(layer, tokens);
  const std::span<const std::byte> bytes = gather(*block.job, block.layout->layer_offset(layer, tokens), length);
  Frame head = frame(Kind::Layer, block);
  head.layer = layer;
  // The writer's own sum, where it left one: what this host's memory has made of the bytes since is then found out over there.
  head.payload_crc = block.sums.empty() ? sum_of(bytes) : block.sums[layer];
  if (block.sums.empty()) block.computed.push_back(head.payload_crc);
  if (layer < from_) return channel_.put_summed(head, {});
  channel_.put_summed(head, bytes);
  if (bytes.data() == gathered_.data()) channel_.flush();  // the next ones go into the same memory
  sent_.bytes += bytes.size();
}

// For the next reader. Of a block that was being written they are left: its writer may leave its own.
void BlockSender::keep_sums(const Block& block) {
  if (block.computed.empty() || !block.job->sealed) return;
  const auto first = block.layers_sent - static_cast<uint32_t>(block.computed.size());
  const std::vector<uint32_t> all = sums_.add(block.job->handle, block.layout->num_layers(), first, block.computed);
  if (!all.empty()) store_.keep_checksums(block.job->handle, all);
}

// Of the pool's memory, or, where they lie in several pieces, together.
std::span<const std::byte> BlockSender::gather(const ReadJob& job, uint64_t offset, uint64_t length) {
  gathered_.clear();
  std::span<const std::byte> first;
  each_stretch(job.pieces, offset, length, [&](uint64_t at, uint64_t here) {
    first = {window_.at(at), here};
    if (here < length) gathered_.insert(gathered_.end(), first.begin(), first.end());
    return true;
  });
  return first.size() == length ? first : gathered_;
}

}  // namespace kv::peer
