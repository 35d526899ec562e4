// kvs_region: memory for the caller's own allocator, and blocks published out of it (kvclient.client.region is its like).
// kvs_region_put copies out of it, kvs_region_load into it; kvs_region_seal seals a block where it lies, which is not to be
// written to until it was given back.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <set>

#include "capi/buffers.h"
#include "capi/objects.h"
#include "core/client/region.h"

using namespace kv;
using namespace kv::capi;

namespace {

// A block some of whose layers are still to come.
struct Open {
  std::shared_ptr<BlockWriter> writer;
  size_t index;
  uint32_t layout_id, tokens;
  std::set<uint32_t> seen = {};
};

}  // namespace

struct kvs_region {
  kvs_client* client;
  Region memory;
  uint64_t number;  // no other region of this process has it
  pid_t process = ::getpid();
  std::mutex mutex = {};
  std::map<std::array<uint64_t, 4>, Open> open = {};
};

namespace {

std::atomic<uint64_t> last_number{0};

std::shared_ptr<BlockWriter> create(kvs_client* client, std::span<const Key> keys, uint32_t layout_id,
                                    std::span<const uint32_t> tokens, uint32_t priority, uint32_t ttl_s) {
  return client->session.call([&](Client& c) {
    const auto [here, attachment] = client->session.layout_here(layout_id);
    return c.create({.keys = keys,
                     .chain = nullptr,
                     .token_counts = tokens,
                     .layout = here,
                     .priority = priority,
                     .ttl_s = ttl_s,
                     .attachment = attachment});
  });
}

std::string refusal_of_layers(const Layout& layout, uint32_t first, uint32_t tokens, const std::vector<Pieces>& layers) {
  for (size_t i = 0; i < layers.size(); ++i) {
    uint64_t have = 0;
    for (const Extent& piece : layers[i]) have += piece.length;
    const uint32_t layer = first + static_cast<uint32_t>(i);
    if (const uint64_t want = layout.layer_bytes(layer, tokens); have != want)
      return "layer " + std::to_string(layer) + ": " + std::to_string(have) + " bytes in its buffers, " + std::to_string(want) +
             " in the layout";
  }
  return "";
}

std::string refusal_of_begun(const Open& begun, uint32_t layout_id, uint32_t tokens, uint32_t first, size_t layers) {
  if (begun.layout_id != layout_id || begun.tokens != tokens)
    return "its other layers were given with another layout or token count";
  for (uint32_t layer = first; layer < first + layers; ++layer)
    if (begun.seen.contains(layer)) return "layer " + std::to_string(layer) + " was given before";
  return "";
}

void copy_layers(const kvs_region& region, Open& begun, uint32_t first, const std::vector<Pieces>& layers) {
  BlockWriter& writer = *begun.writer;
  const auto copying = writer.copying();
  if (writer.closed() || !writer.item(begun.index).open) throw Error(Code::BlockLost, "the block was lost with its daemon");
  for (size_t i = 0; i < layers.size(); ++i) {
    const uint32_t layer = first + static_cast<uint32_t>(i);
    if (layers[i].size() == 1) {
      writer.layer(begun.index, layer);
      writer.copy_layer(begun.index, layer, region.memory.data() + layers[i][0].offset);
    } else {
      std::byte* to = writer.layer(begun.index, layer);
      for (const Extent& piece : layers[i]) {
        std::memcpy(to, region.memory.data() + piece.offset, piece.length);
        to += piece.length;
      }
    }
    begun.seen.insert(layer);
  }
}

// Copies the layers in; true when all are there.
bool copy_in(const kvs_region& region, Open& begun, uint32_t first, const std::vector<Pieces>& layers) {
  BlockWriter& writer = *begun.writer;
  copy_layers(region, begun, first, layers);
  while (begun.seen.contains(writer.item(begun.index).layers_marked))
    writer.mark_layer(begun.index, writer.item(begun.index).layers_marked);
  return begun.seen.size() == writer.layout().num_layers();
}

struct Put {
  std::span<const Key> keys;
  uint32_t layout_id, first, priority, ttl_s;
  const Layout& layout;
  std::vector<uint32_t> tokens;
  std::vector<std::vector<Pieces>> layers;  // of each block
};

void refuse_items(const kvs_region& region, const Put& put, uint8_t* results) {
  std::vector<std::string>& whys = begin_refusals(region.number, put.keys.size());
  std::set<std::array<uint64_t, 4>> seen;
  for (size_t i = 0; i < put.keys.size(); ++i) {
    std::string& why = whys[i];
    if (!seen.insert(put.keys[i].words).second) why = "the key is twice in this call";
    if (why.empty()) why = region.memory.refusal(all_of(put.layers[i]));
    const auto begun = region.open.find(put.keys[i].words);
    if (why.empty() && begun != region.open.end())
      why = refusal_of_begun(begun->second, put.layout_id, put.tokens[i], put.first, put.layers[i].size());
    if (why.empty()) why = refusal_of_layers(put.layout, put.first, put.tokens[i], put.layers[i]);
    results[i] = why.empty() ? KVS_OPEN : KVS_REFUSED;
  }
}

void claim_items(kvs_region& region, const Put& put, uint8_t* results) {
  std::vector<size_t> fresh;
  std::vector<Key> keys;
  std::vector<uint32_t> tokens;
  for (size_t i = 0; i < put.keys.size(); ++i) {
    if (results[i] != KVS_OPEN || region.open.contains(put.keys[i].words)) continue;
    fresh.push_back(i), keys.push_back(put.keys[i]), tokens.push_back(put.tokens[i]);
  }
  if (fresh.empty()) return;
  const auto writer = create(region.client, keys, put.layout_id, tokens, put.priority, put.ttl_s);
  for (size_t at = 0; at < fresh.size(); ++at) {
    switch (writer->item(at).status) {
      case Grant::Granted: region.open.emplace(keys[at].words, Open{writer, at, put.layout_id, tokens[at]}); break;
      case Grant::Exists: results[fresh[at]] = KVS_REGION_EXISTS; break;
      case Grant::Pending: results[fresh[at]] = KVS_REGION_PENDING; break;
      case Grant::NoSpace: results[fresh[at]] = KVS_REGION_NO_SPACE; break;
    }
  }
}

void seal(std::span<const std::pair<size_t, Open>> whole, uint8_t* results) {
  std::map<BlockWriter*, std::vector<size_t>> by_writer;
  for (size_t k = 0; k < whole.size(); ++k) by_writer[whole[k].second.writer.get()].push_back(k);
  for (const auto& [writer, mine] : by_writer) {
    std::vector<size_t> which;
    for (const size_t k : mine) which.push_back(whole[k].second.index);
    uint8_t said = KVS_SEALED;
    try {
      writer->seal(which);
    } catch (const Error&) {
      said = KVS_LOST;
    }
    for (const size_t k : mine) results[whole[k].first] = said;
  }
}

void copy_items(kvs_region& region, const Put& put, uint8_t* results) {
  std::vector<std::pair<size_t, Open>> whole;
  for (size_t i = 0; i < put.keys.size(); ++i) {
    if (results[i] != KVS_OPEN) continue;
    const auto begun = region.open.find(put.keys[i].words);
    try {
      if (!copy_in(region, begun->second, put.first, put.layers[i])) continue;
      whole.emplace_back(i, begun->second);
    } catch (const Error&) {
      results[i] = KVS_LOST;
    }
    region.open.erase(begun);
  }
  seal(whole, results);
}

// Seals those of which `whys` says nothing.
void seal_here(kvs_region& region, uint32_t layout_id, std::span<const Region::Wanted> all, std::span<const std::string> whys,
               uint32_t priority, uint32_t ttl_s, uint8_t* results) {
  std::vector<size_t> which;
  std::vector<Region::Wanted> wanted;
  for (size_t i = 0; i < all.size(); ++i) {
    results[i] = KVS_REFUSED;
    if (whys[i].empty()) which.push_back(i), wanted.push_back(all[i]);
  }
  const auto said = region.client->session.call([&](Client&) {
    const auto [here, attachment] = region.client->session.layout_here(layout_id);
    if (attachment != region.memory.attachment()) return std::vector(wanted.size(), Region::Sealing::NoSpace);
    return region.memory.seal(here, wanted, priority, ttl_s);
  });
  static constexpr uint8_t kWords[] = {KVS_SEALED, KVS_REGION_EXISTS, KVS_REGION_PENDING, KVS_REGION_NO_SPACE, KVS_LOST};
  for (size_t i = 0; i < wanted.size(); ++i) results[which[i]] = kWords[static_cast<size_t>(said[i])];
}

void need_own(const kvs_region* region) {
  need(region, "region");
  if (region->process != ::getpid())
    refuse("the region is of process " + std::to_string(region->process) + ", this is " + std::to_string(::getpid()));
}

void give_up(const Open& begun) noexcept {
  try {
    const size_t which[] = {begun.index};
    begun.writer->abort(which);
  } catch (const std::exception&) {  // there is nobody to give it up to
  }
}

}  // namespace

