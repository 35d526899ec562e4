// The store: the one mutator of a namespace. Index, arena, sessions' claims and eviction change here and nowhere else, under one
// lock, in operations that run to completion: no I/O, no waiting, no callback inside. (`create` lets go of it to grow the pool.)
//
// Invariants: a record is FREE or owns its extent; a CREATED or SEALED record is indexed, no other is; an extent goes back to the
// arena only after its record's generation changed, a full fence, and a scan of all pins that did not find it.
//
// store.cc: create, seal, abort. store_region.cc: blocks sealed where they lie; store_pieces.cc: apart. store_clock.cc: what a
// use counts for. store_keys.cc: what is asked by key. store_session.cc: sessions. store_reclaim.cc: making room. store_pins.cc:
// pins, zombies, parked blocks. store_budget.cc: how many of them a user may have. store_owners.cc: on what terms.
// store_layouts.cc: layouts. store_disk.cc: what the disk tier asks for and is told. store_adopt.cc: a new table, or the table of
// a daemon that is gone. store_bytes.cc: bytes copied in and out, checksums, scrub. store_peers.cc: what other hosts read and are
// asked for. store_look.cc: statistics, integrity.
#pragma once

#include <bit>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/polling.h"
#include "core/format/block.h"
#include "core/format/index.h"
#include "core/format/layout.h"
#include "core/format/protocol.h"
#include "core/format/store_types.h"
#include "core/store/arena.h"
#include "core/store/buried_sessions.h"
#include "core/store/disk_state.h"
#include "core/store/eviction.h"
#include "core/store/expiry_heap.h"
#include "core/store/fresh_blocks.h"
#include "core/store/journal.h"
#include "core/store/layout_table.h"
#include "core/store/left_sessions.h"
#include "core/store/lower_tier.h"
#include "core/store/pin_owners.h"
#include "core/store/pin_scans.h"
#include "core/store/pool.h"
#include "core/store/record_counts.h"
#include "core/store/record_set.h"
#include "core/store/region_work.h"
#include "core/store/room.h"
#include "core/store/session_table.h"
#include "core/store/slice.h"

namespace kv {

class Store {
 public:
  struct Options {
    std::string name;
    int table_fd, progress_fd, pool_fd;  // duplicated; the caller keeps its own
    uint64_t capacity_bytes;
    uint32_t max_blocks;
    Id pool_id;
    std::string session_directory, session_prefix;
    bool adopt;
    bool disk = false;                               // a disk tier will be attached: blocks on disk keep a record
    uint32_t write_at_once_priority = kMaxPriority;  // from this priority on a block is written at once, else at its second use
    uint32_t max_pending_writes = 1024, huge_after_ms = 0;  // the latter as Pool has it
  };
  explicit Store(const Options& options);
  ~Store();

  // With so many slots for layouts: an older table has kFirstLayouts, and is adopted too.
  static uint64_t table_bytes(uint32_t max_blocks, uint64_t capacity_bytes, uint32_t layouts = kMaxLayouts);
  // A word per record, and one more that counts the ends of loads.
  static uint64_t progress_bytes(uint32_t max_blocks) { return uint64_t{8} * (uint64_t{max_blocks} + 1); }
  static void retire(int table_fd);  // marks a table that no daemon will serve any more
  void close();                      // stops growing, leaves the segments to the next daemon

