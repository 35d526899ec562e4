// The shapes that the daemon and its clients share in memory: block states, the block table, a session's page,
// a namespace's progress words. Everything here is plain data with fixed offsets; the code that reads and writes it
// lives in index.h (readers), session_file.h (hazard pins) and store.h (the one mutator).
//
// Invariant: all words that another process may read while they change are accessed as atomics; the mailbox's bytes are their
// reader's alone once its words say so.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kv {

// ---------------------------------------------------------------- block states

enum class State : uint8_t {
  Free = 0,         // the record is unused
  Created = 1,      // granted to a writer, being filled
  Sealed = 2,       // immutable, found by every door
  Zombie = 3,       // found by nobody, its extent still pinned or read by the daemon
  Quarantined = 4,  // its writer's session ended; the writer may still touch the memory
  Disk = 5,         // lies only on disk: a record without an extent
  Piece = 6,        // memory of a block that lies in pieces, and goes with it
};

enum class Event : uint8_t {
  Create,
  Seal,
  Evict,
  Delete,
  Abort,
  SessionEnd,
  SessionLockFree,
  LastPinGone,
  Indexed,
  Demote,
  TakeBack
};

struct Transition {
  State from;
  Event event;
  State to;
};

// The whole life of a block. The store asserts every change of state against this table, and docs/design.md's
// picture is generated from it (kvstored._core.transitions()).
inline constexpr std::array<Transition, 17> kTransitions{{
    {State::Free, Event::Create, State::Created},
    {State::Created, Event::Seal, State::Sealed},
    {State::Created, Event::Abort, State::Zombie},
    {State::Created, Event::SessionEnd, State::Quarantined},
    {State::Quarantined, Event::Abort, State::Zombie},
    {State::Quarantined, Event::SessionLockFree, State::Zombie},
    {State::Sealed, Event::Evict, State::Zombie},
    {State::Sealed, Event::Delete, State::Zombie},
    {State::Zombie, Event::LastPinGone, State::Free},
    {State::Free, Event::Indexed, State::Disk},
    {State::Zombie, Event::Demote, State::Disk},
    {State::Disk, Event::Delete, State::Free},
    {State::Disk, Event::Evict, State::Free},
    {State::Free, Event::Create, State::Piece},
    {State::Piece, Event::LastPinGone, State::Free},
    {State::Piece, Event::SessionEnd, State::Quarantined},
    {State::Piece, Event::TakeBack, State::Created},
}};

constexpr bool allowed(State from, Event event, State to) {
  for (const Transition& t : kTransitions)
    if (t.from == from && t.event == event && t.to == to) return true;
  return false;
}

std::string_view name(State state);
std::string_view name(Event event);

// ---------------------------------------------------------------- limits of the format

inline constexpr uint32_t kFormatVersion = 4;  // of a table with a layout in a slot that an older reader would misread
inline constexpr uint32_t kOldestFormat = 3;   // of any other table, and of session pages: readers of both versions understand it
// Told by a bit of a table's `capacity_bytes`, which nobody but a daemon compares: there may be blocks in pieces. Daemons before
// do not adopt it, and readers before go on: such a block lies beyond the pool for them, a miss.
inline constexpr uint64_t kTableHasPieces = 1ull << 63;
inline constexpr size_t kKeyBytes = 32;
inline constexpr uint32_t kMaxRecords = 1u << 24;  // a pin word has 24 bits for the record
inline constexpr uint64_t kMaxGeneration = (1ull << 40) - 1;
inline constexpr uint32_t kMaxKeysPerMessage = 1024;
inline constexpr uint32_t kMaxPins = 1u << 20;  // of one session
inline constexpr uint32_t kMaxLayouts = 512;    // of a namespace: they lie in its table, 4 KiB each
inline constexpr uint32_t kFirstLayouts = 48;   // the slots that readers of version 3 know, each used once; all of an older table
inline constexpr uint64_t kLayoutSlotBytes = 4096;  // one registered layout: u32 length, blob; in its last 4 bytes the generation
inline constexpr uint32_t kMaxLayers = 512;
inline constexpr uint32_t kTouchRing = 1024;  // entries of the lossy hit ring in a session page
inline constexpr uint32_t kProbeTries = 64;   // torn reads before a reader asks the socket
inline constexpr uint64_t kLayerAlign = 512;  // layers start on multiples of this in extent and file
inline constexpr uint64_t kLineBytes = 64;
inline constexpr uint64_t kPageBytes = 4096, kHugePageBytes = 2ull << 20;
inline constexpr uint64_t kGrowStep = 64ull << 20;  // the pool grows by this much at a time

