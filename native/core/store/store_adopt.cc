// Where a store's table comes from: laid out new, or taken over from a daemon that is gone. The block table is the only truth;
// hash table, free list, arena and eviction order are derived from it here and never read.

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cstring>

#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/base/process.h"
#include "core/store/store.h"

namespace kv {
namespace {

struct Geometry {
  uint64_t layouts, geometry, records, upkeep, buckets, finder, total;
};

Geometry geometry_for(uint32_t max_blocks, uint64_t capacity, uint32_t layouts = kMaxLayouts) {
  Geometry g;
  g.layouts = kPageBytes;
  g.geometry = g.layouts + layouts * kLayoutSlotBytes;
  g.records = round_up(g.geometry + 8 * Arena::geometry_words(capacity), kPageBytes);
  g.upkeep = round_up(g.records + uint64_t{sizeof(Record)} * max_blocks, kPageBytes);
  g.buckets = round_up(g.upkeep + uint64_t{sizeof(Upkeep)} * max_blocks, kPageBytes);
  g.finder = round_up(g.buckets + uint64_t{sizeof(Bucket)} * Index::buckets_for(max_blocks), kPageBytes);
  g.total = round_up(g.finder + uint64_t{sizeof(FinderBucket)} * Finder::buckets_for(max_blocks), kPageBytes);
  return g;
}

Fd duplicate(int fd) {
  Fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!copy) throw Error(Code::InvalidArgument, errno_text("duplicating a segment's descriptor"));
  return copy;
}

uint64_t file_bytes(int fd) {
  struct stat st;
  if (::fstat(fd, &st) != 0) throw Error(Code::InvalidArgument, errno_text("fstat of a segment"));
  return static_cast<uint64_t>(st.st_size);
}

void need_size(const char* what, int fd, uint64_t bytes) {
  if (file_bytes(fd) < bytes)
    throw Error(Code::IncompatibleVersion, std::string(what) + " has " + std::to_string(file_bytes(fd)) + " bytes, " +
                                               std::to_string(bytes) + " are needed");
}

// An older table has fewer: by its length, for its header is not believed yet.
uint32_t slots_of(const Store::Options& options) {
  const uint64_t older = geometry_for(options.max_blocks, options.capacity_bytes, kFirstLayouts).total;
  return file_bytes(options.table_fd) == older ? kFirstLayouts : kMaxLayouts;
}

uint64_t adopted_frontier(const Store::Options& options) {
  if (!options.adopt) return 0;
  need_size("the table", options.table_fd, kPageBytes);
  Mapping head(options.table_fd, kPageBytes, false);
  const uint64_t frontier = head.at<TableHeader>(0)->frontier.load();
  const uint64_t limit = std::min(options.capacity_bytes, file_bytes(options.pool_fd));
  if (frontier > limit || frontier % kPageBytes)
    throw Error(Code::IncompatibleVersion, "the table says " + std::to_string(frontier) +
                                               " bytes of pool exist, the file and the configuration have " +
                                               std::to_string(limit));
  return frontier;
}

// A part of a region has any length. Its layout has blocks of one token.
bool may_be_region(State state, const Layout& layout) { return state != State::Sealed && layout.is_one_page(); }

}  // namespace

uint64_t Store::table_bytes(uint32_t max_blocks, uint64_t capacity_bytes, uint32_t layouts) {
  return geometry_for(max_blocks, capacity_bytes, layouts).total;
}

void Store::retire(int table_fd) {
  if (file_bytes(table_fd) < kPageBytes) return;
  Mapping head(table_fd, kPageBytes, true);
  if (std::memcmp(head.at<TableHeader>(0)->magic, kTableMagic, sizeof kTableMagic) == 0)
    head.at<TableHeader>(0)->epoch.store(kEpochRetired, std::memory_order_release);
}