  // ---- blocks
  // Its id. `session`: that means to use it. Throws NoSpace if all slots have layouts that are used.
  uint32_t register_layout(std::span<const uint8_t> blob, uint32_t session = 0);
  LayoutTable::Known find_layout(const Key& digest);  // null: nobody has registered it here
  LayoutTable::Known layout(uint32_t id);             // null: not here, or not any more
  // An answer a block. Throws before anything: FailedPrecondition, no such session; InvalidArgument, a field beyond its limit.
  std::vector<Granted> create(const CreateRequest& request);
  // These four leave memory they set free to the next settle() or tick(), so that a batch is scanned for once.
  std::vector<Done> seal(uint32_t owner, std::span<const Seal> blocks);
  Done abort(uint32_t owner, Handle handle);  // its memory is free once nobody can write there
  // Where they lie in a region of the owner's; what is left of it stays open. NoSpace: not its memory, or not cut there.
  // Throws FailedPrecondition, no such session; InvalidArgument, tokens, position or offset of an item, before anything.
  std::vector<RegionChange> publish(const CreateRequest& request, std::span<const Publish> items);
  // Not found any more, the region's again once the owner alone, once, pins them. Throws FailedPrecondition; InvalidArgument.
  std::vector<RegionChange> take_back(uint32_t owner, uint32_t layout, std::span<const TakeBack> items);
  void mark_layer(Handle handle, uint32_t layers);     // without shared memory. Throws BlockLost, not open; InvalidArgument
  Found lookup(const Key& key);                        // where it is; no use is counted
  bool remove(const Key& key);                         // false: there was no sealed block
  std::vector<bool> touch(std::span<const Key> keys);  // counts as a use; whether each is there
  uint64_t flush();                                    // deletes all sealed blocks, in slices; how many
  void settle();                                       // frees what the four above left
  void drain(bool on);                                 // on: no room is made any more

  // ---- bytes, for those without shared memory. False or nothing: a miss.
  // Fewer at its end. Throws InvalidArgument for an offset beyond it, Fenced if the pool's memory is gone.
  std::optional<std::vector<uint8_t>> read(const Key& key, uint64_t offset, uint64_t length);
  // Of one found earlier, sealed or being written; counts no use. Nothing: another block by now. Throws InvalidArgument, Fenced.
  std::optional<std::vector<uint8_t>> read_at(Handle handle, uint64_t offset, uint64_t length);
  // Waits for those that are written or loaded here. A Presence each, as it is after the time at the latest. Peers bring what
  // does not come in time for wanted_ms more; 0: whoever waits.
  std::vector<uint8_t> await_blocks(std::span<const Key> keys, uint32_t priority, uint32_t timeout_ms, uint32_t wanted_ms = 0);
  // Until so many layers of a block are written. How many are: fewer after the time. Throws BlockLost, InvalidArgument: no block.
  uint32_t wait_layers(Handle handle, uint32_t layers, uint32_t timeout_ms);
  // Until one of them (128 at most) has more, or its seal; a moment sooner at times. Throws BlockLost, InvalidArgument.
  void wait_any(std::span<const Awaited> blocks, uint64_t timeout_us);
  // Throws BlockLost if it is not open, InvalidArgument beyond its end, Fenced if the pool's memory is gone.
  void write(Handle handle, uint64_t offset, std::span<const uint8_t> data);
  void keep_checksums(Handle block, std::span<const uint32_t> sums);  // as computed, of a sealed one without. Throws Fenced
  ScrubResult scrub(uint32_t from, uint64_t limit_bytes);             // from a record on; each caller goes through all by itself
  bool drop_if_corrupt(const Key& key);                               // true if its bytes did not match their checksums

  // ---- the disk tier, which asks and is told, and is never waited for. `wake` (an eventfd) is written when there is work.
  void attach_disk(int wake, LowerTier* tier);
  void detach_disk();                                                          // it is asked nothing any more
  LowerTier* lower() const { return lower_.load(std::memory_order_acquire); }  // null: no disk
  std::optional<WriteJob> begin_write();                                       // of the blocks that wait, the most valuable
  // True: the file stays. False: the block was deleted meanwhile, the file must go before anybody can find the key again.
  bool end_write(Handle handle, bool written);
  Deleted take_deleted();                            // blocks whose files are to go
  bool add_disk(const Key& key, uint32_t expiry_s);  // one that lies only on disk. False: no record is free, or it is known
  void drop_disk(const Key& key);                    // its file is gone
  void file_gone(const Key& key);                    // of a block that was deleted
  std::vector<Key> disk_keys(uint32_t& record, uint32_t limit);  // of blocks said to be on disk, from this record on
  void load_ended();                                             // wakes those who wait for loads
  void keep_loaded(std::span<const Seal> blocks);                // about to be sealed: no victims for a moment
  bool remove_here(const Key& key);                              // remove(), without asking the tier below
  // True while creates and seals (no look-ups) come close behind each other: what need not be done now can wait a moment.
  bool streaming() const { return puts_.runs(monotonic_ns()); }
  void tell_load_speed(uint64_t bytes_per_s, uint64_t waiting_bytes, uint64_t latency_us);  // what one takes now