struct Key {
  std::array<uint64_t, 4> words;
  friend bool operator==(const Key&, const Key&) = default;
};
static_assert(sizeof(Key) == kKeyBytes);

// For tables of this process alone. Keys are digests, but a client may choose others: a seed of this process keeps them from
// meeting in one place. Murmur3's finaliser.
uint64_t key_hash_seed();
struct KeyHash {
  size_t operator()(const Key& key) const {
    static const uint64_t seed = key_hash_seed();
    uint64_t h = key.words[0] ^ key.words[3] ^ seed;
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdull;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 33;
  }
};

// ---------------------------------------------------------------- control word of a record

// generation:40 | unused:8 | flags:8 | state:8. One release store of this word commits a transition; a reader that
// finds the generation unchanged after its fence holds the block.
struct Control {
  uint64_t word;
  static constexpr Control make(uint64_t generation, State state, uint8_t flags = 0) {
    return {generation << 24 | uint64_t{flags} << 8 | static_cast<uint64_t>(state)};
  }
  constexpr uint64_t generation() const { return word >> 24; }
  constexpr State state() const { return static_cast<State>(word & 0xff); }
  constexpr uint8_t flags() const { return static_cast<uint8_t>(word >> 8); }
};

inline constexpr uint8_t kFlagChecksummed = 1;  // the per-layer checksums behind the layers are valid
inline constexpr uint8_t kFlagOnDisk = 2;       // a copy lies on disk as well
inline constexpr uint8_t kFlagQuarantined = 4;  // a zombie that was quarantined: its readers hold the generation before the last
inline constexpr uint8_t kFlagQueued = 8;       // waits to be written to disk, or is being written
inline constexpr uint8_t kFlagDeleted = 16;     // a zombie that was deleted: a file of it must not stay

// A pin: record in the high 24 bits, generation in the low 40. Generations start at 1, so 0 is "no pin".
constexpr uint64_t pin_word(uint32_t record, uint64_t generation) { return uint64_t{record} << 40 | generation; }
constexpr uint32_t pin_record(uint64_t pin) { return static_cast<uint32_t>(pin >> 40); }
constexpr uint64_t pin_generation(uint64_t pin) { return pin & kMaxGeneration; }

// What a session may hold: the first `slots` words of its page, each a block of at most `pages` pages. The daemon's word: in its
// own copy it honours nothing beyond, and a client that saw it change after its fence has not pinned. One word, so that both
// change at once.
struct PinAllowance {
  uint32_t slots = 0;
  uint32_t pages = 1;
  static constexpr uint32_t kAnyPages = ~0u;
  static constexpr PinAllowance unpack(uint64_t word) { return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)}; }
  constexpr uint64_t pack() const { return uint64_t{slots} << 32 | pages; }
  constexpr bool covers(uint32_t slot, uint32_t block_pages) const { return slot < slots && block_pages <= pages; }
  friend bool operator==(const PinAllowance&, const PinAllowance&) = default;
};

// By what a client knows which of its pins are asked back: those taken in a round before `asked_back`. Written by the daemon.
struct PinRounds {
  uint32_t now = 0;         // what is pinned from here on belongs to it; 0: of a daemon that asks nothing back
  uint32_t asked_back = 0;  // rounds before this one
  static constexpr PinRounds unpack(uint64_t word) { return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)}; }
  constexpr uint64_t pack() const { return uint64_t{now} << 32 | asked_back; }
};

// A progress word: generation:40 | layers ready:16 | phase:8. Its low 32 bits are the futex word.
enum class Phase : uint8_t { Writing = 0, Sealed = 1, Ended = 2 };
constexpr uint64_t progress_word(uint64_t generation, uint32_t layers, Phase phase) {
  return generation << 24 | uint64_t{layers & 0xffff} << 8 | static_cast<uint64_t>(phase);
}
constexpr uint64_t progress_generation(uint64_t word) { return word >> 24; }
constexpr uint32_t progress_layers(uint64_t word) { return static_cast<uint32_t>(word >> 8) & 0xffff; }
constexpr Phase progress_phase(uint64_t word) { return static_cast<Phase>(word & 0xff); }

// ---------------------------------------------------------------- the block table (segment "table")

