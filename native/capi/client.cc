// kvs_client: attaching, layouts, and the questions about many keys.
#include <cstdlib>
#include <cstring>

#include "capi/objects.h"

using namespace kv;
using namespace kv::capi;

namespace {

constexpr uint32_t kMaxPins = 1u << 20;
constexpr double kMaxTimeout_s = 3600;

std::string socket_path(const char* directory) {
  const char* chosen = directory ? directory : std::getenv("KVSTORED_DIR");
  return std::string(chosen && *chosen ? chosen : "/run/kvstored") + "/kvstored.sock";
}

AttachOptions checked(const kvs_options& options) {
  if (options.struct_bytes < sizeof options)
    refuse("struct_bytes is " + std::to_string(options.struct_bytes) + "; kvs_default_options sets it to " +
           std::to_string(sizeof options));
  const std::string name = options.namespace_name ? options.namespace_name : "";
  if (name.empty() || name.size() > 63)
    refuse("namespace_name has " + std::to_string(name.size()) + " bytes; it must have 1 to 63");
  if (!(options.timeout_s > 0 && options.timeout_s <= kMaxTimeout_s))
    refuse("timeout_s is " + std::to_string(options.timeout_s) + "; it must be above 0 and at most 3600");
  if (options.max_pins < 1 || options.max_pins > kMaxPins)
    refuse("max_pins is " + std::to_string(options.max_pins) + "; it must be 1 to " + std::to_string(kMaxPins));
  return {socket_path(options.directory), name, options.read_only != 0, options.max_pins, options.timeout_s};
}

void append(std::vector<uint8_t>& blob, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) blob.push_back(static_cast<uint8_t>(value >> shift));
}

// The blob of docs/formats.md; the daemon's parser has the bounds.
std::vector<uint8_t> blob_of(const kvs_layout& layout) {
  if (layout.num_layers < 1 || layout.num_layers > 512)
    refuse("num_layers is " + std::to_string(layout.num_layers) + "; it must be 1 to 512");
  if (layout.dtype > KVS_INT8) refuse("dtype is " + std::to_string(layout.dtype) + "; it must be a kvs_dtype, 0 to 4");
  const uint64_t each =
      uint64_t{layout.kv_per_layer} * layout.num_kv_heads * layout.head_dim * dtype_bytes(static_cast<Dtype>(layout.dtype));
  if (!layout.layer_bytes_per_token && each > UINT32_MAX) refuse("a token has " + std::to_string(each) + " bytes in a layer");
  std::vector<uint8_t> blob = {'K', 'V', 'L', '1'};
  for (const uint32_t word : {layout.num_layers, layout.kv_per_layer, layout.num_kv_heads, layout.head_dim, layout.dtype,
                              layout.block_tokens, uint32_t{0}, layout.meta_fixed, layout.meta_per_token})
    append(blob, word);
  for (uint32_t i = 0; i < layout.num_layers; ++i)
    append(blob, layout.layer_bytes_per_token ? layout.layer_bytes_per_token[i] : static_cast<uint32_t>(each));
  static_cast<void>(Layout::parse(blob));  // refuses with the field's name
  return blob;
}

}  // namespace

extern "C" {

void kvs_default_options(kvs_options* options) {
  if (!options) return;
  *options = {sizeof(kvs_options), 65536, 5.0, nullptr, "default", 0};
}

kvs_status kvs_connect(const kvs_options* options, kvs_client** client) {
  return guarded("kvs_connect", [&] {
    need(options, "options");
    need(client, "client");
    *client = nullptr;
    *client = new kvs_client(checked(*options));
  });
}

void kvs_close(kvs_client* client) { delete client; }

void kvs_after_fork(kvs_client* client) {
  if (client) client->session.after_fork();
}

kvs_status kvs_register_layout(kvs_client* client, const kvs_layout* layout, uint32_t* layout_id) {
  return guarded("kvs_register_layout", [&] {
    need(client, "client");
    need(layout, "layout");
    need(layout_id, "layout_id");
    *layout_id = client->session.register_layout(blob_of(*layout));
  });
}

kvs_status kvs_stats(kvs_client* client, char** text) {
  return guarded("kvs_stats", [&] {
    need(client, "client");
    need(text, "text");
    const std::string figures = client->session.call([](Client& c) { return c.stats(); });
    *text = ::strdup(figures.c_str());
    if (!*text) throw std::bad_alloc();
  });
}

void kvs_free_text(char* text) { std::free(text); }

kvs_status kvs_lookup(kvs_client* client, const kvs_key* keys, size_t count, uint8_t* states) {
  return guarded("kvs_lookup", [&] {
    need(client, "client");
    if (count) need(states, "states");
    const auto wanted = keys_of(keys, count);
    const std::vector<uint8_t> found = client->session.call([&](Client& c) { return c.lookup(wanted); });
    std::copy(found.begin(), found.end(), states);
  });
}

kvs_status kvs_prefetch(kvs_client* client, const kvs_key* keys, size_t count, uint32_t priority, size_t* coming) {
  return guarded("kvs_prefetch", [&] {
    need(client, "client");
    if (priority > kMaxPriority) refuse("priority is " + std::to_string(priority) + "; it must be 0 to 100");
    const auto wanted = keys_of(keys, count);
    const auto promises = client->session.call([&](Client& c) { return c.promote(wanted, priority); });
    size_t there = 0;
    for (const auto& promise : promises) there += promise.presence != static_cast<uint32_t>(Presence::Missing);
    if (coming) *coming = there;
  });
}

kvs_status kvs_push(kvs_client* client, const kvs_key* keys, size_t count, const char* to, size_t* told) {
  return guarded("kvs_push", [&] {
    need(client, "client");
    need(to, "to");
    const auto wanted = keys_of(keys, count);
    const uint32_t coming = client->session.call([&](Client& c) { return c.push(wanted, to); });
    if (told) *told = coming;
  });
}

kvs_status kvs_delete(kvs_client* client, const kvs_key* keys, size_t count, size_t* deleted) {
  return guarded("kvs_delete", [&] {
    need(client, "client");
    const auto wanted = keys_of(keys, count);
    const uint32_t gone = client->session.call([&](Client& c) { return c.remove(wanted); });
    if (deleted) *deleted = gone;
  });
}

kvs_status kvs_touch(kvs_client* client, const kvs_key* keys, size_t count, size_t* there) {
  return guarded("kvs_touch", [&] {
    need(client, "client");
    const auto wanted = keys_of(keys, count);
    const uint32_t found = client->session.call([&](Client& c) { return c.touch(wanted); });
    if (there) *there = found;
  });
}

}  // extern "C"