  // ---- other hosts' daemons: blocks read by them, and fetched from them
  void tell_peers(int more) { index_.header().peers_up.fetch_add(static_cast<uint64_t>(more), std::memory_order_relaxed); }
  void tell_peer_speed(uint64_t bytes_per_s, uint64_t latency_us);                       // what a fetch takes now
  void attach_peers(Fetcher* peers) { peers_.store(peers, std::memory_order_release); }  // null: none any more
  void fetches_as(uint32_t owner) { fetcher_.store(owner, std::memory_order_relaxed); }  // whose blocks come from other hosts
  const Fetcher* peers() const { return peers_.load(std::memory_order_acquire); }        // null: none
  // Has them brought by what lies below, or a peer.
  std::vector<Presence> promote(std::span<const Key> keys, uint32_t priority, Wanting wanting = {});
  bool is_held(std::span<const Handle> blocks);  // somebody has one of them pinned: a client, or this daemon
  std::optional<ReadJob> begin_read(const Key& key, bool* crowded = nullptr);  // `crowded`: peers hold all they may
  void end_read(Handle handle);                                                // its memory may go
  LayersNow layers_now(Handle handle);                                         // throws BlockLost, InvalidArgument: no block
  size_t push(const std::string& node, std::span<const Key> keys);             // for so many. Throws InvalidArgument, Unavailable
  Journal& journal() { return journal_; }                              // what came and went, for those who tell other hosts
  std::vector<uint64_t> held_marks(uint32_t& record, uint32_t limit);  // of what there is, from this record on

  // ---- sessions
  size_t left_sessions(uint32_t uid) const { return left_.of(uid); }  // a user's that ended, locked at the last look. No lock
  void reap_left_sessions();                                          // such a look, in slices
  // A client's, and its locked page. By the session protocol's version that it speaks it asks for more pins when it needs them,
  // and knows every slot for layouts. Throws InvalidArgument for max_pins, IncompatibleVersion: too old for a layout, or a user.
  std::pair<uint32_t, Fd> open_session(uint32_t max_pins, uint32_t pid, uint32_t uid, bool read_only = false,
                                       uint32_t protocol = protocol::kVersion);
  PinAllowance allow_pins(uint32_t session, uint32_t slots, uint32_t pages);  // in use and wanted, of the longest block
  void set_pin_terms(uint32_t session, const PinTerms& terms);                // a client's or an engine's
  bool ask_pins_back(uint32_t session);  // all of this moment. False: there is no such session
  // Its memory is known to a device from now on, or no longer. Throws FailedPrecondition if its process cannot be seen.
  void give_to_device(uint32_t session, bool writes);
  // Takes up one that an earlier daemon, or a lost connection, left. False if it is unknown or attached.
  bool resume_session(uint32_t session, const Id& token, uint32_t pid, uint32_t uid, uint32_t protocol = protocol::kVersion);
  void check_reader(uint32_t protocol, uint32_t user = 0) const;  // throws IncompatibleVersion, for a layout or a user; no lock
  size_t keepable(uint32_t session, std::vector<Handle>& open);   // drops what it cannot keep; how many there are
  void keep_only(uint32_t session, std::vector<Handle> open);     // gives up what else of the session is quarantined
  uint32_t open_owner();                                          // a writer inside this process, without pins
  void end_session(uint32_t session);                             // its pins end, what it had open is quarantined
  uint64_t session_page_bytes(uint32_t session);                  // of its page, as the client may map it
  Mapping session_page_head(uint32_t session);                    // for its mailbox
  std::vector<SessionInfo> sessions();                            // those attached
  void note_put(uint64_t now_ns) { puts_.note(now_ns); }          // by the one thread that serves sessions
  int tick();  // frees what has become free, in slices as flush() does. In how many milliseconds to call again
  // To be called when nobody waits for an answer: what the last create left to do, and room for another batch like the last.
  void finish_claims(), make_room_ahead();