Store::Store(const Options& options)
    : options_(options),
      table_fd_(duplicate(options.table_fd)),
      progress_fd_(duplicate(options.progress_fd)),
      pool_(options.pool_fd, options.capacity_bytes, adopted_frontier(options), options.huge_after_ms),
      arena_(1),
      places_(options.max_blocks),
      policy_(RecordPlaces{&places_}, options.max_blocks, options.capacity_bytes),
      pins_(options.max_blocks),
      expiries_(options.max_blocks),
      disk_(RecordPlaces{&places_}, options.max_blocks) {
  options_.table_fd = table_fd_.get();
  options_.progress_fd = progress_fd_.get();
  options_.pool_fd = pool_.fd();
  if (options.max_blocks == 0 || options.max_blocks > kMaxRecords)
    throw Error(Code::InvalidArgument,
                "max_blocks is " + std::to_string(options.max_blocks) + ", must be 1 to " + std::to_string(kMaxRecords));
  const Geometry g = geometry_for(options.max_blocks, options.capacity_bytes, slots_of(options));
  need_size("the table", options.table_fd, g.total);
  need_size("the progress words", options.progress_fd, progress_bytes(options.max_blocks));
  table_ = Mapping(options.table_fd, g.total, true);
  progress_map_ = Mapping(options.progress_fd, round_up(progress_bytes(options.max_blocks), kPageBytes), true);
  progress_guard_ = Guard(progress_map_, &progress_truncated_);
  progress_ = progress_map_.at<std::atomic<uint64_t>>(0);
  if (options.adopt)
    adopt();
  else
    lay_out_new_table();
  index_.header().peers_up.store(0, std::memory_order_relaxed);  // of this daemon there are none yet
  index_.header().peer_bytes_per_s.store(0, std::memory_order_relaxed);
  pool_.start(
      [this](uint64_t frontier) {
        const Lock lock(mutex_);
        index_.header().frontier.store(frontier, std::memory_order_release);
        arena_.set_frontier(frontier), room_.chances += 1;
      },
      [this](uint64_t faulted) { index_.header().faulted.store(faulted, std::memory_order_release); });
}

Store::~Store() { close(); }

void Store::close() { pool_.stop(); }

void Store::lay_out_new_table() {
  const Geometry g = geometry_for(options_.max_blocks, options_.capacity_bytes, slots_of(options_));
  auto* header = table_.at<TableHeader>(0);
  header->version = kOldestFormat;
  header->max_blocks = options_.max_blocks;
  header->buckets = Index::buckets_for(options_.max_blocks);
  header->header_bytes = sizeof(TableHeader);
  header->capacity_bytes = options_.capacity_bytes;
  header->records_offset = g.records;
  header->upkeep_offset = g.upkeep;
  header->buckets_offset = g.buckets;
  header->layouts_offset = g.layouts;
  header->geometry_offset = g.geometry;
  header->finder_buckets = Finder::buckets_for(options_.max_blocks);
  header->finder_offset = g.finder;
  header->total_bytes = g.total;
  std::copy(options_.pool_id.begin(), options_.pool_id.end(), header->pool_id);
  header->epoch.store(1);
  header->score_ns.store(1);
  index_ = Index(table_.data());
  keep_origin();
  layouts_.open(table_.data());
  arena_ = Arena(options_.capacity_bytes, table_.at<std::atomic<uint64_t>>(g.geometry));
  for (uint32_t record = options_.max_blocks; record-- > 0;) {
    index_.record(record).control.store(Control::make(1, State::Free).word, std::memory_order_relaxed);
    index_.upkeep(record).link.store(blocks_.free_head, std::memory_order_relaxed);
    blocks_.free_head = record;
  }
  header->epoch.store(2, std::memory_order_release);
  std::memcpy(header->magic, kTableMagic, sizeof kTableMagic);  // last: a table without it was never finished
}

