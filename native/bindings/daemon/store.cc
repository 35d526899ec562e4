// kvstored._core.Store: decode, call, encode. Every call releases the GIL; keys cross as one packed buffer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bindings/daemon/errors.h"
#include "core/store/store.h"

namespace nb = nanobind;

namespace {

using kv::Code;
using kv::Error;
using kv::Handle;
using kv::Key;
using kv::Store;

std::span<const uint8_t> view(const nb::bytes& bytes) { return {static_cast<const uint8_t*>(bytes.data()), bytes.size()}; }
nb::bytes to_bytes(const std::vector<uint8_t>& data) { return nb::bytes(data.data(), data.size()); }

Key one_key(std::span<const uint8_t> bytes) {
  if (bytes.size() != kv::kKeyBytes)
    throw Error(Code::InvalidArgument, "a key has " + std::to_string(bytes.size()) + " bytes, must have 32");
  Key key;
  std::memcpy(&key, bytes.data(), sizeof key);
  return key;
}

std::vector<Key> keys_of(const nb::bytes& packed) {
  const auto bytes = view(packed);
  if (bytes.size() % kv::kKeyBytes)
    throw Error(Code::InvalidArgument, "packed keys have " + std::to_string(bytes.size()) + " bytes, must be a multiple of 32");
  std::vector<Key> keys(bytes.size() / kv::kKeyBytes);
  if (!keys.empty()) std::memcpy(keys.data(), bytes.data(), bytes.size());
  return keys;
}

// One result byte per key, computed without the GIL.
template <class F>
nb::bytes each_key(const nb::bytes& packed, F&& f) {
  const std::vector<Key> keys = keys_of(packed);
  std::vector<uint8_t> out;
  {
    nb::gil_scoped_release release;
    for (const Key& key : keys) out.push_back(static_cast<uint8_t>(f(key)));
  }
  return to_bytes(out);
}

std::optional<kv::Layout> layout_by_id(Store& store, uint32_t layout_id) {
  const auto known = store.layout(layout_id);
  return known ? std::optional(known->layout) : std::nullopt;
}

// What became of one key of a create.
struct GrantedBlock {
  int status;  // kv::Grant
  Handle handle;
  uint64_t length_bytes;  // that may be written: layers, meta
};

std::vector<GrantedBlock> create(Store& store, uint32_t owner, const nb::bytes& packed, uint32_t layout_id,
                                 std::optional<std::vector<uint32_t>> token_counts, uint32_t priority, uint64_t ttl_ms) {
  const std::vector<Key> keys = keys_of(packed);
  if (token_counts && token_counts->size() != keys.size())
    throw Error(Code::InvalidArgument,
                std::to_string(token_counts->size()) + " token counts for " + std::to_string(keys.size()) + " keys");
  nb::gil_scoped_release release;
  const std::optional<kv::Layout> layout = layout_by_id(store, layout_id);
  if (!layout) throw Error(Code::NotFound, "layout " + std::to_string(layout_id) + " is not registered");
  std::vector<kv::CreateItem> items;
  for (size_t i = 0; i < keys.size(); ++i)
    items.push_back({.key = keys[i], .tokens = token_counts ? (*token_counts)[i] : layout->block_tokens});
  std::vector<GrantedBlock> out;
  const auto granted = store.create({owner, layout_id, priority, static_cast<uint32_t>((ttl_ms + 999) / 1000), items});
  for (size_t i = 0; i < items.size(); ++i) {
    const uint64_t length = layout->meta_offset(items[i].tokens) + layout->meta_bytes(items[i].tokens);
    out.push_back({static_cast<int>(granted[i].status), granted[i].handle, length});
  }
  return out;
}

std::vector<int> seal_blocks(Store& store, uint32_t owner, const std::vector<Handle>& handles) {
  nb::gil_scoped_release release;
  std::vector<kv::Seal> blocks;
  for (const Handle& handle : handles) blocks.push_back({handle, false});
  std::vector<int> out;
  for (const kv::Done done : store.seal(owner, blocks)) out.push_back(static_cast<int>(done));
  return out;
}

std::vector<int> abort_blocks(Store& store, uint32_t owner, const std::vector<Handle>& handles) {
  nb::gil_scoped_release release;
  std::vector<int> out;
  for (const Handle& handle : handles) out.push_back(static_cast<int>(store.abort(owner, handle)));
  store.settle();
  return out;
}

nb::dict to_dict(Store& store, const kv::Description& d) {
  nb::dict out;
  out["key"] = nb::bytes(&d.key, sizeof d.key);
  out["handle"] = Handle{d.record, d.snapshot.control.generation()};
  out["state"] = std::string(kv::name(d.state));
  out["generation"] = d.snapshot.control.generation();
  out["tokens"] = d.snapshot.shape.tokens;
  out["layout_id"] = d.snapshot.shape.layout;
  out["base_position"] = d.snapshot.shape.base_position;
  out["priority"] = d.snapshot.shape.priority;
  out["extent_bytes"] = d.snapshot.extent.length;
  const auto layout = layout_by_id(store, d.snapshot.shape.layout);
  out["length"] = layout ? layout->layers_bytes(d.snapshot.shape.tokens) : 0;
  out["created_ms"] = uint64_t{d.created_s} * 1000;
  out["ttl_ms"] = d.snapshot.expiry_s > d.created_s ? uint64_t{d.snapshot.expiry_s - d.created_s} * 1000 : 0;
  out["on_disk"] = d.state == kv::State::Disk || d.snapshot.control.flags() & kv::kFlagOnDisk;
  out["checksummed"] = (d.snapshot.control.flags() & kv::kFlagChecksummed) != 0;
  out["score"] = d.score;
  out["uses"] = d.uses;
  return out;
}

nb::object describe(Store& store, const nb::bytes& key) {
  const auto found = store.describe(one_key(view(key)));
  return found ? nb::object(to_dict(store, *found)) : nb::none();
}

// blocks, and next: where to go on, or None.
nb::dict list(Store& store, uint32_t next, uint32_t limit, const nb::bytes& prefix, double min_uses) {
  const auto found = [&] {
    const auto bytes = view(prefix);
    nb::gil_scoped_release release;
    return store.list(next, limit, bytes, min_uses);
  }();
  nb::list blocks;
  for (const auto& block : found) blocks.append(to_dict(store, block));
  nb::dict out;
  out["blocks"] = blocks;
  out["next"] = next == kv::Index::kAbsent ? nb::none() : nb::object(nb::int_(next));
  return out;
}

nb::dict store_stats(Store& store) {
  const kv::Stats s = [&] {
    nb::gil_scoped_release release;
    return store.stats();
  }();
  nb::dict out;
#define X(name) out[#name] = s.name;
  // clang-format off
  X(used_bytes) X(capacity_bytes) X(frontier_bytes) X(faulted_bytes) X(huge_bytes) X(slack_bytes) X(blocks) X(created)
  X(zombies) X(quarantined) X(on_disk) X(pending_writes) X(pins) X(sessions) X(max_blocks) X(epoch) X(fenced) X(draining)
  X(longest_hold_ns) X(long_holds)
  KV_STORE_COUNTERS(X);
  // clang-format on
#undef X
#define X(name, owner)                                                         \
  out["pins_" #name] = s.held[static_cast<size_t>(kv::PinOwner::owner)].count; \
  out["pinned_" #name "_bytes"] = s.held[static_cast<size_t>(kv::PinOwner::owner)].bytes;
  KV_PIN_OWNERS(X)
#undef X
  out["unsealed"] = s.created;
  return out;
}

nb::object read_block(Store& store, const nb::bytes& key, uint64_t offset, int64_t length) {
  std::optional<std::vector<uint8_t>> data;
  const Key wanted = one_key(view(key));
  {
    nb::gil_scoped_release release;
    data = store.read(wanted, offset, length < 0 ? ~0ull : static_cast<uint64_t>(length));
  }
  return data ? nb::object(to_bytes(*data)) : nb::none();
}

nb::object read_at(Store& store, const Handle& handle, uint64_t offset, uint64_t length) {
  std::optional<std::vector<uint8_t>> data;
  {
    nb::gil_scoped_release release;
    data = store.read_at(handle, offset, length);
  }
  return data ? nb::object(to_bytes(*data)) : nb::none();
}

uint32_t wait_layers(Store& store, const Handle& handle, uint32_t layers, uint32_t timeout_ms) {
  nb::gil_scoped_release release;
  return store.wait_layers(handle, layers, timeout_ms);
}

nb::dict scrub(Store& store, uint32_t from, uint64_t limit) {
  kv::ScrubResult r;
  {
    nb::gil_scoped_release release;
    r = store.scrub(from, limit);
  }
  nb::dict out;
  out["verified"] = r.verified, out["computed"] = r.computed, out["corrupt"] = r.corrupt, out["bytes"] = r.bytes,
  out["next"] = r.next, out["done"] = r.done;
  return out;
}

nb::bytes await_blocks(Store& store, const nb::bytes& packed, uint32_t priority, uint32_t timeout_ms, uint32_t wanted_ms) {
  const std::vector<Key> keys = keys_of(packed);
  std::vector<uint8_t> out;
  {
    nb::gil_scoped_release release;
    out = store.await_blocks(keys, std::min(priority, kv::kMaxPriority), timeout_ms, wanted_ms);
  }
  return to_bytes(out);
}

int touch(Store& store, const nb::bytes& packed) {
  return static_cast<int>(std::ranges::count(store.touch(keys_of(packed)), true));
}

nb::bytes delete_blocks(Store& store, const nb::bytes& packed) {
  nb::bytes out = each_key(packed, [&](const Key& key) { return store.remove(key); });
  store.settle();
  return out;
}

size_t push(Store& store, const nb::bytes& packed, const std::string& node) {
  const std::vector<Key> keys = keys_of(packed);
  nb::gil_scoped_release release;
  return store.push(node, keys);
}

uint64_t flush(Store& store) {
  const uint64_t count = store.flush();
  store.settle();
  return count;
}

nb::list layouts(Store& store) {
  nb::list out;
  for (auto& [known, blocks, on_disk, sessions] : store.layouts()) {
    nb::dict row;
    row["id"] = known->id, row["num_layers"] = known->layout.num_layers(), row["block_tokens"] = known->layout.block_tokens,
    row["blob"] = to_bytes(known->layout.blob), row["digest"] = nb::bytes(&known->digest, sizeof known->digest);
    row["blocks"] = blocks, row["on_disk"] = on_disk, row["sessions"] = sessions;
    out.append(row);
  }
  return out;
}

void bind_granted(nb::module_& m) {
  nb::class_<Handle>(m, "Handle", "A block as its writer or reader holds it: a record, and which of the blocks it had.")
      .def(
          "__init__", [](Handle* self, uint32_t record, uint64_t generation) { new (self) Handle{record, generation}; },
          nb::arg("record"), nb::arg("generation"))
      .def_ro("record", &Handle::record)
      .def_ro("generation", &Handle::generation);
  nb::class_<GrantedBlock>(m, "GrantedBlock", "What became of one key of a create.")
      .def_ro("status", &GrantedBlock::status)
      .def_ro("handle", &GrantedBlock::handle)
      .def_ro("length_bytes", &GrantedBlock::length_bytes);
}

}  // namespace

void bind_store(nb::module_& m) {
  bind_granted(m);
  nb::class_<Store>(m, "Store", "One namespace's blocks: the one mutator of its index, arena and sessions. Thread-safe.")
      .def(
          "__init__",
          [](Store* self, std::string name, int table_fd, int progress_fd, int pool_fd, uint64_t capacity_bytes,
             uint32_t max_blocks, const nb::bytes& pool_id, std::string directory, std::string prefix, bool adopt, bool disk,
             uint32_t write_at_once_priority, uint32_t max_pending_writes, uint32_t huge_after_ms) {
            kv::Id id{};
            if (pool_id.size() != id.size()) throw Error(Code::InvalidArgument, "pool_id must have 16 bytes");
            std::memcpy(id.data(), pool_id.data(), id.size());
            nb::gil_scoped_release release;
            new (self)
                Store({std::move(name), table_fd, progress_fd, pool_fd, capacity_bytes, max_blocks, id, std::move(directory),
                       std::move(prefix), adopt, disk, write_at_once_priority, max_pending_writes, huge_after_ms});
          },
          nb::arg("name"), nb::arg("table_fd"), nb::arg("progress_fd"), nb::arg("pool_fd"), nb::arg("capacity_bytes"),
          nb::arg("max_blocks"), nb::arg("pool_id"), nb::arg("segment_dir"), nb::arg("segment_prefix"), nb::arg("adopt") = false,
          nb::arg("disk") = false, nb::arg("write_at_once_priority") = kv::kMaxPriority, nb::arg("max_pending_writes") = 1024,
          nb::arg("huge_after_ms") = 0)
      .def_static("table_bytes", &Store::table_bytes, nb::arg("max_blocks"), nb::arg("capacity_bytes"),
                  nb::arg("layouts") = kv::kMaxLayouts)
      .def_static("progress_bytes",
                  [](uint32_t max_blocks) { return kv::round_up(Store::progress_bytes(max_blocks), kv::kPageBytes); })
      .def_static("retire", &Store::retire, nb::arg("table_fd"), "Tells the clients of a pool that is given up to attach anew.")
      .def("close", &Store::close, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "register_layout", [](Store& s, const nb::bytes& blob, uint32_t owner) { return s.register_layout(view(blob), owner); },
          nb::arg("blob"), nb::arg("owner") = 0)
      .def("layouts", &layouts)
      .def("lookup",
           [](Store& s, const nb::bytes& keys) { return each_key(keys, [&](const Key& key) { return s.lookup(key).presence; }); })
      .def("create", &create, nb::arg("owner"), nb::arg("packed_keys"), nb::arg("layout_id"), nb::arg("token_counts").none(),
           nb::arg("priority") = kv::kDefaultPriority, nb::arg("ttl_ms") = 0)
      .def(
          "write",
          [](Store& s, const Handle& handle, uint64_t offset, const nb::bytes& data) {
            const auto bytes = view(data);
            nb::gil_scoped_release release;
            s.write(handle, offset, bytes);
          },
          nb::arg("handle"), nb::arg("offset"), nb::arg("data"))
      .def("mark_layer", &Store::mark_layer, nb::arg("handle"), nb::arg("layers"))
      .def("seal", &seal_blocks, nb::arg("owner"), nb::arg("handles"))
      .def("abort", &abort_blocks, nb::arg("owner"), nb::arg("handles"))
      .def("read", &read_block, nb::arg("key"), nb::arg("offset") = 0, nb::arg("length") = -1)
      .def("read_at", &read_at, nb::arg("handle"), nb::arg("offset"), nb::arg("length"))
      .def("wait_layers", &wait_layers, nb::arg("handle"), nb::arg("layers"), nb::arg("timeout_ms"))
      .def("describe", &describe)
      .def("delete", &delete_blocks)
      .def("touch", &touch)
      .def("await_blocks", &await_blocks, nb::arg("packed_keys"), nb::arg("priority"), nb::arg("timeout_ms"),
           nb::arg("wanted_ms") = 0)
      .def("push", &push, nb::arg("packed_keys"), nb::arg("to"))
      .def("flush", &flush, nb::call_guard<nb::gil_scoped_release>())
      .def("ask_pins_back", &Store::ask_pins_back, nb::arg("session"))
      .def("list", &list, nb::arg("next"), nb::arg("limit"), nb::arg("key_prefix"), nb::arg("min_uses"))
      .def("stats", &store_stats)
      .def("check_integrity", &Store::check_integrity, nb::call_guard<nb::gil_scoped_release>())
      .def("scrub", &scrub, nb::arg("from_record"), nb::arg("limit_bytes"))
      .def("open_owner", &Store::open_owner)
      .def("close_owner", &Store::end_session)
      .def("drain", &Store::drain)
      .def("problem", &Store::problem)
      .def("tick", &Store::tick, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("name", &Store::name);
}
