// What goes into the store and comes out of it: requests, answers and figures, plain values that own nothing of the store.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/format/block.h"
#include "core/format/index.h"
#include "core/format/layout.h"

namespace kv {

struct Handle {
  uint32_t record;
  uint64_t generation;
  friend bool operator==(const Handle&, const Handle&) = default;
};

// Whose a pin is.
enum class PinOwner : uint8_t { Client = 0, Engine, Disk, Peer };
inline constexpr size_t kPinOwners = 4;
#define KV_PIN_OWNERS(X) X(client, Client) X(engine, Engine) X(disk, Disk) X(peer, Peer)

struct PinsHeld {
  uint64_t count = 0, bytes = 0;
};
struct PinsNamed : PinsHeld {
  uint64_t words = 0;  // that name a record, of a block that is there or not
};

// What a client says of the pins of its session: whose they are; after how long, and beyond how many bytes, they may be asked
// back.
struct PinTerms {
  PinOwner owner = PinOwner::Client;
  uint32_t deadline_ms = 0;  // 0: none
  uint64_t bytes = 0;        // 0: no bound but its user's
  bool bounded() const { return deadline_ms || bytes; }
};

struct Seal {
  Handle handle;
  bool checksummed = false;  // the writer left the layers' checksums behind them
};

struct CreateItem {
  Key key;
  uint64_t fingerprint = 0;
  uint32_t tokens = 0;
  uint32_t base_position = 0;
  uint32_t parent = 0;
  uint32_t region_pages = 0;  // memory for a client's own allocator, so long; the fingerprint is its number. 0: a block
};

enum class Grant : uint8_t { Granted = 0, Exists = 1, Pending = 2, NoSpace = 3 };

struct Granted {
  Grant status = Grant::NoSpace;
  Handle handle{0, 0};
  Extent extent{0, 0};
};

struct CreateRequest {
  uint32_t owner, layout;
  uint32_t priority = kDefaultPriority;
  uint32_t ttl_s = 0;
  std::span<const CreateItem> items;
  bool loaded = false;  // from the file there is
};

// A block that lies in memory that its writer was granted as a region: whole at `offset`, or in these pieces, whole pages that
// one behind the other are its bytes, the last of them all of what stands behind its layers.
struct Publish {
  CreateItem wanted;
  uint64_t offset;
  Key rest;  // of what is left of the region behind it; of what is left behind further pieces, others made from it
  bool checksummed;
  std::vector<Extent> pieces = {};
};

// Memory of a block that was published, for the region it lay in.
struct TakeBack {
  Handle block;
  Key key;  // of what it becomes if it touches no other part of the region; of further pieces, others made from it
  uint64_t region;
};

enum class Back : uint8_t { Taken = 0, Held = 1, Gone = 2 };  // held: somebody reads it; gone: it is not the region's any more

// What became of an item, and of the parts of its region that are still to be written: some more, some less.
struct RegionChange {
  uint8_t status = 0;  // Grant, Back
  Handle block{~0u, 0};
  std::vector<Handle> opened = {}, ended = {};
};

enum class Done : uint8_t { Ok = 0, Stale = 1, NotOwner = 2 };  // answers to seal and abort, per block

enum class Presence : uint8_t { Missing = 0, Pending = 1, Resident = 2, OnDisk = 3, OnPeer = 4 };

struct Found {
  Presence presence = Presence::Missing;
  Snapshot snapshot;
};

struct Description {
  Key key;
  uint32_t record;
  State state;
  Snapshot snapshot;
  uint32_t created_s;
  double score;
  double uses;  // lately: one a moment ago counts 1, an hour ago a half
};

#define KV_STORE_COUNTERS(X) \
  X(creates)                 \
  X(seals)                   \
  X(aborts)                  \
  X(deletes)                 \
  X(evictions) X(expired) X(no_space) X(corrupt) X(hits) X(misses) X(writes_dropped) X(evictions_unwritten) X(asked_back)

struct SessionInfo {
  uint32_t session, pid, uid;
  uint64_t pins, pinned_bytes, unsealed;
  double attached_s;  // since it was opened, resumed or adopted
  bool attached, resumed, device;
  PinTerms terms;
};

struct Stats {
  uint64_t used_bytes, capacity_bytes, frontier_bytes, faulted_bytes, huge_bytes, slack_bytes;
  uint64_t blocks, created, zombies, quarantined, on_disk, pending_writes, pins, sessions, max_blocks, epoch, fenced, draining;
  PinsHeld held[kPinOwners];             // by owner
  uint64_t longest_hold_ns, long_holds;  // of the store's lock, without a pause; those over half a millisecond
#define X(name) uint64_t name;
  KV_STORE_COUNTERS(X)
#undef X
};

// A block about to be written to disk: all that its file says, and where its bytes lie. Pinned until end_write.
struct WriteJob {
  Handle handle;
  Key key;
  Extent extent;
  std::vector<Extent> pieces;  // of it: one, if it lies in one run
  Shape shape;
  uint64_t fingerprint;
  uint32_t created_s, expiry_s, parent;
  bool checksummed;
  std::shared_ptr<const KnownLayout> layout;
};

struct LayoutInfo {
  std::shared_ptr<const KnownLayout> known;
  uint64_t blocks, on_disk;  // in memory, and only on disk
  uint32_t sessions;         // that registered it
};

// A block about to be read for another host. Pinned until end_read.
struct ReadJob {
  Handle handle;
  Extent extent;
  std::vector<Extent> pieces;  // of it, as above
  Shape shape;
  uint64_t fingerprint;
  uint32_t expiry_s, parent;
  bool sealed, checksummed;
  bool fetched;  // it comes from another host, by attach_peers()' word
  std::shared_ptr<const KnownLayout> layout;
};

struct LayersNow {  // of a block that is written, or was
  uint32_t layers;
  bool sealed;
  uint64_t word;  // its progress, for who sleeps on it
};

struct Awaited {
  Handle handle;
  uint32_t layers;  // more than these
};

struct Deleted {  // which files must go: those of deleted blocks, or all
  std::vector<Key> keys;
  bool all = false;
};

struct ScrubResult {
  uint64_t verified = 0, computed = 0, corrupt = 0, bytes = 0;
  uint32_t next = 0;  // the record to go on from
  bool done = false;  // there is none
};

}  // namespace kv