// One record per block: what look-ups read, in one cache line. Every word but `control` is covered by `sequence`, which is odd
// while the payload changes; so are the words of its upkeep but `rank` and `link`.
struct alignas(64) Record {
  std::atomic<uint64_t> control;  // Control
  std::atomic<uint32_t> sequence;
  std::atomic<uint32_t> expiry_s;  // CLOCK_REALTIME seconds, 0: never
  std::atomic<uint64_t> key[4];
  std::atomic<uint64_t> extent;  // Extent
  std::atomic<uint64_t> shape;   // Shape
};
static_assert(sizeof(Record) == 64);

// The rest of what is known of the block of that number, for the store and for searches.
struct alignas(32) Upkeep {
  std::atomic<uint64_t> fingerprint;
  std::atomic<uint64_t> rank;       // bits of the eviction policy's double; a hint, kept over restarts
  std::atomic<uint32_t> owner;      // session that created the block
  std::atomic<uint32_t> created_s;  // CLOCK_REALTIME seconds
  std::atomic<uint32_t> link;       // FREE: the next free record; unsealed: its place in its session's list. Derived
  std::atomic<uint32_t> parent;     // low word of the parent's prefix key, 0 if none: leads to a block's children
};
static_assert(sizeof(Upkeep) == 32);

// Where a block lies in the pool: first page:36 | pages:28. Of a block in pieces the first page is kInPieces and the number of
// the first PIECE, whose memory is the block's first bytes. Each of them names the next (key[0]) and its block (key[1]); the
// lengths add up to the block's.
struct Extent {
  static constexpr uint64_t kInPieces = 1ull << 35;  // pages: beyond every pool
  uint64_t offset;
  uint64_t length;
  static constexpr Extent unpack(uint64_t word) { return {(word >> 28) * kPageBytes, (word & ((1ull << 28) - 1)) * kPageBytes}; }
  constexpr uint64_t pack() const { return offset / kPageBytes << 28 | length / kPageBytes; }
  constexpr uint64_t end() const { return offset + length; }
  static constexpr Extent in_pieces_from(uint32_t piece, uint64_t length) { return {(kInPieces | piece) * kPageBytes, length}; }
  constexpr bool in_pieces() const { return offset >= kInPieces * kPageBytes; }
  constexpr uint64_t first_piece() const { return offset / kPageBytes - kInPieces; }
};
inline constexpr uint32_t kMaxPieces = 1025;  // of one block, what stands behind its layers among them

// What a block holds: low bits of the layout's slot:8 | its ninth bit:1 | priority:7 | tokens:20 | base position:28.
struct Shape {
  uint32_t layout;  // the slot; where it leaves the store, or a client's attachment, the id
  uint32_t priority;
  uint32_t tokens;
  uint32_t base_position;
  static constexpr Shape unpack(uint64_t word) {
    return {static_cast<uint32_t>(word >> 56 | (word >> 55 & 1) << 8), static_cast<uint32_t>(word >> 48 & 0x7f),
            static_cast<uint32_t>(word >> 28 & 0xfffff), static_cast<uint32_t>(word & 0xfffffff)};
  }
  constexpr uint64_t pack() const {
    return uint64_t{layout} << 56 | uint64_t{layout >> 8} << 55 | uint64_t{priority} << 48 | uint64_t{tokens} << 28 |
           base_position;
  }
};
inline constexpr uint32_t kUnknownLayout = 255;  // of a block found by its file's name, beside 0 tokens: nobody read its header
inline constexpr uint32_t kMaxTokens = 0xfffff;
inline constexpr uint32_t kMaxBasePosition = 0xfffffff;
inline constexpr uint32_t kMaxPriority = 100;
inline constexpr uint32_t kDefaultPriority = 35;

// Hash buckets of one cache line. A slot is tag << 32 | record + 1, 0 if empty. An entry never moves between buckets;
// `overflow` counts the entries whose probe passed through this bucket. `sequence` is odd while a slot changes.
inline constexpr uint32_t kBucketSlots = 7;
struct alignas(64) Bucket {
  std::atomic<uint32_t> sequence;
  std::atomic<uint32_t> overflow;
  std::atomic<uint64_t> slot[kBucketSlots];
};
static_assert(sizeof(Bucket) == 64);

