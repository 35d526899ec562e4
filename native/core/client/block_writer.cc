// The blocks one create granted: filling, publishing layers in order, sealing, giving up.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/base/checksum.h"
#include "core/base/copy.h"
#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/client/client.h"
#include "core/format/meta.h"

namespace kv {
namespace {
// Blocks between a look for the page's translation, which the processor has of few, and the block's turn.
constexpr size_t kPagesAhead = 8;
}  // namespace

// Of those that were granted, and that nobody has given back since.
void BlockWriter::prepare(std::span<const size_t> which, const Chain* chain) {
  const Copying held = copying();
  PageTables::Uses uses(*attachment_->tables);
  std::vector<std::byte> meta;
  for (size_t k = 0; k < which.size(); ++k) {
    const size_t i = which[k], later = which[std::min(k + kPagesAhead, which.size() - 1)];
    if (items_[later].open) __builtin_prefetch(memory(later) + layout_.checksums_offset(items_[later].wanted.tokens), 1);
    if (!items_[i].open) continue;
    attachment_->tables->writing(items_[i].extent);
    uses.add(items_[i].extent);
    prepare_one(i, chain, meta);
  }
  lines_written();
}

// Pads and the areas behind the layers: the extent still has the bytes of the block before, and they are in no cache.
void BlockWriter::prepare_one(size_t i, const Chain* chain, std::vector<std::byte>& meta) {
  const uint32_t n = items_[i].wanted.tokens;
  std::byte* block = memory(i);
  for (uint32_t layer = 0; layer < layout_.num_layers(); ++layer) {
    const uint64_t end = layout_.layer_offset(layer, n) + layout_.layer_bytes(layer, n);
    std::memset(block + end, 0, layout_.layer_offset(layer + 1, n) - end);
  }
  const uint64_t sums = layout_.checksums_offset(n), begin = layout_.meta_offset(n), meta_bytes = layout_.meta_bytes(n);
  write_zeros(block + sums, begin - sums);
  if (meta_bytes == 0) return;
  meta.assign(round_up(meta_bytes, kLineBytes), std::byte{0});
  write_meta(i, chain, std::span(meta).first(meta_bytes));
  write_lines(block + begin, meta.data(), meta.size());
}

void BlockWriter::write_meta(size_t i, const Chain* chain, std::span<std::byte> meta) const {
  if (!chain) return;
  const uint32_t n = items_[i].wanted.tokens;
  const uint64_t* extra = chain->extra(i);
  const uint64_t extra_count = uint64_t{n} * chain->extra_words();
  const bool has_extra = extra && std::any_of(extra, extra + extra_count, [](uint64_t id) { return id != 0; });
  const uint64_t need = sizeof(MetaHead) + 4ull * n + (has_extra ? 8 * extra_count : 0);
  if (need > meta.size()) return;  // a layout without room for it: such blocks are found by prefix only
  const bool has_identity = need + sizeof(Key) <= meta.size();
  const MetaHead head{.magic = kMetaMagic,
                      .tokens = n,
                      .extra_words = has_extra ? chain->extra_words() : 0,
                      .has_identity = has_identity,
                      .parent = chain->parent_key(i),
                      .content = chain->content_keys()[i]};
  std::memcpy(meta.data(), &head, sizeof head);
  std::memcpy(&meta[sizeof head], chain->tokens(i), 4 * n);
  if (has_extra) std::memcpy(&meta[sizeof head + 4 * n], extra, 8 * extra_count);
  if (has_identity) std::memcpy(&meta[identity_offset(head)], &chain->identity(), sizeof(Key));
}

// Quarantined while the daemon was away, perhaps: it may take them back now, since this writer has stopped.
void BlockWriter::give_up_lost(std::span<const protocol::BlockItem> blocks, std::span<const uint8_t> answers) {
  if (std::all_of(answers.begin(), answers.end(), [](uint8_t a) { return a == static_cast<uint8_t>(Done::Ok); })) return;
  attachment_->ask(protocol::Op::Abort, static_cast<uint32_t>(blocks.size()),
                   {reinterpret_cast<const uint8_t*>(blocks.data()), blocks.size_bytes()});
}

// The answers to seals that were sent along.
void BlockWriter::settle_seals(size_t wanted, std::span<const uint8_t> answers) {
  const auto sealed = static_cast<size_t>(std::count(answers.begin(), answers.end(), static_cast<uint8_t>(Done::Ok)));
  if (sealed != wanted)
    throw Error(Code::BlockLost, std::to_string(wanted - sealed) + " of " + std::to_string(wanted) +
                                     " blocks were aborted or lost their session before the seal");
}

void BlockWriter::take_grants(std::span<const size_t> which, std::span<const protocol::GrantItem> grants) {
  std::vector<Handle> opened;
  opened.reserve(which.size());
  for (size_t k = 0; k < which.size(); ++k) {
    Item& item = items_[which[k]];
    item.status = static_cast<Grant>(grants[k].status);
    item.handle = {grants[k].record, grants[k].generation};
    item.extent = {grants[k].offset, grants[k].length};
    item.open = item.status == Grant::Granted;
    if (item.open) opened.push_back({grants[k].record, grants[k].generation});
  }
  if (!opened.empty()) attachment_->opened(this, opened);
}

// Asks for these items, in messages of at most kMaxKeysPerMessage, the first of which seals `sealing`.
void BlockWriter::claim(std::span<const size_t> which, BlockWriter* sealing, const Chain* chain) {
  const auto hash_contents = [&] {
    if (chain && sizeof(MetaHead) < layout_.meta_bytes(layout_.block_tokens)) chain->content_keys();
  };
  for (size_t first = 0; first < which.size() || (first == 0 && sealing); first += kMaxKeysPerMessage) {
    const auto part = which.subspan(std::min(first, which.size()),
                                    std::min<size_t>(kMaxKeysPerMessage, which.size() - std::min(first, which.size())));
    std::vector<size_t> open;
    std::vector<protocol::BlockItem> seals;
    std::unique_lock<std::shared_mutex> uncopied;  // until they are sealed
    if (sealing && first == 0) {
      uncopied = sealing->without_copies();
      open = sealing->open_items();
      sealing->check_given(open);
      if (open.size() > kMaxKeysPerMessage || sealing->attachment_ != attachment_) {
        uncopied = {};
        sealing->seal_apart(open);
        open.clear();
      }
      seals = sealing->block_items(open, true);
    }
    std::vector<uint8_t> body;
    body.reserve(sizeof(protocol::CreateHead) + seals.size() * sizeof seals[0] + part.size() * sizeof(protocol::CreateItem));
    protocol::append(body, protocol::CreateHead{layout_id_, priority_, ttl_s_, static_cast<uint32_t>(seals.size())});
    protocol::append(body, seals);
    // Filled field by field: a copy of what was just written in parts waits for them.
    std::vector<protocol::CreateItem> wanted(part.size());
    for (size_t k = 0; k < part.size(); ++k) {
      const CreateItem& from = items_[part[k]].wanted;
      protocol::CreateItem& to = wanted[k];
      to.key = from.key, to.fingerprint = from.fingerprint;
      to.tokens = from.tokens, to.base_position = from.base_position, to.parent = from.parent;
    }
    protocol::append(body, wanted);
    std::vector<uint8_t> sealed;
    const auto take = [&](std::span<const uint8_t> answer) {
      protocol::Reader reader(answer);
      const auto done = reader.take<uint8_t>(seals.size());
      reader.skip(round_up(seals.size(), 8) - seals.size());
      const auto grants = reader.take<protocol::GrantItem>(part.size());
      if (!reader.at_end()) throw Error(Code::Detached, "the daemon's answer to create cannot be read");
      sealed.assign(done.begin(), done.end());
      if (!open.empty()) sealing->end_open(open, true);
      take_grants(part, grants);
    };
    try {
      attachment_->ask(protocol::Op::Create, static_cast<uint32_t>(part.size()), body, hash_contents, take);
    } catch (const Error& error) {
      // Whoever attaches anew asks again, with the same seals. After any other error they may have been made.
      if (error.code != Code::Detached && !open.empty()) sealing->end_open(open, true);
      throw;
    }
    uncopied = {};
    prepare(part, chain);
    give_up_lost(seals, sealed);
    settle_seals(seals.size(), sealed);
  }
}

// What is given out may change: the checksum of what was copied there before is forgotten.
std::byte* BlockWriter::bytes(size_t i) {
  items_[i].layers_given = layout_.num_layers();
  std::memset(layers(i), kGiven, layout_.num_layers());
  return memory(i);
}

std::byte* BlockWriter::layer(size_t i, uint32_t layer) {
  uint8_t& flags = layers(i)[layer];
  if (!(flags & kGiven)) std::atomic_ref(items_[i].layers_given).fetch_add(1);  // other layers are given out by other threads
  flags = kGiven;
  return memory(i) + layout_.layer_offset(layer, items_[i].wanted.tokens);
}

void BlockWriter::check_given(std::span<const size_t> which) const {
  for (size_t i : which) {
    const Item& item = items_[i];
    if (!item.open || item.layers_given == layout_.num_layers()) continue;
    std::string missing;
    for (uint32_t first = 0, end; first < layout_.num_layers(); first = end + 1) {
      for (end = first; end < layout_.num_layers() && !(layers(i)[end] & kGiven);) ++end;
      if (end > first)
        missing +=
            (missing.empty() ? "" : ", ") + std::to_string(first) + (end > first + 1 ? " to " + std::to_string(end - 1) : "");
    }
    throw Error(Code::InvalidArgument, "block " + std::to_string(i) + " of " + std::to_string(items_.size()) + ": of its " +
                                           std::to_string(layout_.num_layers()) + " layers nobody wrote " + missing +
                                           "; write them, abort the block, or seal with zero_rest=True");
  }
}

void BlockWriter::zero_rest(std::span<const size_t> which) {
  const Copying held = copying();
  for (size_t i : which) {
    if (!items_[i].open) continue;
    for (uint32_t l = 0; l < layout_.num_layers(); ++l)
      if (!(layers(i)[l] & kGiven)) write_zeros(layer(i, l), layout_.layer_bytes(l, items_[i].wanted.tokens));
  }
  lines_written();
}

void BlockWriter::mark_layer(size_t i, uint32_t layer, const Copying&) {
  Item& item = items_[i];
  if (!item.open) throw Error(Code::Closed, "this block was sealed or aborted");
  if (layer != item.layers_marked || layer >= layout_.num_layers())
    throw Error(Code::InvalidArgument, "layer is " + std::to_string(layer) + ", layers are published in order and the next is " +
                                           std::to_string(item.layers_marked) + " of " + std::to_string(layout_.num_layers()));
  if (!(layers(i)[layer] & kGiven))
    throw Error(Code::InvalidArgument, "layer " + std::to_string(layer) + " was not written: its memory was never asked for");
  item.layers_marked += 1;
  std::atomic<uint64_t>& word = attachment_->progress(item.handle.record);
  word.store(progress_word(item.handle.generation, item.layers_marked, Phase::Writing), std::memory_order_release);
  futex_wake_all(word);
}

BlockWriter::Copying BlockWriter::copies() { return {attachment_->copies(), std::shared_lock(copying_mutex_, std::defer_lock)}; }

BlockWriter::Copying BlockWriter::copying() {
  Copying held = copies();
  if (!attachment_->foreign()) held.client_.lock(), held.writer_.lock();  // as without_copies()
  if (closed()) throw Error(Code::Closed, "the client was closed");
  return held;
}

std::optional<BlockWriter::Copying> BlockWriter::try_copying() {
  Copying held = copies();
  if (!attachment_->foreign() && (!held.client_.try_lock() || !held.writer_.try_lock())) return std::nullopt;
  if (closed()) throw Error(Code::Closed, "the client was closed");
  return held;
}

void BlockWriter::copy_layer(size_t i, uint32_t layer, const void* source, uint64_t length) {
  const uint32_t n = items_[i].wanted.tokens;
  const uint64_t whole = layout_.layer_bytes(layer, n), copied = std::min(length, whole);
  std::byte* target = this->layer(i, layer);
  uint32_t sum = copy_crc32c(target, source, copied);
  std::memset(target + copied, 0, whole - copied);
  sum = crc32c(target + copied, whole - copied, sum);
  std::memcpy(memory(i) + layout_.checksums_offset(n) + 4 * layer, &sum, sizeof sum);
  layers(i)[layer] |= kChecksummed;
}

std::vector<size_t> BlockWriter::open_items() const {
  std::vector<size_t> out;
  for (size_t i = 0; i < items_.size(); ++i)
    if (items_[i].open) out.push_back(i);
  return out;
}

std::vector<protocol::BlockItem> BlockWriter::block_items(std::span<const size_t> which, bool seal) const {
  std::vector<protocol::BlockItem> out;
  for (size_t i : which) {
    const Item& item = items_[i];
    if (!item.open) continue;
    const bool sums =
        seal && std::all_of(layers(i), layers(i) + layout_.num_layers(), [](uint8_t layer) { return layer & kChecksummed; });
    out.push_back({item.handle.record, sums, item.handle.generation});
  }
  return out;
}

// Waits for the copies that are under way: what is sealed is whole, and to what is given back nobody writes.
std::unique_lock<std::shared_mutex> BlockWriter::without_copies() {
  std::unique_lock lock(copying_mutex_, std::defer_lock);
  if (!attachment_->foreign()) lock.lock();  // else a thread of the parent's may have had it at the fork
  return lock;
}

// The caller holds without_copies().
std::vector<protocol::BlockItem> BlockWriter::end_open(std::span<const size_t> which, bool seal) {
  std::vector<protocol::BlockItem> out = block_items(which, seal);
  for (size_t i : which) {
    if (items_[i].open) attachment_->tables->used(items_[i].extent);  // also what it wrote long after its create
    items_[i].given_up |= items_[i].open && !seal;
    items_[i].open = false;
  }
  if (!out.empty()) attachment_->ended(this, out);
  return out;
}

void BlockWriter::seal(std::span<const size_t> which, bool zero_rest) {
  if (closed()) throw Error(Code::Closed, "the client was closed, and its unsealed blocks given up");
  if (zero_rest) this->zero_rest(which);
  std::unique_lock uncopied = without_copies();
  check_given(which);
  const auto given_up = std::count_if(which.begin(), which.end(), [&](size_t i) { return items_[i].given_up; });
  const std::vector<protocol::BlockItem> blocks = end_open(which, true);
  uncopied = {};
  std::vector<uint8_t> all;
  for (size_t first = 0; first < blocks.size(); first += kMaxKeysPerMessage) {
    const size_t count = std::min<size_t>(kMaxKeysPerMessage, blocks.size() - first);
    const std::span<const protocol::BlockItem> part(&blocks[first], count);
    const std::vector<uint8_t> answers = attachment_->ask(protocol::Op::Seal, static_cast<uint32_t>(count),
                                                          {reinterpret_cast<const uint8_t*>(part.data()), part.size_bytes()});
    give_up_lost(part, answers);
    all.insert(all.end(), answers.begin(), answers.end());
  }
  settle_seals(blocks.size() + static_cast<size_t>(given_up), all);
}

// In a message of its own, to the daemon that granted them: in another pool their handles are other blocks'.
void BlockWriter::seal_apart(std::span<const size_t> which) {
  try {
    seal(which);
  } catch (const Error& error) {
    if (error.code != Code::Detached && error.code != Code::DeadlineExceeded) throw;
    throw Error(Code::BlockLost, std::to_string(which.size()) + " blocks were to be sealed first: " + error.what());
  }
}

// A writer that was dropped without a word.
BlockWriter::~BlockWriter() {
  const std::vector<size_t> open = open_items();
  if (open.empty() || attachment_->foreign()) return;
  try {
    abort(open);
  } catch (const Error&) {
    // The session is closed or refuses: its end gives the blocks up.
  }
}

void BlockWriter::abort(std::span<const size_t> which) {
  std::unique_lock uncopied = without_copies();
  const std::vector<protocol::BlockItem> blocks = end_open(which, false);
  uncopied = {};
  for (size_t first = 0; first < blocks.size(); first += kMaxKeysPerMessage) {
    const size_t count = std::min<size_t>(kMaxKeysPerMessage, blocks.size() - first);
    try {
      attachment_->ask(protocol::Op::Abort, static_cast<uint32_t>(count),
                       {reinterpret_cast<const uint8_t*>(&blocks[first]), count * sizeof blocks[0]});
    } catch (const Error& error) {
      // The daemon that cannot be told gives the blocks up itself when the session ends, or hears when it is resumed that they
      // are not among the open ones.
      if (error.code != Code::Detached && error.code != Code::DeadlineExceeded) throw;
      return;
    }
  }
}

bool BlockWriter::wait_pending(const timespec& deadline) {
  for (;;) {
    std::vector<size_t> pending;
    for (size_t i = 0; i < items_.size(); ++i)
      if (items_[i].status == Grant::Pending) pending.push_back(i);
    if (pending.empty()) return true;
    const Item& item = items_[pending[0]];
    std::atomic<uint64_t>& word = attachment_->progress(item.handle.record);
    const PinBoard::Waiting waiting(*attachment_->board);
    for (;;) {
      const uint64_t seen = word.load(std::memory_order_acquire);
      const Control now = attachment_->index.control(item.handle.record);
      if (now.generation() != item.handle.generation || now.state() != State::Created || !attachment_->current()) break;
      if (passed(deadline)) return false;
      futex_wait(word, static_cast<uint32_t>(seen), deadline);
    }
    claim(pending, nullptr, chain_ ? &*chain_ : nullptr);
  }
}

std::shared_ptr<BlockWriter> Client::create(const Create& request) {
  const std::shared_ptr<Attachment> at = usable();
  if (request.attachment && *request.attachment != at->number())
    throw Error(Code::Detached, "attached anew: layouts may have other numbers here");
  const Attachment::Known known = at->layout(request.layout);
  const Layout& layout = known->layout;
  auto grants = std::make_shared<BlockWriter>(at, layout, request.layout, request.priority, request.ttl_s);
  if (request.chain) grants->chain_ = *request.chain;
  const uint64_t* fingerprints = request.chain ? request.chain->fingerprints() : nullptr;
  grants->items_.resize(request.keys.size());
  grants->layers_.resize(request.keys.size() * layout.num_layers());
  std::vector<size_t> all(request.keys.size());
  for (size_t i = 0; i < request.keys.size(); ++i) {
    CreateItem& item = grants->items_[i].wanted;
    item.key = request.keys[i];
    item.tokens = !request.token_counts.empty() ? request.token_counts[i]
                  : request.chain               ? request.chain->token_count(i)
                                                : layout.block_tokens;
    if (request.chain && item.tokens != request.chain->token_count(i))
      throw Error(Code::InvalidArgument, "token_counts is " + std::to_string(item.tokens) + " for a chunk of " +
                                             std::to_string(request.chain->token_count(i)) + " tokens");
    if (item.tokens == 0 || item.tokens > layout.block_tokens)
      throw Error(Code::InvalidArgument,
                  "token_counts is " + std::to_string(item.tokens) + ", must be 1 to " + std::to_string(layout.block_tokens));
    if (request.chain) {
      item.fingerprint = fingerprints[i];
      item.base_position = static_cast<uint32_t>(request.chain->start_token(i));
      item.parent = static_cast<uint32_t>(request.chain->parent_key(i).words[0]);
    }
    all[i] = i;
  }
  grants->claim(all, request.sealing, request.chain);
  return grants;
}

}  // namespace kv
