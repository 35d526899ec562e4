#include "core/store/store.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "core/base/atomics.h"
#include "core/base/error.h"
#include "core/base/futex.h"

namespace kv {
namespace {

uint32_t realtime_s() {
  timespec now;
  ::clock_gettime(CLOCK_REALTIME_COARSE, &now);
  return static_cast<uint32_t>(now.tv_sec);
}

// Room is made ahead for batches that are no more than this part of the pool: 16 MiB of 2 GiB.
constexpr uint64_t kAheadDivisor = 128;

constexpr size_t kAhead = 8;  // blocks whose cache lines are fetched before they are needed, as in a look-up (docs/design.md §11)

// A region says itself how long it is.
uint64_t length_of(const Layout& layout, const CreateItem& item) {
  return item.region_pages ? item.region_pages * kPageBytes : layout.extent_bytes(item.tokens);
}

std::string limit_text(const char* what, uint64_t value, uint64_t limit) {
  return std::string(what) + " is " + std::to_string(value) + ", the limit is " + std::to_string(limit);
}

void check_items(std::span<const CreateItem> items, const Layout& layout, uint64_t capacity) {
  for (const CreateItem& item : items) {
    if (item.tokens == 0 || item.tokens > layout.block_tokens)
      throw Error(Code::InvalidArgument, limit_text("tokens of a block", item.tokens, layout.block_tokens));
    if (item.region_pages && !layout.is_one_page())
      throw Error(Code::InvalidArgument,
                  limit_text("bytes of a block of a region's layout", layout.extent_bytes(layout.block_tokens), kPageBytes));
    if (uint64_t{item.region_pages} * kPageBytes > capacity)
      throw Error(Code::InvalidArgument, limit_text("pages of a region", item.region_pages, capacity / kPageBytes));
    if (item.base_position > kMaxBasePosition)
      throw Error(Code::InvalidArgument, limit_text("base position", item.base_position, kMaxBasePosition));
  }
}

}  // namespace

void Store::begin_operation() {
  list_contents();
  check_memory();
  if (!fence_.empty()) throw Error(Code::Fenced, "namespace " + options_.name + " is fenced: " + fence_);
}

// ---------------------------------------------------------------- records

Key Store::key_of(uint32_t record) const {
  Key key;
  for (size_t i = 0; i < 4; ++i) key.words[i] = index_.record(record).key[i].load(std::memory_order_relaxed);
  return key;
}

Extent Store::extent_of(uint32_t record) const {
  return Extent::unpack(index_.record(record).extent.load(std::memory_order_relaxed));
}

Shape Store::shape_of(uint32_t record) const {
  return Shape::unpack(index_.record(record).shape.load(std::memory_order_relaxed));
}

// A block that goes makes room for others of its class; one in pieces makes it for single pages.
uint64_t Store::class_of(uint32_t record) const {
  const Extent extent = extent_of(record);
  return extent.in_pieces() ? kPageBytes : Arena::size_class(extent.length);
}

bool Store::expired(uint32_t expiry_s) const { return expiry_s != 0 && realtime_s() >= expiry_s; }

// Whether another host may be told of it: in memory, also while it is written, or on disk.
bool Store::servable(State state, uint8_t flags) {
  return state == State::Created || state == State::Sealed || (state == State::Disk && !(flags & kFlagDeleted));
}

// One release store commits the change. Entering ZOMBIE or QUARANTINED changes the generation, and that a PIECE goes, nothing
// else.
void Store::transition(uint32_t record, Event event, State to, uint8_t flags) {
  const Control now = control(record);
  KV_INVARIANT(allowed(now.state(), event, to));
  const bool retire = to == State::Zombie || to == State::Quarantined || now.state() == State::Piece;
  index_.record(record).control.store(Control::make(now.generation() + (retire ? 1 : 0), to, flags).word,
                                      std::memory_order_release);
  if (journal_.heard() && servable(now.state(), now.flags()) != servable(to, flags))
    journal_.note(key_of(record), servable(to, flags));
}

// The record decides; this word only tells those who wait. Whoever calls this wakes them.
void Store::publish_progress(uint32_t record, Phase phase) {
  const uint32_t layers = phase == Phase::Sealed ? layout_of(shape_of(record).layout).num_layers() : 0;
  progress_[record].store(progress_word(control(record).generation(), layers, phase), std::memory_order_release);
}

// Does a reader sleep on any progress word, or is it about to? It says so in its page, fences, and looks at the record again
// before it sleeps; we changed the record and fence before we read the page. One of the two sees the other, so no wake is lost.
bool Store::anybody_waits() const {
  fence_full();
  if (waiting_here_.load(std::memory_order_relaxed)) return true;
  for (auto& [id, session] : sessions_)
    if (session->file && session->file->page().waiting.load(std::memory_order_relaxed)) return true;
  return false;
}

// ---------------------------------------------------------------- create, seal, abort

// A file says until when its block lives. One that says longer than is asked for now goes, and one that says much less: the block
// would be lost with it.
bool Store::file_lives_for(uint32_t record, uint32_t ttl_s) const {
  const uint64_t until_s = index_.record(record).expiry_s.load(std::memory_order_relaxed), now_s = realtime_s();
  if (ttl_s == 0 || until_s == 0) return ttl_s == 0 && until_s == 0;
  return until_s <= now_s + ttl_s && until_s >= now_s + ttl_s / 2;
}

// May this block be written? If not, `out` says why. `found`: its record on disk, if it has one.
bool Store::is_claimable(const Key& key, double now, Granted& out, uint32_t& found) {
  found = index_.find_exclusive(key);
  if (found != Index::kAbsent && control(found).state() != State::Disk) {
    if (control(found).state() == State::Created) {
      out.status = Grant::Pending;
      out.handle = {found, control(found).generation()};
      return false;
    }
    if (!expired(index_.record(found).expiry_s.load(std::memory_order_relaxed))) {
      use(found, now);
      out.status = Grant::Exists;
      return false;
    }
    to_zombie(found, Event::Evict);
    counters_.expired += 1;
    found = Index::kAbsent;
  }
  return !draining_;
}

// The record on disk, if there is one, of a block that has its memory now: it makes way. True if its file is the block's as well,
// for the bytes of a key are always the same.
bool Store::take_over_file(const CreateRequest& request, uint32_t found) {
  if (found == Index::kAbsent) return false;
  if (!request.loaded && !file_lives_for(found, request.ttl_s)) return delete_disk_record(found), false;
  const bool known = request.loaded || shape_of(found).tokens != 0;  // else nobody has read until when its file lives
  drop_disk_record(found, Event::Delete);
  return known;
}

// Writes down a CREATED block in the first free record, whose memory it has already. False: a bucket chain is full, as rare as
// 448 keys of one home bucket; then the record is a zombie that is in no list.
bool Store::enter(const CreateRequest& request, const CreateItem& item, uint32_t layout_slot, Extent extent, uint32_t found,
                  double now) {
  const uint32_t record = blocks_.free_head;
  Record& r = index_.record(record);
  Upkeep& u = index_.upkeep(record);
  blocks_.free_head = u.link.load(std::memory_order_relaxed);
  const double kept_rank = found != Index::kAbsent ? rank(found) : 0;
  const bool on_disk = take_over_file(request, found);
  {
    Writing writing(r.sequence);
    u.owner.store(request.owner, std::memory_order_relaxed);
    for (size_t i = 0; i < 4; ++i) r.key[i].store(item.key.words[i], std::memory_order_relaxed);
    r.extent.store(extent.pack(), std::memory_order_relaxed);
    r.shape.store(Shape{layout_slot, request.priority, item.tokens, item.base_position}.pack(), std::memory_order_relaxed);
    u.fingerprint.store(item.fingerprint, std::memory_order_relaxed);
    const uint32_t created_s = realtime_s();
    u.created_s.store(created_s, std::memory_order_relaxed);
    const uint64_t expiry_s = request.ttl_s ? uint64_t{created_s} + request.ttl_s + 1 : 0;
    set_expiry(record, static_cast<uint32_t>(std::min<uint64_t>(expiry_s, UINT32_MAX)));
    u.parent.store(item.parent, std::memory_order_relaxed);
    u.rank.store(std::bit_cast<uint64_t>(kept_rank), std::memory_order_relaxed);
  }
  layouts_.came(layout_slot);
  add_use(record, now);
  blocks_.records += 1, blocks_.used_bytes += extent.length;
  transition(record, Event::Create, State::Created, on_disk || request.loaded ? kFlagOnDisk : 0);
  if (!index_.insert_key(item.key, record)) {
    transition(record, Event::Abort, State::Zombie, 0);
    return false;
  }
  publish_progress(record, Phase::Writing);
  blocks_.created += 1;
  blocks_.longest_pages = std::max(blocks_.longest_pages, extent.length / kPageBytes);
  return true;
}

// One attempt at one item, without making room. A block's first use is counted here, not when it is sealed: a prompt's blocks are
// claimed together and sealed as they are computed, and the later ones should not outlive those before them for that.
void Store::grant(const CreateRequest& request, const CreateItem& item, const KnownLayout& known, double now, Granted& out) {
  uint32_t found;
  bool file_goes = false;  // and no record tells of it
  if (!is_claimable(item.key, now, out, found)) return;
  if (blocks_.free_head == Index::kAbsent && disk_.spare_records()) {
    if (disk_.blocks.size() && disk_.blocks.least().record == found) {
      file_goes = !request.loaded && !file_lives_for(found, request.ttl_s);
      found = Index::kAbsent;
    }
    free_spare_record();
  }
  if (blocks_.free_head == Index::kAbsent) return;
  const uint64_t length = length_of(known.layout, item);
  const uint32_t record = blocks_.free_head;
  std::optional<uint64_t> offset = item.region_pages ? arena_.allocate_pages(length, record) : arena_.allocate(length, record);
  if (!offset && room_.reserved && arena_.claim({room_.reserved->offset, length}, record))
    offset = std::exchange(room_.reserved, {})->offset;
  if (!offset) return;
  const Extent extent{*offset, length};
  if (!enter(request, item, layout_slot(known.id), extent, found, now)) {
    pins_.add_zombie(record);  // whoever makes room finds it
    return;
  }
  if (file_goes) file_must_go(item.key);
  counters_.creates += 1;
  const uint64_t generation = control(record).generation();
  out = {Grant::Granted, {record, generation}, extent};
  blocks_.unlisted.push_back({record, generation});  // not a copy of what was just written in parts: it would wait
}

bool Store::grow_pool() {
  const SlicedUnlock away(mutex_);
  return pool_.grow();
}

std::vector<Granted> Store::create(const CreateRequest& request) {
  if (request.items.size() > kMaxKeysPerMessage)
    throw Error(Code::InvalidArgument, limit_text("the number of keys", request.items.size(), kMaxKeysPerMessage));
  if (request.priority > kMaxPriority) throw Error(Code::InvalidArgument, limit_text("priority", request.priority, kMaxPriority));
  const Entry entry(*this);
  check_pool();
  Session* owner = &session_of(request.owner);
  const LayoutTable::Known known = layouts_.by_id(request.layout);
  const Layout& layout = known->layout;
  check_items(request.items, layout, pool_.capacity());
  std::vector<Granted> out(request.items.size());
  double now = use_now();
  auto still_there =
      [&]()
          REQUIRES(mutex_) {  // the lock was given away: its session's end takes what was granted to it, a layout's went with it
            owner = &session_of(request.owner);
            static_cast<void>(layouts_.by_id(request.layout));
            now = std::min(now, clock_.value);  // all scores may have been divided
          };
  // The lock is given away on the way only where nothing was evicted for this request yet: others would take it.
  auto attempt = [&](bool in_slices) REQUIRES(mutex_) {
    std::vector<size_t> missing;
    Slice slice(kSlice);
    for (size_t i = 0; i < std::min(kAhead, out.size()); ++i) index_.prefetch_bucket(request.items[i].key);
    for (size_t i = 0; i < out.size(); ++i) {
      if (i + kAhead < out.size()) index_.prefetch_bucket(request.items[i + kAhead].key);
      if (out[i].status != Grant::NoSpace) continue;
      grant(request, request.items[i], *known, now, out[i]);
      if (out[i].status == Grant::Granted) add_unsealed(*owner, out[i].handle.record);
      if (out[i].status == Grant::NoSpace) missing.push_back(i);
      if (in_slices && slice.over()) mutex_.give_way(), still_there(), slice.again();
    }
    return missing;
  };
  std::vector<size_t> missing = attempt(true);
  // The arena's frontier, not the pool's: a step that another thread has just taken may not have reached the arena yet.
  while (!missing.empty() && !draining_ && index_.header().frontier.load(std::memory_order_relaxed) < pool_.capacity()) {
    const bool more = grow_pool();
    still_there();
    missing = attempt(true);
    if (!more) break;
  }
  // Twice: a victim pinned at the last moment stays a zombie and frees nothing.
  for (int round = 0; round < 2 && !missing.empty() && !draining_; ++round) {
    make_room(length_of(layout, request.items[missing[0]]), missing.size());
    still_there();
    missing = attempt(false);
  }
  for (size_t tries = missing.size(); tries > 0 && !missing.empty() && !draining_;
       --tries) {  // blocks of other lengths in the batch
    const size_t before = missing.size();
    make_room(length_of(layout, request.items[missing.back()]), 1);
    still_there();
    missing = attempt(false);
    if (missing.size() == before) break;
  }
  if (const uint64_t length = out.empty() ? 0 : length_of(layout, request.items[0]);
      out.size() * length <= pool_.capacity() / kAheadDivisor && out.size() <= index_.max_blocks() / kAheadDivisor)
    room_.ahead = {length, out.size()};
  room_.reserved.reset();
  counters_.no_space += missing.size();
  return out;
}

// A claimed block is found by its key at once, which is what its writer and other claims wait for. By its contents only what is
// sealed is found, so the finder learns of it after the answer, at the latest when the store is entered again. What was given
// up meanwhile is passed over.
void Store::list_contents() {
  std::erase_if(blocks_.unlisted, [this](Handle claimed) { return control(claimed.record).generation() != claimed.generation; });
  for (size_t i = 0; i < std::min(kAhead, blocks_.unlisted.size()); ++i) index_.prefetch_contents(blocks_.unlisted[i].record);
  for (size_t i = 0; i < blocks_.unlisted.size(); ++i) {
    if (i + kAhead < blocks_.unlisted.size()) index_.prefetch_contents(blocks_.unlisted[i + kAhead].record);
    index_.insert_contents(blocks_.unlisted[i].record);
  }
  blocks_.unlisted.clear();
}

void Store::finish_claims() {
  const Lock lock(mutex_);
  list_contents();
}

Done Store::seal_one(uint32_t owner, const Seal& block) {
  const auto [handle, checksummed] = block;
  if (handle.record >= index_.max_blocks()) return Done::Stale;
  const Control now = control(handle.record);
  if (now.generation() != handle.generation || now.state() != State::Created) return Done::Stale;
  if (index_.upkeep(handle.record).owner.load(std::memory_order_relaxed) != owner) return Done::NotOwner;
  // A region's run is no block. Whoever reads one goes by its layout, so an extent that is shorter would be read past its end.
  const Shape shape = shape_of(handle.record);
  if (extent_of(handle.record).length != layout_of(shape.layout).extent_bytes(shape.tokens)) return Done::Stale;
  const uint8_t flags = (now.flags() & kFlagOnDisk) | (checksummed ? kFlagChecksummed : 0);
  transition(handle.record, Event::Seal, State::Sealed, flags);
  blocks_.created -= 1, room_.chances += 1;
  counters_.seals += 1;
  clock_.sealed += std::max(static_cast<double>(extent_of(handle.record).length) / static_cast<double>(options_.capacity_bytes),
                            1.0 / index_.max_blocks());
  drop_unsealed(*sessions_.at(owner), handle.record);
  policy_.insert(class_of(handle.record), handle.record, rank(handle.record));
  remember_expiry(handle.record);
  publish_progress(handle.record, Phase::Sealed);
  if (options_.disk) wish_to_write(handle.record, shape.priority >= options_.write_at_once_priority);
  return Done::Ok;
}

std::vector<Done> Store::seal(uint32_t owner, std::span<const Seal> blocks) {
  std::vector<Done> out;
  out.reserve(blocks.size());
  bool wake;
  {
    const Entry entry(*this);
    for (const Seal& block : blocks) out.push_back(seal_one(owner, block));
    wake = anybody_waits();
  }
  if (wake)  // without the lock: a thousand may sleep on one word, and nobody else has to wait for them
    for (size_t i = 0; i < out.size(); ++i)
      if (out[i] == Done::Ok) futex_wake_all(progress_[blocks[i].handle.record]);
  return out;
}

// Also takes a block that was quarantined while its writer could not reach us: the writer says it has stopped.
Done Store::abort(uint32_t owner, Handle handle) {
  const Entry entry(*this);
  if (handle.record >= index_.max_blocks()) return Done::Stale;
  const Control now = control(handle.record);
  const bool created = now.state() == State::Created && now.generation() == handle.generation;
  const bool quarantined = now.state() == State::Quarantined && now.generation() == handle.generation + 1;
  if (!created && !quarantined) return Done::Stale;
  if (index_.upkeep(handle.record).owner.load(std::memory_order_relaxed) != owner) return Done::NotOwner;
  if (quarantined) blocks_.quarantined -= 1;
  drop_unsealed(*sessions_.at(owner), handle.record);
  to_zombie(handle.record, Event::Abort);
  counters_.aborts += 1;
  return Done::Ok;
}

void Store::mark_layer(Handle handle, uint32_t layers) {
  const Entry entry(*this);
  if (handle.record >= index_.max_blocks()) throw Error(Code::InvalidArgument, "no such block");
  const Control now = control(handle.record);
  if (now.generation() != handle.generation || now.state() != State::Created)
    throw Error(Code::BlockLost, "the block is not being written");
  const uint32_t limit = layout_of(shape_of(handle.record).layout).num_layers();
  if (layers > limit) throw Error(Code::InvalidArgument, limit_text("layers ready", layers, limit));
  progress_[handle.record].store(progress_word(handle.generation, layers, Phase::Writing), std::memory_order_release);
  if (anybody_waits()) futex_wake_all(progress_[handle.record]);
}

}  // namespace kv
