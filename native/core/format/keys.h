// Chains: the keys, fingerprints and tokens of a prompt's chunks (docs/formats.md §4).
//
//   root           = SHA-256("kvr1" | identity)                       never a block's key
//   prefix_key(i)  = SHA-256("kvp1" | prefix_key(i-1) or root | u32 n | u8 has_extra | n int32 | extra ids)
//   content_key(i) = SHA-256("kvc1" | identity | u32 n | u8 has_extra | n int32 | extra ids)
//   fingerprint(i) = sum of (u32(token_j) + 1) * base^(n-1-j) modulo 2^61-1
//   base           = 2 + (first u64 of SHA-256("kvf1" | identity)) mod (2^61-4)
//
// A chain that was cut by content names the tokens of each chunk, and may stand at another start than 0 and behind another
// root; its fingerprints are those of the first `window` tokens of a chunk (docs/formats.md).
//
// n is the chunk's token count; numbers are little-endian. Extra ids are u64: one word per token, or four where they
// are 32-byte digests. has_extra is 1 if any word of that chunk is nonzero. If it is 0, nothing follows the tokens: a
// chunk of ordinary tokens has one key whether or not extra ids were given.
//
// Owns a copy of the prompt's ids. Never knows Python, a layout or a block. Invariant: immutable after construction
// (content keys and fingerprints are filled in once, at first use); slices share the storage and cost nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "core/format/block.h"

namespace kv {

inline constexpr uint32_t kMaxBlockTokens = 65535;
inline constexpr size_t kMaxChainTokens = size_t{1} << 24;

Key root_key(const Key& identity);

// The base of an identity's fingerprints.
uint64_t fingerprint_base(const Key& identity);

// The fingerprint of every window of `window` consecutive ids, in linear time: out[i] is that of tokens[i, i+window).
// Writes count - window + 1 values, none if count < window. Requires 0 < window <= kMaxBlockTokens.
void window_fingerprints(uint64_t base, const int32_t* tokens, size_t count, size_t window, uint64_t* out);

// Where a prompt is cut, if not every block_tokens.
struct Cuts {
  std::span<const uint32_t> counts;  // tokens of each chunk, 1 to block_tokens; empty: every block_tokens
  size_t start = 0;                  // position of the first token
  const Key* root = nullptr;         // stands before the first chunk in the place of the identity's root
  uint32_t window = 0;               // tokens that a fingerprint is taken over, at most; 0: all of a chunk
};

class Chain {
  struct Storage {
    Key identity;
    uint32_t block_tokens;
    uint32_t extra_words;  // per token: 0, 1 or 4
    uint32_t window;
    size_t start;
    std::vector<size_t> ends;     // of the chunks; empty if they are cut every block_tokens
    std::vector<int32_t> tokens;  // of all chunks; ids behind the last chunk are not kept
    std::vector<uint64_t> extra;
    std::vector<Key> keys;  // a zero key, then one per chunk: keys[i] is the parent of chunk i
    // What only writers and searches need, each derived at first use: content keys take as long as the keys.
    mutable std::once_flag content_once, fingerprints_once;
    mutable std::vector<Key> content_keys;
    mutable std::vector<uint64_t> fingerprints;
  };

 public:
  // Hashes all full chunks of `tokens`, and with `partial` also the shorter last one. `extra` holds extra_words (0, 1
  // or 4) per token. Requires 0 < block_tokens <= kMaxBlockTokens and count <= kMaxChainTokens; of cuts, that the counts are
  // 1 to block_tokens, add up to count at most, and leave start + count <= kMaxChainTokens.
  Chain(const Key& identity, const int32_t* tokens, size_t count, const uint64_t* extra, uint32_t extra_words,
        uint32_t block_tokens, bool partial, const Cuts& cuts = {});

  size_t size() const { return count_; }      // chunks
  bool empty() const { return count_ == 0; }  // without a chunk

  // Chunks [first, first + count) as a chain. Requires first + count <= size().
  Chain slice(size_t first, size_t count) const { return Chain(storage_, first_ + first, count); }

  // size() prefix keys, contiguous, valid as long as this chain or any slice of its prompt lives.
  const Key* keys() const { return storage_->keys.data() + 1 + first_; }
  // The same for content keys and fingerprints. The first call for a prompt computes them; any thread may make it.
  const Key* content_keys() const;
  const uint64_t* fingerprints() const;                               // size() of them
  uint64_t fingerprint(size_t i) const { return fingerprints()[i]; }  // of chunk i

  // The prefix key before chunk i, also where that chunk lies before this slice; all zeros for a prompt's first chunk.
  const Key& parent_key(size_t i) const { return storage_->keys[first_ + i]; }

  // Position of chunk i's first token in the prompt.
  size_t start_token(size_t i) const { return storage_->start + offset(i); }
  uint32_t token_count(size_t i) const {  // of chunk i
    if (!storage_->ends.empty()) return static_cast<uint32_t>(storage_->ends[first_ + i] - offset(i));
    const size_t left = storage_->tokens.size() - offset(i);
    return left < block_tokens() ? static_cast<uint32_t>(left) : block_tokens();
  }
  // Tokens of all chunks of this chain; those of chunk i are followed by those of chunk i+1.
  size_t num_tokens() const;
  // Of chunk i, token_count(i) of them.
  const int32_t* tokens(size_t i) const { return storage_->tokens.data() + offset(i); }
  // Extra ids of chunk i, extra_words() per token; null if the chain was made without.
  const uint64_t* extra(size_t i) const {
    return extra_words() == 0 ? nullptr : storage_->extra.data() + offset(i) * extra_words();
  }
  uint32_t extra_words() const { return storage_->extra_words; }

  // What keys of this chain mean, and the tokens of a whole chunk.
  const Key& identity() const { return storage_->identity; }
  uint32_t block_tokens() const { return storage_->block_tokens; }

  friend bool operator==(const Chain& a, const Chain& b);

 private:
  size_t offset(size_t i) const {  // of chunk i in storage_->tokens
    if (storage_->ends.empty()) return (first_ + i) * block_tokens();
    return first_ + i == 0 ? 0 : storage_->ends[first_ + i - 1];
  }

  Chain(std::shared_ptr<const Storage> storage, size_t first, size_t count)
      : storage_(std::move(storage)), first_(first), count_(count) {}

  Key hash_chunk(const char (&tag)[5], const Key& before, size_t i) const;

  std::shared_ptr<const Storage> storage_;
  size_t first_ = 0;  // chunk of the prompt that this chain starts with
  size_t count_ = 0;
};

}  // namespace kv
