// The session socket's messages: SOCK_SEQPACKET, one message a packet, little-endian, fixed structures, nothing nested.
// A request is a Request and `count` items of its kind; a reply is a Reply and `count` items, or with a status other than
// kOk the error's text. Replies come in the order of the requests. docs/formats.md has the byte table.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <type_traits>
#include <vector>

#include "core/format/block.h"

namespace kv::protocol {

inline constexpr uint32_t kMagic = 0x3153564b;  // "KVS1"
inline constexpr uint32_t kVersion = 5;
inline constexpr uint32_t kOldestVersion = 2;   // that is still spoken, by either side: the other may be older
inline constexpr uint32_t kVersionAsks = 3;     // from which on a client knows of allowances
inline constexpr uint32_t kVersionLayouts = 4;  // from which on it reads tables of version 4: ids of layouts have generations
inline constexpr uint32_t kVersionPieces = 5;   // from which on it reads blocks in pieces; others are told that they are missing
inline constexpr size_t kMaxMessage = 96 * 1024;  // below every default of SO_SNDBUF for one packet
inline constexpr size_t kMaxNamespace = 63;
inline constexpr uint16_t kOk = 0;  // other statuses are 1 + kv::Code

enum class Op : uint16_t {
  Attach = 1,
  RegisterLayout,
  Create,
  Seal,
  Abort,
  LookUp,
  Delete,
  Touch,
  Stats,
  Token,
  Promote,
  Suspect,
  Keep,
  AllowPins,
  Elsewhere,
  Publish,
  TakeBack,
  PinTerms,
  Device,
  Push,
  PublishPieces,
  TakeBackPieces,
  PromoteFrom,
  kLast = PromoteFrom
};
inline constexpr const char* kOpNames[] = {
    "attach",    "register_layout", "create",  "seal",    "abort",          "lookup",           "delete",      "touch",
    "stats",     "token",           "promote", "suspect", "keep",           "allow_pins",       "elsewhere",   "publish",
    "take_back", "pin_terms",       "device",  "push",    "publish_pieces", "take_back_pieces", "promote_from"};
static_assert(std::size(kOpNames) == static_cast<size_t>(Op::kLast));  // by op - 1; the labels of the latency metrics

struct Request {
  uint32_t magic;
  uint16_t op;
  uint16_t reserved;
  uint32_t count;  // items that follow
  uint32_t tag;    // comes back in the reply
};
struct Reply {
  uint32_t magic;
  uint16_t op;
  uint16_t status;
  uint32_t count;
  uint32_t tag;
};
// In either direction: something lies in the session's mailbox. Has no reply.
inline constexpr uint64_t kKnockMagic = 0x314b434f4e4b564bull;  // "KVKNOCK1"
struct Knock {
  uint64_t magic = kKnockMagic;
};

// Attach: count is 1. Descriptors with the reply: table, progress, pool, and the session's locked page unless it was resumed.
struct Attach {
  uint32_t version;
  uint32_t read_only;
  uint32_t max_pins;
  uint32_t resume_session;  // 0: a new session
  uint8_t resume_token[16];
  char name[kMaxNamespace + 1];
};
struct Attached {
  uint32_t session;
  uint32_t resumed;
  uint64_t epoch;
  uint64_t table_bytes;
  uint64_t progress_bytes;
  uint64_t pool_bytes;
  uint64_t page_bytes;
  uint8_t pool_id[16];
  uint8_t salt[32];  // of the namespace, digested; zeros: none
};

// Token: count is 0; the reply is what this session shows on the gRPC socket for other users.

// Seal, Abort: the reply has a Done byte per item.
struct BlockItem {
  uint32_t record;
  uint32_t checksummed;
  uint64_t generation;
};

// Create: a CreateHead, `seals` BlockItems sealed first, then `count` CreateItems. The reply: `seals` Done bytes padded to 8,
// then `count` GrantItems.
struct CreateHead {
  uint32_t layout;
  uint32_t priority;
  uint32_t ttl_s;
  uint32_t seals;
};
struct CreateItem {
  Key key;
  uint64_t fingerprint;
  uint32_t tokens;
  uint32_t base_position;
  uint32_t parent;
  uint32_t region_pages;  // a region so long; 0: a block. A daemon that knows of none grants a block
};
struct GrantItem {
  uint32_t record;
  uint32_t status;  // Grant
  uint64_t generation;
  uint64_t offset;
  uint64_t length;
};

// LookUp: count keys; the reply has a LookUpItem each. Delete, Touch: count keys; a byte each, 1 if it was there.
struct LookUpItem {
  uint32_t presence;
  uint32_t record;
  uint64_t control;
  uint64_t extent;
  uint64_t shape;
};

// Promote: a PromoteHead and count keys; the reply has a PromiseItem each. Loads nothing before it answers.
struct PromoteHead {
  uint32_t priority;
  uint32_t wanted_ms;  // this session waits so long: then nobody need bring it; 0: it is brought whoever waits
};
struct PromiseItem {
  uint32_t presence;  // pending: it is being loaded. On disk: too many loads wait. Missing: there is nothing to wait for
  uint32_t reserved;  // 0. Without it the item had another size, and the protocol another version
};

// Suspect: count keys of blocks whose checksums did not match in the client's memory. The daemon looks itself; the reply has a
// byte each, 1 if it dropped the block.

// Keep: a KeepHead and `count` BlockItems, all that the writers of a resumed session still have open. What else of it is
// quarantined was granted in a reply that never arrived, or its writer has stopped: it is given up. The reply is empty.
struct KeepHead {
  uint32_t more;  // 1: the list goes on in the next message
  uint32_t reserved;
};

// AllowPins (version 3): a PinsWanted; the reply is a PinAllowance's word, which may be less than was asked for.
struct PinsWanted {
  uint32_t slots;  // in use and wanted
  uint32_t pages;  // of the longest block
};

// Elsewhere: count keys; a byte each, 1 if another host is known to have the block. Nobody is asked. A daemon that does not know
// the operation refuses it.

// Push: a PushHead and count keys; the reply is a uint32_t, how many of them that host is told to come for. A daemon that does
// not know the operation refuses it.
struct PushHead {
  char node[kMaxNamespace + 1];
};

// PromoteFrom: a PromoteHead, a PushHead and count keys. As Promote, of blocks that the host of that name is said to have: it is
// asked first, also where it told nothing of them. A name that is none of this daemon's peers counts for nothing. A daemon that
// does not know the operation refuses it.

// Publish, TakeBack: a RegionHead and `count` items; the reply has a RegionItem each. A daemon that does not know these
// operations refuses them.
struct RegionHead {
  uint32_t layout;  // of the blocks; of the region
  uint32_t priority;
  uint32_t ttl_s;
  uint32_t reserved;
};
struct PublishItem {
  Key key;
  uint64_t offset;  // in the pool
  uint32_t tokens;
  uint32_t checksummed;
  Key rest;  // of the part of the region that is left behind it
};
struct TakeBackItem {
  Key key;          // of the part that it becomes
  uint64_t region;  // the region's number
  uint32_t record;
  uint32_t reserved;
  uint64_t generation;
};
inline constexpr uint32_t kNoRecord = ~0u;
struct RegionItem {
  uint32_t status;  // Grant; Back
  uint32_t record;
  uint64_t generation;
  uint32_t opened;  // record of a part that is to be written from now on, kNoRecord: none
  uint32_t ended;
  uint64_t opened_generation;
  uint64_t ended_generation;
};

static_assert(sizeof(RegionHead) == 16 && sizeof(PublishItem) == 80 && sizeof(TakeBackItem) == 56 && sizeof(RegionItem) == 40);

// PublishPieces, TakeBackPieces (version 5): the same of blocks in pieces, at most kMaxPiecesPerMessage of them together. A
// RegionHead and `count` PiecesItems, and behind all of them the pieces of each, packed extents in the pool; a RegionHead and
// `count` TakeBackItems. The reply: `count` PiecesAnswers, and behind all of them of each the parts of the region that are to be
// written from now on, and those that are no more, a BlockItem each.
inline constexpr uint32_t kMaxPiecesPerMessage = 2048, kMaxBlocksInPieces = 1000;  // the latter to publish
struct PiecesItem {
  Key key;
  Key rest;  // what those that are left of the region are made from
  uint32_t tokens;
  uint32_t checksummed;
  uint32_t pieces;
  uint32_t reserved;
};
struct PiecesAnswer {
  uint32_t status;
  uint32_t record;
  uint64_t generation;
  uint32_t opened;  // how many
  uint32_t ended;
};
static_assert(sizeof(PiecesItem) == 80 && sizeof(PiecesAnswer) == 24);
static_assert(sizeof(Request) + sizeof(RegionHead) + kMaxBlocksInPieces * sizeof(PiecesItem) + 8 * kMaxPiecesPerMessage <=
              kMaxMessage);

// PinTerms: a PinsOnTerms, what holds for all pins of this session from here on. Device: a DeviceMemory. The replies are empty. A
// daemon that does not know these operations refuses them.
struct PinsOnTerms {
  uint32_t owner;        // PinOwner: client or engine
  uint32_t deadline_ms;  // after which a pin may be asked back; 0: none
  uint64_t bytes;        // beyond which the oldest are; 0: no bound
};
struct DeviceMemory {
  uint32_t writes;  // 1: a device was given memory of the pool and may write there. 0: it is done with all of it
  uint32_t reserved;
};

static_assert(sizeof(PinsOnTerms) == 16 && sizeof(DeviceMemory) == 8);
static_assert(sizeof(PromoteHead) == 8 && sizeof(PromiseItem) == 8 && sizeof(PinsWanted) == 8);
static_assert(sizeof(Request) == 16 && sizeof(Reply) == 16 && sizeof(Attach) == 96 && sizeof(Attached) == 96);
static_assert(sizeof(BlockItem) == 16 && sizeof(CreateHead) == 16 && sizeof(CreateItem) == 56 && sizeof(GrantItem) == 32 &&
              sizeof(LookUpItem) == 32);
static_assert(sizeof(Reply) + kMaxKeysPerMessage * sizeof(PiecesAnswer) + 2 * kMaxPiecesPerMessage * sizeof(BlockItem) <=
              kMaxMessage);
static_assert(sizeof(Request) + sizeof(CreateHead) + kMaxKeysPerMessage * (sizeof(CreateItem) + sizeof(BlockItem)) <=
              kMaxMessage);

// Reads structures off the front of a message. Throws nothing: `ok` turns false for good when the message is too short.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  template <class T>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    if (bytes_.size() < sizeof(T)) return ok_ = false, value;
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return value;
  }
  template <class T>
  std::vector<T> take(size_t count) {
    std::vector<T> values;
    if (bytes_.size() / sizeof(T) < count) return ok_ = false, values;
    values.resize(count);
    if (count) std::memcpy(values.data(), bytes_.data(), count * sizeof(T));
    bytes_ = bytes_.subspan(count * sizeof(T));
    return values;
  }
  void skip(size_t bytes) { bytes_.size() < bytes ? (void)(ok_ = false) : (void)(bytes_ = bytes_.subspan(bytes)); }
  std::span<const uint8_t> rest() const { return bytes_; }
  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && bytes_.empty(); }

 private:
  std::span<const uint8_t> bytes_;
  bool ok_ = true;
};

inline bool is_knock(std::span<const uint8_t> message) {
  Reader reader(message);
  return reader.take<Knock>().magic == kKnockMagic && reader.at_end();
}

inline void append_bytes(std::vector<uint8_t>& out, const void* bytes, size_t n) {
  const size_t at = out.size();
  out.resize(at + n);
  if (n) std::memcpy(out.data() + at, bytes, n);
}
template <class T>
void append(std::vector<uint8_t>& out, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  append_bytes(out, &value, sizeof value);
}
template <class T>
void append(std::vector<uint8_t>& out, const std::vector<T>& values) {
  static_assert(std::is_trivially_copyable_v<T>);
  append_bytes(out, values.data(), values.size() * sizeof(T));
}

}  // namespace kv::protocol