inline constexpr char kTableMagic[8] = {'K', 'V', 'T', 'A', 'B', 'L', 'E', '1'};
struct TableHeader {
  char magic[8];
  uint32_t version;
  uint32_t max_blocks;
  uint32_t buckets;
  uint32_t header_bytes;
  uint64_t capacity_bytes;
  uint64_t records_offset;
  uint64_t upkeep_offset;
  uint64_t buckets_offset;
  uint64_t layouts_offset;
  uint64_t geometry_offset;  // Arena's words: where its slabs were cut
  uint64_t total_bytes;
  uint8_t pool_id[16];             // random, the same in all segments of one pool
  std::atomic<uint64_t> epoch;     // odd while a daemon adopts; the pool is retired at ~0
  std::atomic<uint64_t> frontier;  // bytes of the pool that exist
  std::atomic<uint64_t> faulted;   // bytes of the pool the daemon has faulted in
  std::atomic<uint64_t> origin_s;  // CLOCK_REALTIME second that eviction scores count from, for daemons before 2026-11-25
  std::atomic<uint32_t> layouts;   // slots that were ever used: the first so many
  uint32_t finder_buckets;
  uint64_t finder_offset;
  // How soon a block on disk would be in memory: bytes the disk tier loads a second (0: not known), bytes that wait, and
  // what one load takes by itself.
  std::atomic<uint64_t> load_bytes_per_s;
  std::atomic<uint64_t> load_waiting_bytes;
  std::atomic<uint64_t> load_latency_us;
  std::atomic<uint64_t>
      score_ns;  // that eviction scores count from: served, and an hour for each quarter of the pool sealed anew
  std::atomic<uint64_t> peers_up;  // other hosts that can be asked for blocks now, a shared directory is one; 0 in older pools
  // How soon a block of another host would be here, the fastest of them: bytes a second (0: not known), and what one takes by
  // itself.
  std::atomic<uint64_t> peer_bytes_per_s;
  std::atomic<uint64_t> peer_latency_us;
};
inline constexpr uint64_t kEpochRetired = ~0ull;

// ---------------------------------------------------------------- a session's page file

inline constexpr char kSessionMagic[8] = {'K', 'V', 'S', 'E', 'S', 'S', '0', '1'};
struct SessionPage {
  char magic[8];
  uint32_t version;
  uint32_t max_pins;
  uint32_t session;   // owner number, unique among living sessions of the pool
  uint32_t protocol;  // that its client spoke when the page was made; 0: of a daemon that did not say
  uint8_t pool_id[16];
  uint8_t token[16];                // who knows it may resume the session
  std::atomic<uint64_t> pins_high;  // hint: pins above this are 0. Only its own client suffers if it lies
  std::atomic<uint64_t> ring_head;  // entries ever appended to the ring
  std::atomic<uint64_t> hits;       // blocks this session got, and asked for in vain
  std::atomic<uint64_t> misses;
  std::atomic<uint64_t> waiting;  // threads of this session asleep on a progress word, or about to be
  std::atomic<uint32_t> ring[kTouchRing];
  std::atomic<uint64_t> released;   // pins ever cleared, counted after the clearing; a hint, 0 from a client that does not count
  std::atomic<uint64_t> allowance;  // PinAllowance; 0 from a daemon that bounds nothing
  std::atomic<uint64_t> rounds;     // PinRounds
  std::atomic<uint64_t> device;     // the process that gave this memory to a device (core/base/process.h), as the daemon saw it
  // std::atomic<uint64_t> pins[max_pins] follow at kPinsOffset
};
inline constexpr size_t kPinsOffset = 8192;

// One small request, and in its place its answer (session/mailbox.h). A line that the client writes, one that the daemon writes.
inline constexpr size_t kMailboxBytes = 3840;
struct Mailbox {
  alignas(kLineBytes) std::atomic<uint32_t> asked;  // number of the request that lies here; 0: none
  std::atomic<uint32_t> request_bytes;
  std::atomic<uint32_t> asleep;     // number of the request whose answer its client sleeps for
  std::atomic<uint32_t> processor;  // hint: that its client asks from, plus 1; 0: not said
  uint32_t reserved_asking[12];
  std::atomic<uint32_t> answered;      // number of the request last answered
  std::atomic<uint32_t> answer_bytes;  // 0: the answer went through the socket
  std::atomic<uint32_t> attended;      // 1 while the daemon looks here
  uint32_t reserved_answering[13];
  uint8_t bytes[kMailboxBytes];
};
static_assert(offsetof(Mailbox, answered) == kLineBytes && offsetof(Mailbox, bytes) == 2 * kLineBytes);
inline constexpr size_t kMailboxOffset = 4224;
static_assert(sizeof(SessionPage) <= kMailboxOffset && kMailboxOffset % kLineBytes == 0 &&
              kMailboxOffset + sizeof(Mailbox) <= kPinsOffset);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace kv