  // ---- looking at it
  Stats stats();  // bytes, blocks and counts, at one moment
  // From record `next` on, which is then where to go on, or kAbsent; min_uses > 0: sealed ones that were used so often lately.
  std::vector<Description> list(uint32_t& next, uint32_t limit, std::span<const uint8_t> key_prefix, double min_uses);
  std::optional<Description> describe(const Key& key);  // nothing: unknown
  std::vector<LayoutInfo> layouts();                    // those registered, with who uses them
  void check_integrity();                               // throws Integrity with what does not agree
  std::string problem();                                // empty if all is well

  const std::string& name() const { return options_.name; }
  const Options& options() const { return options_; }
  const TableHeader& header() const { return index_.header(); }  // of the mapped table

 private:
  using Session = SessionState;
  using Lock = SlicedLock;
  // The lock, and the namespace as an operation may find it. Throws Fenced.
  class SCOPED_CAPABILITY Entry {
   public:
    explicit Entry(Store& store) ACQUIRE(store.mutex_) : after_(store.buried_), lock_(store.mutex_) { store.begin_operation(); }
    ~Entry() RELEASE() {}

   private:
    const BuriedSessions::Rites after_;
    const Lock lock_;
  };
  static constexpr size_t kSlice = 256, kReapSlice = 4;  // blocks that one hold of the lock deletes, sessions: some 100 us
  static constexpr double kDueWorth = 0x1p200;           // ranks lie within 2^600 of each other (kRebaseExponent)

