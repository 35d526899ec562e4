// What daemons of different hosts say to each other over a stream: frames of a fixed head and a payload, little-endian. The head
// has the checksum of the payload and one of itself, so a flipped bit anywhere ends the connection and never lands in a block.
#pragma once

#include <cstdint>

#include "core/format/block.h"

namespace kv::peer {

inline constexpr uint32_t kMagic = 0x3150564b;               // "KVP1"
inline constexpr uint32_t kVersion = 3, kOldestVersion = 2;  // both are said; the highest that both ends know is spoken
inline constexpr uint32_t kHalvesVersion = 3;                // from which on a block may be asked for by halves
inline constexpr size_t kMaxName = 63;
inline constexpr uint32_t kMaxKeysPerFetch = 64;
inline constexpr size_t kMostLayoutsTold = 64;  // remembered at both ends of a connection: who is told another forgets the oldest
inline constexpr uint64_t kMaxControlBytes = 16 << 10;  // payload of every frame but Meta and Layer, whose size the layout says
inline constexpr uint64_t kLargeBytes = 32 << 20;       // a block from here on may come by halves

// Where the second half of a block begins.
constexpr uint32_t middle_of(uint32_t layers) { return (layers + 1) / 2; }

enum class Kind : uint16_t {
  Hello = 1,
  Challenge,
  Proof,
  Welcome,
  Refused,
  Fetch,   // keys; `layer`: of those before it the checksums are enough. The answer is, per item, Missing, or Head, Meta and
           // layers in order, then Whole or Lost. `item` 1, of one key: if the block is sealed, the first half of it, where it is
           // large, or what is behind the middle that `layer` names, and nothing of what is before; if it is not, no such half
  Layout,  // a layout's blob, before the first Head that names it on this connection, and again when it may be forgotten
  Head,    // a BlockHead; `layer`: the middle, if that is the end of what is sent
  Meta,    // the block's meta area; a second one replaces the first. `layer`, of a half: the same in both of one copy there
  Layer,   // the bytes of layer `layer`
  Whole,   // the block is sealed and all of it was sent
  Missing,  // there is no such block
  Lost,     // its writer gave it up
  Waiting,  // somebody still computes; says that this daemon lives
  Ping,
  Pong,
  Busy,   // it is sent to as many as may have it at once; the payload has names of nodes that get it, kMaxName + 1 bytes each
  Watch,  // from here on this connection is for Holds alone; `layer` 1: and for Pushed
  Holds,  // marks of keys (core/store/journal.h) that came and went, in order; `layer` is 1 once all that there is was told
  // Between a daemon and the fabric beside it, which brings a block to its place itself (core/store/quarantine.h):
  Offer,    // behind a Head: all of the block's extent can be had; CRC32C of the meta area, then of each layer
  Room,     // the answer: a Room
  Placed,   // the extent is filled, and nothing writes there any more
  Checked,  // the answer: it is the block, and published (`layer` is 1), or is not; then its layers may come, or Lost
  Over,     // before any answer: numbers of loans whose transfers are over
  // Between daemons again:
  Pushed,  // keys that somebody there wants this host to come for
  Half,    // in the place of Whole: the layers that the head said were sent
};

struct Frame {
  uint32_t magic = kMagic;
  uint16_t kind = 0;
  uint16_t item = 0;  // of the fetch
  uint32_t request = 0;
  uint32_t layer = 0;
  uint64_t bytes = 0;  // of the payload
  uint32_t payload_crc = 0;
  uint32_t head_crc = 0;  // of all before
};

struct Hello {
  uint32_t version, oldest;  // 0: no other than `version`
  char node[kMaxName + 1];
  char space[kMaxName + 1];  // the namespace
  uint8_t nonce[32];
};
struct Challenge {
  uint32_t version, oldest;  // what is spoken from here on; 0
  char node[kMaxName + 1];
  uint8_t nonce[32];
  uint8_t proof[32];
};
struct Proof {
  uint8_t proof[32];
};

struct BlockHead {
  Key key;
  Key layout;  // digest of its blob
  uint64_t fingerprint;
  uint32_t tokens, base_position, parent, priority;
  uint32_t ttl_s;  // 0: it never expires
  uint32_t layers;
};

struct Room {
  uint64_t offset, bytes;  // in the namespace's pool; no bytes: the block is not wanted any more
  uint64_t loan;           // 0: nothing is lent, its layers may come as frames
};

static_assert(sizeof(Room) == 24 && sizeof(Frame) == 32 && sizeof(Hello) == 168 && sizeof(Challenge) == 136 &&
              sizeof(BlockHead) == 96);

}  // namespace kv::peer