void Store::adopt() {
  const Geometry g = geometry_for(options_.max_blocks, options_.capacity_bytes, slots_of(options_));
  auto* header = table_.at<TableHeader>(0);
  if (std::memcmp(header->magic, kTableMagic, sizeof kTableMagic) != 0 || header->version < kOldestFormat ||
      header->version > kFormatVersion || header->max_blocks != options_.max_blocks ||
      (header->capacity_bytes & ~kTableHasPieces) != options_.capacity_bytes ||
      header->buckets != Index::buckets_for(options_.max_blocks) || header->records_offset != g.records ||
      header->upkeep_offset != g.upkeep || header->buckets_offset != g.buckets || header->layouts_offset != g.layouts ||
      header->geometry_offset != g.geometry || header->finder_buckets != Finder::buckets_for(options_.max_blocks) ||
      header->finder_offset != g.finder || header->total_bytes != g.total ||
      !std::equal(options_.pool_id.begin(), options_.pool_id.end(), header->pool_id))
    throw Error(Code::IncompatibleVersion, "the table is of another version or geometry");
  const uint64_t epoch = header->epoch.load();
  if (epoch == kEpochRetired) throw Error(Code::IncompatibleVersion, "the table was retired");
  header->epoch.store(epoch + (epoch & 1 ? 2 : 1), std::memory_order_release);
  index_ = Index(table_.data());
  index_.clear();
  arena_ = Arena(options_.capacity_bytes, table_.at<std::atomic<uint64_t>>(g.geometry));
  arena_.set_frontier(pool_.frontier());
  header->frontier.store(pool_.frontier());
  layouts_.open(table_.data());
  adopt_sessions();
  adopt_records();
  header->capacity_bytes = options_.capacity_bytes | (blocks_.pieces ? kTableHasPieces : 0);
  adopt_clock();
  adopt_allowances();
  reap_in_slices();
  scan_zombies();
  header->epoch.fetch_add(1, std::memory_order_release);
  load_ended();  // whoever waits for what the daemon before was loading
}

// Where a daemon was killed between two steps, two records have the same memory: of a region, for nothing else is ever cut. It
// must not become anybody's while the region's client lives. So runs that are open have it first, the longest before what was
// being cut out of it or had just become part of it; PIECEs, behind the blocks that have them; and a run that had ended last.
void Store::adopt_records() {
  RecordSet apart, pieces_taken;
  apart.resize(options_.max_blocks), pieces_taken.resize(options_.max_blocks);
  std::vector<uint32_t> runs, pieces, ended;
  for (uint32_t record = 0; record < options_.max_blocks; ++record) {
    Record& r = index_.record(record);
    r.sequence.store((r.sequence.load() + 1) & ~1u);  // its writer may have died between odd and even
    const State state = control(record).state();
    if (state == State::Free || state == State::Sealed || state == State::Disk) continue;
    const uint32_t slot = shape_of(record).layout;
    const bool of_region = layouts_.is_known(slot) && layouts_.in(slot)->layout.is_one_page();
    if (state != State::Piece && !of_region) continue;
    (state == State::Piece ? pieces : state == State::Zombie ? ended : runs).push_back(record);
    apart.add(record);
  }
  std::stable_sort(runs.begin(), runs.end(), [&](uint32_t a, uint32_t b) { return extent_of(a).length > extent_of(b).length; });
  const auto leave_free = [&](uint32_t record) REQUIRES(mutex_) {
    if (const Control c = control(record); c.state() != State::Free)
      index_.record(record).control.store(Control::make(c.generation() + 2, State::Free).word, std::memory_order_release);
    index_.upkeep(record).link.store(blocks_.free_head);
    blocks_.free_head = record;
  };
  const auto adopt_or_leave = [&](uint32_t record) REQUIRES(mutex_) {
    if (!adopt_record(record, pieces_taken)) leave_free(record);
  };
  for (const uint32_t record : runs) adopt_or_leave(record);
  for (uint32_t record = options_.max_blocks; record-- > 0;)
    if (!apart.contains(record)) adopt_or_leave(record);
  for (const uint32_t record : pieces)
    if (!pieces_taken.contains(record) && !adopt_piece(record)) leave_free(record);
  for (const uint32_t record : ended) adopt_or_leave(record);
}

