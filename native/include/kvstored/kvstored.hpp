// kvstored.hpp: kvstored.h for C++20. Handles that free themselves, spans, and results that are a value or an error.
//
// Owns nothing of its own: every function is one of kvstored.h, whose notes say what it may wait for and which thread may call.
// Nothing throws but Result::value(), * and -> on an error, and what has no memory. Objects may be moved and not copied; one that
// was moved from may end and no more. A Region must go before its Client. Memory that a span shows is the store's: valid until
// its Blocks, Writer or Region ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kvstored/kvstored.h"

namespace kvstored {

// What went wrong, with the value and the limit in its text.
struct Error {
  kvs_status status;
  std::string text;
};

// A value, or why there is none: as std::expected<T, Error>.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : outcome_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : outcome_(std::in_place_index<1>, std::move(error)) {}
  bool has_value() const noexcept { return outcome_.index() == 0; }
  explicit operator bool() const noexcept { return has_value(); }
  // Throws std::runtime_error with the error's text.
  T& value() & { return checked(), std::get<0>(outcome_); }
  const T& value() const& { return checked(), std::get<0>(outcome_); }
  T&& value() && { return checked(), std::get<0>(std::move(outcome_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Error& error() const { return std::get<1>(outcome_); }

 private:
  void checked() const {
    if (!has_value()) throw std::runtime_error(error().text);
  }
  std::variant<T, Error> outcome_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}
  bool has_value() const noexcept { return !error_; }
  explicit operator bool() const noexcept { return has_value(); }
  void value() const {
    if (error_) throw std::runtime_error(error_->text);
  }
  const Error& error() const { return *error_; }

 private:
  std::optional<Error> error_;
};

namespace detail {

inline Error last(kvs_status status) { return {status, kvs_last_error()}; }

template <auto Free>
struct Freed {
  template <typename T>
  void operator()(T* handle) const noexcept {
    Free(handle);
  }
};

inline Result<void> done(kvs_status status) { return status == KVS_OK ? Result<void>() : Result<void>(last(status)); }

}  // namespace detail

using Key = kvs_key;
using Bytes = std::span<const std::byte>;
using WritableBytes = std::span<std::byte>;

inline bool same(const Key& a, const Key& b) noexcept { return std::memcmp(&a, &b, sizeof a) == 0; }

inline Bytes bytes_of(const kvs_const_span& span) noexcept { return {static_cast<const std::byte*>(span.data), span.length}; }

// The blocks one get pinned. They stay where they are until this ends.
class Blocks {
 public:
  explicit Blocks(kvs_blocks* handle) noexcept : handle_(handle) {}
  std::size_t size() const noexcept { return kvs_blocks_count(get()); }
  bool hit(std::size_t i) const noexcept { return kvs_blocks_hit(get(), i) == 1; }
  bool sealed(std::size_t i) const noexcept { return kvs_blocks_sealed(get(), i) == 1; }
  std::uint32_t tokens(std::size_t i) const noexcept { return kvs_blocks_tokens(get(), i); }
  std::uint32_t layers_ready(std::size_t i) const noexcept { return kvs_blocks_layers_ready(get(), i); }
  Result<Bytes> layer(std::size_t i, std::uint32_t layer) const {
    kvs_const_span found{};
    const kvs_status status = kvs_blocks_layer(get(), i, layer, &found);
    return status == KVS_OK ? Result<Bytes>(bytes_of(found)) : Result<Bytes>(detail::last(status));
  }
  // The same layer of all blocks, in order, once it is there: an empty span for a miss. 0: it waits for nothing.
  Result<std::vector<Bytes>> layers(std::uint32_t layer, double timeout_s = 0) const {
    if (timeout_s != 0) {
      if (const auto there = wait_layers(layer, timeout_s); !there) return there.error();
    }
    std::vector<kvs_const_span> found(size());
    if (const kvs_status status = kvs_blocks_layers(get(), layer, found.data()); status != KVS_OK) return detail::last(status);
    std::vector<Bytes> out;
    out.reserve(found.size());
    for (const kvs_const_span& one : found) out.push_back(bytes_of(one));
    return out;
  }
  Result<Bytes> meta(std::size_t i) const {
    kvs_const_span found{};
    const kvs_status status = kvs_blocks_meta(get(), i, &found);
    return status == KVS_OK ? Result<Bytes>(bytes_of(found)) : Result<Bytes>(detail::last(status));
  }
  Result<void> wait_layer(std::size_t i, std::uint32_t layer, double timeout_s) const {
    return detail::done(kvs_blocks_wait_layer(get(), i, layer, timeout_s));
  }
  Result<void> wait_layers(std::uint32_t layer, double timeout_s) const {
    return detail::done(kvs_blocks_wait_layers(get(), layer, timeout_s));
  }
  kvs_blocks* get() const noexcept { return handle_.get(); }

 private:
  std::unique_ptr<kvs_blocks, detail::Freed<kvs_blocks_free>> handle_;
};

// The blocks one create granted. What is not sealed when this ends is given up.
class Writer {
 public:
  explicit Writer(kvs_writer* handle) noexcept : handle_(handle) {}
  std::size_t size() const noexcept { return kvs_writer_count(get()); }
  kvs_grant grant(std::size_t i) const noexcept { return static_cast<kvs_grant>(kvs_writer_grant(get(), i)); }
  bool granted(std::size_t i) const noexcept { return grant(i) == KVS_GRANTED; }
  Result<WritableBytes> layer(std::size_t i, std::uint32_t layer) {
    kvs_span found{};
    const kvs_status status = kvs_writer_layer(get(), i, layer, &found);
    return status == KVS_OK ? writable(found) : Result<WritableBytes>(detail::last(status));
  }
  Result<WritableBytes> meta(std::size_t i) {
    kvs_span found{};
    const kvs_status status = kvs_writer_meta(get(), i, &found);
    return status == KVS_OK ? writable(found) : Result<WritableBytes>(detail::last(status));
  }
  Result<void> copy_layer(std::size_t i, std::uint32_t layer, Bytes source) {
    return detail::done(kvs_writer_copy_layer(get(), i, layer, source.data(), source.size()));
  }
  Result<void> mark_layer(std::size_t i, std::uint32_t layer) { return detail::done(kvs_writer_mark_layer(get(), i, layer)); }
  Result<void> seal(std::size_t i = KVS_ALL, bool zero_rest = false) {
    return detail::done(kvs_writer_seal(get(), i, zero_rest));
  }
  Result<void> abort(std::size_t i = KVS_ALL) { return detail::done(kvs_writer_abort(get(), i)); }
  Result<void> wait_pending(double timeout_s) { return detail::done(kvs_writer_wait_pending(get(), timeout_s)); }
  kvs_writer* get() const noexcept { return handle_.get(); }

 private:
  static Result<WritableBytes> writable(const kvs_span& span) {
    return WritableBytes{static_cast<std::byte*>(span.data), span.length};
  }
  std::unique_ptr<kvs_writer, detail::Freed<kvs_writer_free>> handle_;
};

// Where the pieces of a block lie in a region, and what the three axes of `shape` count (kvstored.h).
using Buffer = kvs_buffer;
using BufferShape = kvs_buffer_shape;

struct PutOptions {
  std::uint32_t layer_index = 0;                     // of the first layer that the buffers hold
  std::span<const std::uint32_t> token_counts = {};  // of each block; empty: full ones
  std::uint32_t priority = 35;
  std::uint32_t ttl_s = 0;
};

// Memory of the pool for an allocator of the caller's own. Must end before its Client.
class Region {
 public:
  explicit Region(kvs_region* handle) noexcept : handle_(handle) {}
  WritableBytes memory() const noexcept {
    kvs_span found{};
    if (kvs_region_memory(get(), &found) != KVS_OK) return {};
    return {static_cast<std::byte*>(found.data), found.length};
  }
  // A kvs_registered for each key; buffers: those of the first block, then those of the next.
  Result<std::vector<std::uint8_t>> put(std::span<const Key> keys, std::uint32_t layout_id, const BufferShape& shape,
                                        std::span<const Buffer> buffers, const PutOptions& options = {}) {
    const std::size_t each = std::size_t{shape.sizes[0]} * shape.sizes[1] * shape.sizes[2];
    if (buffers.size() != each * keys.size())
      return Error{KVS_INVALID_ARGUMENT, std::to_string(buffers.size()) + " buffers for " + std::to_string(keys.size()) +
                                             " blocks of " + std::to_string(each)};
    if (!options.token_counts.empty() && options.token_counts.size() != keys.size())
      return Error{KVS_INVALID_ARGUMENT,
                   std::to_string(options.token_counts.size()) + " token counts for " + std::to_string(keys.size()) + " keys"};
    std::vector<std::uint8_t> results(keys.size());
    const std::uint32_t* counts = options.token_counts.empty() ? nullptr : options.token_counts.data();
    const kvs_status status = kvs_region_put(get(), keys.data(), keys.size(), layout_id, &shape, buffers.data(),
                                             options.layer_index, counts, options.priority, options.ttl_s, results.data());
    if (status != KVS_OK) return detail::last(status);
    return results;
  }
  // A kvs_loaded for each of what a get pinned; buffers as for put().
  Result<std::vector<std::uint8_t>> load(const Blocks& blocks, const BufferShape& shape, std::span<const Buffer> buffers,
                                         std::uint32_t layer_index = 0) {
    const std::size_t each = std::size_t{shape.sizes[0]} * shape.sizes[1] * shape.sizes[2];
    if (buffers.size() != each * blocks.size())
      return Error{KVS_INVALID_ARGUMENT, std::to_string(buffers.size()) + " buffers for " + std::to_string(blocks.size()) +
                                             " blocks of " + std::to_string(each)};
    std::vector<std::uint8_t> results(blocks.size());
    const kvs_status status = kvs_region_load(get(), blocks.get(), &shape, buffers.data(), layer_index, results.data());
    if (status != KVS_OK) return detail::last(status);
    return results;
  }
  // Blocks that lie at these offsets as kvs_block_layer() says, sealed there: a kvs_registered each.
  Result<std::vector<std::uint8_t>> seal(std::span<const Key> keys, std::uint32_t layout_id,
                                         std::span<const std::uint64_t> offsets, const PutOptions& options = {}) {
    if (offsets.size() != keys.size() || (!options.token_counts.empty() && options.token_counts.size() != keys.size()))
      return Error{KVS_INVALID_ARGUMENT, std::to_string(offsets.size()) + " offsets and " +
                                             std::to_string(options.token_counts.size()) + " token counts for " +
                                             std::to_string(keys.size()) + " keys"};
    std::vector<std::uint8_t> results(keys.size());
    const std::uint32_t* counts = options.token_counts.empty() ? nullptr : options.token_counts.data();
    const kvs_status status = kvs_region_seal(get(), keys.data(), keys.size(), layout_id, offsets.data(), counts,
                                              options.priority, options.ttl_s, results.data());
    if (status != KVS_OK) return detail::last(status);
    return results;
  }
  // Blocks whose buffers lie apart, as for put(), in whole pages all.
  Result<std::vector<std::uint8_t>> seal_pieces(std::span<const Key> keys, std::uint32_t layout_id, const BufferShape& shape,
                                                std::span<const Buffer> buffers, const PutOptions& options = {}) {
    const std::size_t each = std::size_t{shape.sizes[0]} * shape.sizes[1] * shape.sizes[2];
    if (buffers.size() != each * keys.size() || (!options.token_counts.empty() && options.token_counts.size() != keys.size()))
      return Error{KVS_INVALID_ARGUMENT, std::to_string(buffers.size()) + " buffers and " +
                                             std::to_string(options.token_counts.size()) + " token counts for " +
                                             std::to_string(keys.size()) + " blocks of " + std::to_string(each)};
    std::vector<std::uint8_t> results(keys.size());
    const std::uint32_t* counts = options.token_counts.empty() ? nullptr : options.token_counts.data();
    const kvs_status status = kvs_region_seal_pieces(get(), keys.data(), keys.size(), layout_id, &shape, buffers.data(), counts,
                                                     options.priority, options.ttl_s, results.data());
    if (status != KVS_OK) return detail::last(status);
    return results;
  }
  // A kvs_given_back each.
  Result<std::vector<std::uint8_t>> give_back(std::span<const Key> keys) {
    std::vector<std::uint8_t> results(keys.size());
    const kvs_status status = kvs_region_give_back(get(), keys.data(), keys.size(), results.data());
    if (status != KVS_OK) return detail::last(status);
    return results;
  }
  std::string refusal(std::size_t i) const { return kvs_region_refusal(get(), i); }
  Result<void> forget(std::span<const Key> keys) { return detail::done(kvs_region_forget(get(), keys.data(), keys.size())); }
  kvs_region* get() const noexcept { return handle_.get(); }

 private:
  std::unique_ptr<kvs_region, detail::Freed<kvs_region_free>> handle_;
};

struct Options {
  std::string directory;  // of the daemon; empty: $KVSTORED_DIR, or /run/kvstored
  std::string namespace_name = "default";
  double timeout_s = 5;
  std::uint32_t max_pins = 65536;
  bool read_only = false;
};

struct CreateOptions {
  std::span<const std::uint32_t> token_counts = {};  // of each block; empty: full ones
  std::uint32_t priority = 35;
  std::uint32_t ttl_s = 0;  // 0: for ever
};

struct GetOptions {
  bool follow = false;
  bool verify = false;
  double wait_s = 0;
};

// A session with one namespace of a daemon.
class Client {
 public:
  static Result<Client> connect(const Options& options = {}) {
    kvs_options raw;
    kvs_default_options(&raw);
    if (!options.directory.empty()) raw.directory = options.directory.c_str();
    raw.namespace_name = options.namespace_name.c_str();
    raw.timeout_s = options.timeout_s;
    raw.max_pins = options.max_pins;
    raw.read_only = options.read_only;
    kvs_client* handle = nullptr;
    const kvs_status status = kvs_connect(&raw, &handle);
    return status == KVS_OK ? Result<Client>(Client(handle)) : Result<Client>(detail::last(status));
  }
  Result<std::uint32_t> register_layout(const kvs_layout& layout) {
    std::uint32_t id = 0;
    const kvs_status status = kvs_register_layout(get(), &layout, &id);
    return status == KVS_OK ? Result<std::uint32_t>(id) : Result<std::uint32_t>(detail::last(status));
  }
  // A kvs_presence each.
  Result<std::vector<std::uint8_t>> lookup(std::span<const Key> keys) const {
    std::vector<std::uint8_t> states(keys.size());
    const kvs_status status = kvs_lookup(get(), keys.data(), keys.size(), states.data());
    if (status != KVS_OK) return detail::last(status);
    return states;
  }
  Result<Blocks> get(std::span<const Key> keys, const GetOptions& options = {}) {
    kvs_blocks* handle = nullptr;
    const std::uint32_t flags = (options.follow ? KVS_FOLLOW : 0u) | (options.verify ? KVS_VERIFY : 0u);
    const kvs_status status = kvs_get(get(), keys.data(), keys.size(), flags, options.wait_s, &handle);
    return status == KVS_OK ? Result<Blocks>(Blocks(handle)) : Result<Blocks>(detail::last(status));
  }
  Result<Writer> create(std::span<const Key> keys, std::uint32_t layout_id, const CreateOptions& options = {}) {
    if (!options.token_counts.empty() && options.token_counts.size() != keys.size())
      return Error{KVS_INVALID_ARGUMENT,
                   std::to_string(options.token_counts.size()) + " token counts for " + std::to_string(keys.size()) + " keys"};
    kvs_writer* handle = nullptr;
    const std::uint32_t* counts = options.token_counts.empty() ? nullptr : options.token_counts.data();
    const kvs_status status =
        kvs_create(get(), keys.data(), keys.size(), layout_id, counts, options.priority, options.ttl_s, &handle);
    return status == KVS_OK ? Result<Writer>(Writer(handle)) : Result<Writer>(detail::last(status));
  }
  // Of a block of so many tokens, 0: as many as its layout has.
  Result<std::uint64_t> block_bytes(std::uint32_t layout_id, std::uint32_t tokens = 0) {
    std::uint64_t bytes = 0;
    const kvs_status status = kvs_block_bytes(get(), layout_id, tokens, &bytes);
    return status == KVS_OK ? Result<std::uint64_t>(bytes) : Result<std::uint64_t>(detail::last(status));
  }
  Result<Buffer> block_layer(std::uint32_t layout_id, std::uint32_t layer, std::uint32_t tokens = 0) {
    Buffer place{};
    const kvs_status status = kvs_block_layer(get(), layout_id, tokens, layer, &place);
    return status == KVS_OK ? Result<Buffer>(place) : Result<Buffer>(detail::last(status));
  }
  Result<Region> register_region(std::uint64_t length) {
    kvs_region* handle = nullptr;
    const kvs_status status = kvs_register_region(get(), length, &handle);
    return status == KVS_OK ? Result<Region>(Region(handle)) : Result<Region>(detail::last(status));
  }
  // How many were there.
  Result<std::size_t> remove(std::span<const Key> keys) { return counted(kvs_delete, keys); }
  Result<std::size_t> touch(std::span<const Key> keys) { return counted(kvs_touch, keys); }
  Result<std::size_t> prefetch(std::span<const Key> keys, std::uint32_t priority = 35) {
    std::size_t coming = 0;
    const kvs_status status = kvs_prefetch(get(), keys.data(), keys.size(), priority, &coming);
    return status == KVS_OK ? Result<std::size_t>(coming) : Result<std::size_t>(detail::last(status));
  }
  // How many of them the host `to` is told to come for.
  Result<std::size_t> push(std::span<const Key> keys, const std::string& to) {
    std::size_t told = 0;
    const kvs_status status = kvs_push(get(), keys.data(), keys.size(), to.c_str(), &told);
    return status == KVS_OK ? Result<std::size_t>(told) : Result<std::size_t>(detail::last(status));
  }
  // The namespace's figures as JSON.
  Result<std::string> stats() {
    char* text = nullptr;
    if (const kvs_status status = kvs_stats(get(), &text); status != KVS_OK) return detail::last(status);
    std::string out(text);
    kvs_free_text(text);
    return out;
  }
  void after_fork() noexcept { kvs_after_fork(get()); }
  kvs_client* get() const noexcept { return handle_.get(); }

 private:
  explicit Client(kvs_client* handle) noexcept : handle_(handle) {}
  template <typename Call>
  Result<std::size_t> counted(Call call, std::span<const Key> keys) {
    std::size_t count = 0;
    const kvs_status status = call(get(), keys.data(), keys.size(), &count);
    return status == KVS_OK ? Result<std::size_t>(count) : Result<std::size_t>(detail::last(status));
  }
  std::unique_ptr<kvs_client, detail::Freed<kvs_close>> handle_;
};

}  // namespace kvstored