  // store.cc
  void list_contents() REQUIRES(mutex_);
  void begin_operation() REQUIRES(mutex_);  // throws Fenced
  bool is_claimable(const Key& key, double now, Granted& out, uint32_t& found) REQUIRES(mutex_);
  bool enter(const CreateRequest& request, const CreateItem& item, uint32_t layout_slot, Extent extent, uint32_t found,
             double now) REQUIRES(mutex_);
  void grant(const CreateRequest& request, const CreateItem& item, const KnownLayout& known, double now, Granted& out)
      REQUIRES(mutex_);
  bool grow_pool() REQUIRES(mutex_);  // gives the lock away
  bool file_lives_for(uint32_t record, uint32_t ttl_s) const,
      take_over_file(const CreateRequest& request, uint32_t found) REQUIRES(mutex_);
  static bool servable(State state, uint8_t flags);
  void transition(uint32_t record, Event event, State to, uint8_t flags) REQUIRES(mutex_);
  void publish_progress(uint32_t record, Phase phase) REQUIRES(mutex_);
  bool anybody_waits() const REQUIRES(mutex_);
  Control control(uint32_t record) const { return index_.control(record); }
  Key key_of(uint32_t record) const;
  Extent extent_of(uint32_t record) const;
  Shape shape_of(uint32_t record) const;
  uint64_t class_of(uint32_t record) const;
  bool expired(uint32_t expiry_s) const;
  Done seal_one(uint32_t owner, const Seal& block) REQUIRES(mutex_);
  double rank(uint32_t record) const { return std::bit_cast<double>(index_.upkeep(record).rank.load(std::memory_order_relaxed)); }
  // Of two victims the one with less goes first. What is due for the disk is worth more than all that is not: lost, it is lost.
  double worth(uint32_t record) const { return rank(record) * (control(record).flags() & kFlagQueued ? kDueWorth : 1); }
  void place(uint32_t record) REQUIRES(mutex_);
  // store_region.cc
  bool has_records(uint64_t count) REQUIRES(mutex_), may_have_records(uint64_t count) REQUIRES(mutex_);
  bool is_open_run(uint32_t record, uint32_t owner) REQUIRES(mutex_),
      is_in_open_run(Extent part, uint32_t owner) REQUIRES(mutex_);
  uint32_t run_at(uint64_t offset, uint32_t owner, uint64_t region) REQUIRES(mutex_);
  void move_run(uint32_t record, Extent to) REQUIRES(mutex_), undo_entry(uint32_t record, bool indexed) REQUIRES(mutex_);
  void end_run(Session& owner, uint32_t record) REQUIRES(mutex_);
  bool carve(Extent part, uint32_t to, const Key& rest, RegionWork& work, RegionChange& out) REQUIRES(mutex_);
  RegionChange publish_one(const CreateRequest& request, const Publish& item, RegionWork& work) REQUIRES(mutex_);
  bool goes_on(RegionWork& work) REQUIRES(mutex_);
  RecordSet held_by_others(uint32_t owner) REQUIRES(mutex_);
  bool join_runs(Extent part, uint32_t from, uint64_t region, Session& owner, RegionChange& out) REQUIRES(mutex_);
  bool open_run(Extent part, uint32_t from, const TakeBack& item, RegionWork& work, RegionChange& out) REQUIRES(mutex_);
  RegionChange take_one(const TakeBack& item, RegionWork& work) REQUIRES(mutex_);
  // store_pieces.cc
  template <class F>  // f(record, extent): each_piece.h
  void each_piece(uint32_t block, F&& f) REQUIRES(mutex_);
  std::vector<Extent> pieces_of(uint32_t record) REQUIRES(mutex_);
  uint32_t next_piece(uint32_t piece) const { return static_cast<uint32_t>(index_.record(piece).key[0].load()); }
  uint32_t named_block(uint32_t piece) const { return static_cast<uint32_t>(index_.record(piece).key[1].load()); }
  uint32_t block_of(uint32_t record) const;  // whose memory it is: of a PIECE another's
  uint64_t full_length(uint32_t block) const REQUIRES(mutex_);
  bool is_of_block(uint32_t piece) REQUIRES(mutex_), is_loose(uint32_t record) const;
  uint32_t enter_piece(Extent extent, uint32_t run) REQUIRES(mutex_), take_piece(uint32_t zombie) REQUIRES(mutex_);
  uint32_t cut_piece(Extent extent, const Key& rest, RegionWork& work, RegionChange& out) REQUIRES(mutex_);
  uint32_t cut_pieces(std::span<const Extent> pieces, Key rest, RegionWork& work, RegionChange& out) REQUIRES(mutex_);
  void name_block(uint32_t first, uint32_t block) REQUIRES(mutex_), free_piece(uint32_t record) REQUIRES(mutex_);
  bool piece_to_run(uint32_t record, const Key& key, RegionWork& work, RegionChange& out) REQUIRES(mutex_),
      return_piece(uint32_t piece, const Key& key, RegionWork& work, RegionChange& out) REQUIRES(mutex_);
  std::optional<bool> take_pieces_back(uint32_t zombie, Key key, RegionWork& work, RegionChange& out) REQUIRES(mutex_);
  void return_pieces(uint32_t first, Key key, RegionWork& work, RegionChange& out) REQUIRES(mutex_);
  void quarantine_piece(uint32_t record) REQUIRES(mutex_);
  bool claim_pieces(uint32_t block, RecordSet& pieces_taken) REQUIRES(mutex_), adopt_piece(uint32_t record) REQUIRES(mutex_);
  // store_clock.cc
  double use_now() REQUIRES(mutex_);
  void adopt_clock() REQUIRES(mutex_);
  void keep_origin();
  double add_use(uint32_t record, double now), uses(uint32_t record) const REQUIRES(mutex_);
  void use(uint32_t record, double now) REQUIRES(mutex_);
  // store_layouts.cc
  const Layout& layout_of(uint32_t slot) const REQUIRES(mutex_);  // of a block
  bool older_readers() REQUIRES(mutex_);
  void forget_layout_on_disk(uint32_t slot) REQUIRES(mutex_), evict_layout(uint32_t slot) REQUIRES(mutex_);
  Shape told(Shape shape) const REQUIRES(mutex_);
  void free_record(uint32_t record, Event event) REQUIRES(mutex_);
  void adopt_layout_on_disk(uint32_t record) REQUIRES(mutex_);
  // store_disk.cc
  void wish_to_write(uint32_t record, bool worth_it) REQUIRES(mutex_);
  bool forget_wish(uint32_t record) REQUIRES(mutex_);
  void set_flags(uint32_t record, uint8_t on, uint8_t off) REQUIRES(mutex_);
  void wake_disk() REQUIRES(mutex_), file_must_go(const Key& key) REQUIRES(mutex_);
  void remember_file(uint32_t record, const Key& key) REQUIRES(mutex_);
  void remember_unknown(const Key& key, bool sure) EXCLUDES(mutex_);
  uint32_t new_disk_record(const Key& key, uint32_t expiry_s, uint8_t flags) REQUIRES(mutex_);
  void free_spare_record() REQUIRES(mutex_), drop_disk_record(uint32_t record, Event event) REQUIRES(mutex_);
  void drop_tombstone(uint32_t record) REQUIRES(mutex_), delete_disk_record(uint32_t record) REQUIRES(mutex_);
  bool demote(uint32_t record) REQUIRES(mutex_);
  bool adopt_disk_record(uint32_t record) REQUIRES(mutex_);
  // store_reclaim.cc
  void make_room(uint64_t length, size_t count, bool last_look = false) REQUIRES(mutex_);
  void evict_least(std::optional<uint64_t> size_class, size_t count) REQUIRES(mutex_);
  Tried try_victims(std::optional<uint64_t> size_class, size_t count, size_t wanted, bool any) REQUIRES(mutex_);
  std::optional<Extent> evict_cheapest_run(const std::vector<Arena::Piece>& pieces, uint64_t need_bytes, double limit)
      REQUIRES(mutex_);
  void leave_queue(uint32_t record) REQUIRES(mutex_), to_zombie(uint32_t record, Event event) REQUIRES(mutex_);
  bool free_zombie(uint32_t record, Slice& slice) REQUIRES(mutex_), free_pieces(uint32_t zombie, Slice& slice) REQUIRES(mutex_);
  template <class F>  // f(session or 0, record, generation, most pages): each_pin.h
  void each_pin_of(F&& f) REQUIRES(mutex_);
  template <class F>  // the same in slices, of the sessions from the first to the last
  void each_pin_of_in_slices(Slice& slice, uint32_t first, uint32_t last, F&& f) REQUIRES(mutex_);
  template <class F>  // without the session
  void each_pin(F&& f) REQUIRES(mutex_);
  template <class F>
  void each_pin_in_slices(Slice& slice, F&& f) REQUIRES(mutex_);
  bool honoured(uint32_t record, uint32_t pages) const REQUIRES(mutex_) {
    return pages == PinAllowance::kAnyPages || full_length(record) <= uint64_t{pages} * kPageBytes;
  }
  // store_budget.cc
  static bool is_budgeted(uint32_t uid);  // not root's, not the daemon's own user's
  uint64_t charge(const Session& session) const REQUIRES(mutex_);
  PinsLeft left_for(const Session& session) const REQUIRES(mutex_);
  static PinAllowance first_allowance(const Session& session, uint32_t max_pins);
  bool set_allowance(Session& session, PinAllowance to) REQUIRES(mutex_);
  void recall(Session& session) REQUIRES(mutex_);
  void adopt_allowances() REQUIRES(mutex_);
  // store_owners.cc
  void tell_rounds(Session& session) REQUIRES(mutex_);
  std::map<uint32_t, PinsNamed> held_by_each(uint32_t first = 0, uint32_t last = ~0u) REQUIRES(mutex_);  // session. In slices
  bool look_after_terms() REQUIRES(mutex_);
  // store_pins.cc
  void scan_zombies(bool all = false) REQUIRES(mutex_), look_at_pins() REQUIRES(mutex_);
  uint64_t releases() const REQUIRES(mutex_);
  uint64_t pin_words() const REQUIRES(mutex_);
  bool worth_a_scan(uint64_t before, uint64_t now) const REQUIRES(mutex_);
  std::vector<uint32_t> held_among(std::span<const uint32_t> records) REQUIRES(mutex_);
  std::vector<uint32_t> fresh_records() REQUIRES(mutex_);
  const RecordSet& poor_victims() REQUIRES(mutex_);
  bool is_parked(uint32_t record) const REQUIRES(mutex_);
  void park(uint32_t record) REQUIRES(mutex_), leave_parking(uint32_t record) REQUIRES(mutex_);
  void mark_held(RecordSet& held, Slice& slice) REQUIRES(mutex_);
  void unpark(bool all) REQUIRES(mutex_);
  size_t room_for_more(uint64_t length) const REQUIRES(mutex_);
  void drain_rings(size_t most) REQUIRES(mutex_);
  size_t drain_ring(Session& session, size_t most, double now) REQUIRES(mutex_);
  void reap_sessions(size_t most) REQUIRES(mutex_), reap_in_slices() REQUIRES(mutex_);
  bool reap_one() REQUIRES(mutex_);
  static uint64_t credible(const Session& session, const std::atomic<uint64_t>& claimed);
  void expire() REQUIRES(mutex_);              // gives way, as flush() and tick() do
  bool is_current(const Expiry& entry) const;  // about the block that lies in the record now
  void set_expiry(uint32_t record, uint32_t second) REQUIRES(mutex_), remember_expiry(uint32_t record) REQUIRES(mutex_);
  Session& session_of(uint32_t id) REQUIRES(mutex_);  // throws FailedPrecondition: it has ended, or there is none
  void end_session_locked(Session& session) REQUIRES(mutex_), end_truncated_sessions() REQUIRES(mutex_);
  void add_unsealed(Session& session, uint32_t record) REQUIRES(mutex_);
  void drop_unsealed(Session& session, uint32_t record) REQUIRES(mutex_);
  void check_memory() REQUIRES(mutex_), check_pool() REQUIRES(mutex_);
  Presence promote_one(Fetcher* peers, const Key& key, uint32_t priority, Wanting wanting);
  bool peer_is_sooner(const Fetcher& peers, const Key& key) const;  // store_peers.cc
  // store_bytes.cc
  class Reading;
  struct Verdict;
  bool put_checksums(uint32_t record, std::span<const uint32_t> sums) REQUIRES(mutex_);
  Verdict verify_one(uint32_t record) REQUIRES(mutex_);
  std::vector<uint32_t> layer_checksums(const Layout& layout, std::span<const Extent> pieces, uint32_t tokens) const;
  // store_adopt.cc
  void lay_out_new_table() REQUIRES(mutex_);
  void adopt() REQUIRES(mutex_);
  void adopt_sessions() REQUIRES(mutex_), adopt_records() REQUIRES(mutex_);
  bool adopt_record(uint32_t record, RecordSet& pieces_taken) REQUIRES(mutex_);