void Store::adopt_sessions() {
  const std::string start = options_.session_prefix + ".s.";
  std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(options_.session_directory.c_str()), ::closedir);
  if (!dir) throw Error(Code::InvalidArgument, errno_text("listing " + options_.session_directory));
  while (const dirent* entry = ::readdir(dir.get())) {
    if (std::strncmp(entry->d_name, start.c_str(), start.size()) != 0) continue;
    const std::string path = options_.session_directory + "/" + entry->d_name;
    struct stat about;
    if (::fstatat(::dirfd(dir.get()), entry->d_name, &about, AT_SYMLINK_NOFOLLOW) == 0 &&
        (!S_ISREG(about.st_mode) || about.st_uid != ::geteuid())) {
      ::unlink(path.c_str());  // if that can be: anybody may make names here
      continue;
    }
    auto session = std::make_unique<Session>();
    try {
      session->file = SessionFile::open(path, options_.pool_id);
    } catch (const Error& error) {
      if (error.code != Code::InvalidArgument) throw;  // it may well protect something
      ::unlink(path.c_str());                          // cut short or never finished: it protects nothing
      continue;
    }
    session->guard = Guard(session->file->mapping(), &session->truncated);
    session->id = SessionFile::number_in(entry->d_name + start.size());
    if (const auto holder = SessionFile::holder_in(entry->d_name + start.size()))
      session->holder = *holder, session->budgeted = is_budgeted(holder->uid);
    session->ended = true;  // until its client resumes it
    // Its client can write this word too. Nobody was let in who is older than the table, so nobody has to be waited for.
    session->protocol = session->file->page().protocol;
    if (LayoutTable::newer(index_.header())) session->protocol = std::max(session->protocol, protocol::kVersionLayouts);
    session->age.resume(PinRounds::unpack(session->file->page().rounds.load(std::memory_order_relaxed)), monotonic_ns());
    // The page's word, which its client can write: believed of a process of the same user's, which could as well hold the lock.
    const uint64_t device = session->file->page().device.load(std::memory_order_relaxed);
    if (process_user(device) == session->holder.uid) session->device = device;
    sessions_.seen(session->id);
    // Not the page's word, which its client can write. A name without a number, of another's making: its pins count.
    for (uint32_t other = ~0u; sessions_.contains(session->id); --other) session->id = other;
    sessions_.ended.push_back(session->id);
    sessions_.add(std::move(session));
  }
}

// False if the record is FREE or cannot be kept.
bool Store::adopt_record(uint32_t record, RecordSet& pieces_taken) {
  const Control found = control(record);
  const Extent extent = extent_of(record);
  const Shape shape = shape_of(record);
  const Key key = key_of(record);
  if (found.state() == State::Free || found.state() > State::Disk || found.generation() == 0) return false;
  if (found.state() == State::Disk) return adopt_disk_record(record);
  if (found.state() == State::Zombie && found.flags() & kFlagDeleted) file_must_go(key);  // kept or not
  const Layout* layout = layouts_.is_known(shape.layout) ? &layouts_.in(shape.layout)->layout : nullptr;
  if (!layout || shape.tokens == 0 || shape.tokens > layout->block_tokens || shape.priority > kMaxPriority ||
      (extent.length != layout->extent_bytes(shape.tokens) && !may_be_region(found.state(), *layout)))
    return false;
  const bool may_be_apart = found.state() == State::Sealed || found.state() == State::Zombie;
  if (extent.in_pieces() ? !may_be_apart || !claim_pieces(record, pieces_taken) : !arena_.claim(extent, record)) return false;
  layouts_.came(shape.layout);
  blocks_.records += 1;
  blocks_.used_bytes += extent.length;
  blocks_.longest_pages = std::max(blocks_.longest_pages, extent.length / kPageBytes);
  set_flags(record, 0, options_.disk ? kFlagQueued : kFlagQueued | kFlagOnDisk);
  Upkeep& u = index_.upkeep(record);
  const uint32_t owner = u.owner.load();
  sessions_.seen(owner);
  if (found.state() == State::Created) {
    transition(record, Event::SessionEnd, State::Quarantined, control(record).flags());
    publish_progress(record, Phase::Ended);
    futex_wake_all(progress_[record]);
  }
  if (found.state() == State::Created || found.state() == State::Quarantined) {
    const auto session = sessions_.find(owner);
    if (session != sessions_.end()) {
      add_unsealed(*session->second, record);
      blocks_.quarantined += 1;
    } else {  // its lock was free before: the daemon that saw it is gone
      transition(record, Event::SessionLockFree, State::Zombie, control(record).flags() | kFlagQuarantined);
      pins_.add_zombie(record);
    }
    return true;
  }
  if (found.state() == State::Zombie || index_.find_exclusive(key) != Index::kAbsent || !index_.insert(key, record)) {
    if (found.state() == State::Sealed) transition(record, Event::Evict, State::Zombie, control(record).flags());
    pins_.add_zombie(record);
    return true;
  }
  if (const double score = std::bit_cast<double>(u.rank.load()); !std::isfinite(score) || score < 0) u.rank.store(0);
  policy_.insert(class_of(record), record, rank(record));
  remember_expiry(record);
  if (options_.disk) wish_to_write(record, found.flags() & kFlagQueued);
  return true;
}

}  // namespace kv