extern "C" {

kvs_status kvs_register_region(kvs_client* client, uint64_t length, kvs_region** region) {
  return guarded("kvs_register_region", [&] {
    need(client, "client");
    need(region, "region");
    *region = nullptr;
    *region = client->session.call([&](Client& c) { return new kvs_region{client, Region(c, length), ++last_number}; });
  });
}

void kvs_region_free(kvs_region* region) {
  if (!region) return;
  if (region->process == ::getpid()) {
    for (const auto& [key, begun] : region->open) give_up(begun);
  }
  delete region;
}

kvs_status kvs_region_memory(kvs_region* region, kvs_span* bytes) {
  return guarded("kvs_region_memory", [&] {
    need(region, "region");
    need(bytes, "bytes");
    *bytes = {region->memory.data(), region->memory.length()};
  });
}

kvs_status kvs_region_put(kvs_region* region, const kvs_key* keys, size_t count, uint32_t layout_id,
                          const kvs_buffer_shape* shape, const kvs_buffer* buffers, uint32_t layer_index,
                          const uint32_t* token_counts, uint32_t priority, uint32_t ttl_s, uint8_t* results) {
  return guarded("kvs_region_put", [&] {
    need_own(region);
    begin_refusals(region->number, 0);
    need(shape, "shape");
    if (count) need(buffers, "buffers"), need(results, "results");
    if (priority > kMaxPriority) refuse("priority is " + std::to_string(priority) + "; it must be 0 to 100");
    check_shape(*shape);
    const std::lock_guard lock(region->mutex);
    const Layout layout = region->client->session.layout(layout_id);
    if (const uint64_t end = uint64_t{layer_index} + size_of(*shape, KVS_AXIS_LAYER); end > layout.num_layers())
      refuse("layers up to " + std::to_string(end) + "; the layout has " + std::to_string(layout.num_layers()));
    Put put{keys_of(keys, count), layout_id, layer_index, priority, ttl_s, layout, {}, {}};
    for (size_t i = 0; i < count; ++i) {
      put.tokens.push_back(token_counts ? token_counts[i] : layout.block_tokens);
      if (put.tokens.back() < 1 || put.tokens.back() > layout.block_tokens)
        refuse("token_counts[" + std::to_string(i) + "] is " + std::to_string(put.tokens.back()));
      put.layers.push_back(by_layer(*shape, buffers + i * buffers_of(*shape)));
    }
    refuse_items(*region, put, results);
    claim_items(*region, put, results);
    copy_items(*region, put, results);
  });
}

kvs_status kvs_region_load(kvs_region* region, const kvs_blocks* blocks, const kvs_buffer_shape* shape, const kvs_buffer* buffers,
                           uint32_t layer_index, uint8_t* results) {
  return guarded("kvs_region_load", [&] {
    need_own(region);
    begin_refusals(region->number, 0);
    need(blocks, "blocks"), need(shape, "shape");
    const size_t count = blocks->batch->size();
    if (count) need(buffers, "buffers"), need(results, "results");
    check_shape(*shape);
    const std::lock_guard lock(region->mutex);
    std::vector<std::vector<Pieces>> places;
    for (size_t i = 0; i < count; ++i) places.push_back(by_layer(*shape, buffers + i * buffers_of(*shape)));
    const std::vector<Region::Answer> answers = region->memory.load(*blocks->batch, layer_index, places);
    std::vector<std::string>& whys = begin_refusals(region->number, count);
    for (size_t i = 0; i < count; ++i) {
      results[i] = static_cast<uint8_t>(answers[i].word);
      whys[i] = answers[i].why;
    }
  });
}

const char* kvs_region_refusal(const kvs_region* region, size_t i) { return region ? refusal_text(region->number, i) : ""; }

kvs_status kvs_region_forget(kvs_region* region, const kvs_key* keys, size_t count) {
  return guarded("kvs_region_forget", [&] {
    need_own(region);
    const std::lock_guard lock(region->mutex);
    for (const Key& key : keys_of(keys, count))
      if (const auto begun = region->open.find(key.words); begun != region->open.end()) {
        give_up(begun->second);
        region->open.erase(begun);
      }
  });
}

kvs_status kvs_region_seal(kvs_region* region, const kvs_key* keys, size_t count, uint32_t layout_id, const uint64_t* offsets,
                           const uint32_t* token_counts, uint32_t priority, uint32_t ttl_s, uint8_t* results) {
  return guarded("kvs_region_seal", [&] {
    need_own(region);
    begin_refusals(region->number, 0);
    if (count) need(offsets, "offsets"), need(results, "results");
    if (priority > kMaxPriority) refuse("priority is " + std::to_string(priority) + "; it must be 0 to 100");
    const Layout layout = region->client->session.layout(layout_id);
    std::vector<Region::Wanted> wanted;
    const std::span<const Key> names = keys_of(keys, count);
    std::vector<std::string>& whys = begin_refusals(region->number, count);
    for (size_t i = 0; i < count; ++i) {
      wanted.push_back({names[i], offsets[i], token_counts ? token_counts[i] : layout.block_tokens});
      whys[i] = region->memory.refusal(layout, wanted[i]);
    }
    seal_here(*region, layout_id, wanted, whys, priority, ttl_s, results);
  });
}

kvs_status kvs_region_seal_pieces(kvs_region* region, const kvs_key* keys, size_t count, uint32_t layout_id,
                                  const kvs_buffer_shape* shape, const kvs_buffer* buffers, const uint32_t* token_counts,
                                  uint32_t priority, uint32_t ttl_s, uint8_t* results) {
  return guarded("kvs_region_seal_pieces", [&] {
    need_own(region);
    begin_refusals(region->number, 0);
    need(shape, "shape");
    if (count) need(buffers, "buffers"), need(results, "results");
    if (priority > kMaxPriority) refuse("priority is " + std::to_string(priority) + "; it must be 0 to 100");
    check_shape(*shape);
    const Layout layout = region->client->session.layout(layout_id);
    std::vector<Region::Wanted> wanted;
    if (const uint32_t layers = size_of(*shape, KVS_AXIS_LAYER); layers != layout.num_layers())
      refuse("buffers of " + std::to_string(layers) + " layers; all are to be given, the layout has " +
             std::to_string(layout.num_layers()));
    const std::span<const Key> names = keys_of(keys, count);
    std::vector<std::string>& whys = begin_refusals(region->number, count);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t tokens = token_counts ? token_counts[i] : layout.block_tokens;
      const std::vector<Pieces> layers = by_layer(*shape, buffers + i * buffers_of(*shape));
      wanted.push_back({names[i], 0, tokens, in_pieces(layers)});
      std::string& why = whys[i] = region->memory.refusal(all_of(layers));
      if (why.empty()) why = region->memory.refusal(layout, wanted[i]);
      if (why.empty()) why = refusal_of_layers(layout, 0, tokens, layers);
    }
    seal_here(*region, layout_id, wanted, whys, priority, ttl_s, results);
  });
}