  Options options_;
  Fd table_fd_, progress_fd_;
  Mapping table_, progress_map_;
  std::atomic<bool> progress_truncated_{false};
  Guard progress_guard_;
  Pool pool_;
  Index index_;
  std::atomic<uint64_t>* progress_ = nullptr;
  Stream puts_{500'000};                   // puts of 1 MiB at the speed of memory are 50 to 250 µs apart
  std::atomic<uint32_t> waiting_here_{0};  // threads of this process in wait_layers, wait_any
  LeftSessions left_;                      // of clients; changed under the lock
  BuriedSessions buried_;
  std::atomic<LowerTier*> lower_{nullptr};
  std::atomic<Fetcher*> peers_{nullptr};
  std::atomic<uint32_t> fetcher_{0};
  Journal journal_;  // has a lock of its own

  mutable SlicedMutex mutex_;
  RecordCounts blocks_ GUARDED_BY(mutex_);
  Arena arena_ GUARDED_BY(mutex_);
  std::vector<uint32_t> places_ GUARDED_BY(mutex_);
  EvictionPolicy<RecordPlaces> policy_ GUARDED_BY(mutex_);
  LayoutTable layouts_ GUARDED_BY(mutex_);
  SessionTable sessions_ GUARDED_BY(mutex_);
  PinScans pins_ GUARDED_BY(mutex_);
  OwnPins own_pins_ GUARDED_BY(mutex_);  // the daemon's own reads in flight
  FreshBlocks fresh_ GUARDED_BY(mutex_);
  Room room_ GUARDED_BY(mutex_);
  ExpiryHeap expiries_ GUARDED_BY(mutex_);
  DiskState disk_ GUARDED_BY(mutex_);
  UseClock clock_ GUARDED_BY(mutex_);
  Suspects suspects_ GUARDED_BY(mutex_);
  bool draining_ GUARDED_BY(mutex_) = false;
  std::string fence_ GUARDED_BY(mutex_);  // why this namespace is fenced, or empty
  Stats counters_ GUARDED_BY(mutex_){};
  friend class StoreTest;
};

}  // namespace kv