kvs_status kvs_region_give_back(kvs_region* region, const kvs_key* keys, size_t count, uint8_t* results) {
  return guarded("kvs_region_give_back", [&] {
    need_own(region);
    if (count) need(results, "results");
    const std::vector<Back> said = region->memory.give_back(keys_of(keys, count));
    for (size_t i = 0; i < count; ++i) results[i] = static_cast<uint8_t>(said[i]);
  });
}

kvs_status kvs_block_layer(kvs_client* client, uint32_t layout_id, uint32_t tokens, uint32_t layer, kvs_buffer* place) {
  return guarded("kvs_block_layer", [&] {
    need(client, "client"), need(place, "place");
    const Layout layout = client->session.layout(layout_id);
    if (tokens == 0) tokens = layout.block_tokens;
    if (tokens > layout.block_tokens || layer >= layout.num_layers())
      refuse("layer " + std::to_string(layer) + " of " + std::to_string(tokens) + " tokens; the layout has " +
             std::to_string(layout.num_layers()) + " layers and " + std::to_string(layout.block_tokens) + " tokens");
    *place = {layout.layer_offset(layer, tokens), layout.layer_bytes(layer, tokens)};
  });
}

kvs_status kvs_block_bytes(kvs_client* client, uint32_t layout_id, uint32_t tokens, uint64_t* bytes) {
  return guarded("kvs_block_bytes", [&] {
    need(client, "client"), need(bytes, "bytes");
    const Layout layout = client->session.layout(layout_id);
    if (tokens == 0) tokens = layout.block_tokens;
    if (tokens > layout.block_tokens)
      refuse(std::to_string(tokens) + " tokens; the layout has " + std::to_string(layout.block_tokens));
    *bytes = layout.extent_bytes(tokens);
  });
}

}  // extern "C"
