// kvs_blocks: what a get pinned.
#include "capi/objects.h"

using namespace kv;
using namespace kv::capi;

namespace {

BlockBatch::Item& hit(const kvs_blocks* blocks, size_t i) {
  need(blocks, "blocks");
  if (i >= blocks->batch->size()) refuse("block " + std::to_string(i) + " of " + std::to_string(blocks->batch->size()));
  BlockBatch::Item& item = blocks->batch->item(i);
  if (item.state == ItemState::Exhausted) throw Error(Code::PinsExhausted, blocks->batch->attachment().exhausted());
  if (item.state != ItemState::Hit) refuse("block " + std::to_string(i) + " is a miss");
  blocks->batch->check_held();
  return item;
}

// Block i, whose layers up to this one are there.
const BlockBatch::Item& up_to(const kvs_blocks* blocks, size_t i, uint32_t layer) {
  const BlockBatch::Item& item = hit(blocks, i);
  if (layer >= item.layout->num_layers())
    refuse("layer is " + std::to_string(layer) + "; the block has " + std::to_string(item.layout->num_layers()));
  const uint32_t ready = blocks->batch->layers_ready(i);
  if (ready <= layer && blocks->batch->lost(i)) throw Error(Code::BlockLost, "the block's writer ended before it was whole");
  if (ready <= layer)
    refuse("layer " + std::to_string(layer) + " of a followed block with " + std::to_string(ready) +
           " layers; kvs_blocks_wait_layer waits for it");
  return item;
}

kvs_const_span layer_of(const kvs_blocks* blocks, size_t i, uint32_t layer) {
  const BlockBatch::Item& item = up_to(blocks, i, layer);
  const uint32_t tokens = item.at.shape.tokens;
  return {blocks->batch->bytes(i) + item.layout->layer_offset(layer, tokens), item.layout->layer_bytes(layer, tokens)};
}

}  // namespace

extern "C" {

kvs_status kvs_get(kvs_client* client, const kvs_key* keys, size_t count, uint32_t flags, double wait_s, kvs_blocks** blocks) {
  return guarded("kvs_get", [&] {
    need(client, "client");
    need(blocks, "blocks");
    *blocks = nullptr;
    if (flags & ~(KVS_FOLLOW | KVS_VERIFY))
      refuse("flags are " + std::to_string(flags) + "; known are KVS_FOLLOW and KVS_VERIFY");
    if (!(wait_s >= 0)) refuse("wait_s is " + std::to_string(wait_s) + "; it must not be below 0");
    const auto wanted = keys_of(keys, count);
    const bool follow = flags & KVS_FOLLOW;
    auto batch = client->session.call([&](Client& c) {
      auto found = c.get(wanted, follow);
      if (wait_s > 0 && found->hits() < found->size()) c.await(*found, wanted, follow, deadline_in(wait_s));
      if (flags & KVS_VERIFY) c.verify(*found, wanted);
      return found;
    });
    batch->attachment().watch(batch);
    *blocks = new kvs_blocks{std::move(batch)};
  });
}

void kvs_blocks_free(kvs_blocks* blocks) {
  if (!blocks) return;
  blocks->batch->close();
  delete blocks;
}

size_t kvs_blocks_count(const kvs_blocks* blocks) { return blocks ? blocks->batch->size() : 0; }

int kvs_blocks_hit(const kvs_blocks* blocks, size_t i) {
  if (!blocks || i >= blocks->batch->size()) return -1;
  switch (blocks->batch->item(i).state) {
    case ItemState::Hit: return 1;
    case ItemState::Miss: return 0;
    case ItemState::Exhausted: break;
  }
  return -1;
}

kvs_status kvs_blocks_layer(const kvs_blocks* blocks, size_t i, uint32_t layer, kvs_const_span* bytes) {
  return guarded("kvs_blocks_layer", [&] {
    need(bytes, "bytes");
    *bytes = layer_of(blocks, i, layer);
  });
}

kvs_status kvs_blocks_layers(const kvs_blocks* blocks, uint32_t layer, kvs_const_span* layers) {
  return guarded("kvs_blocks_layers", [&] {
    need(blocks, "blocks");
    if (blocks->batch->size()) need(layers, "layers");
    for (size_t i = 0; i < blocks->batch->size(); ++i) {
      const bool there = blocks->batch->item(i).state != ItemState::Miss;
      layers[i] = there ? layer_of(blocks, i, layer) : kvs_const_span{nullptr, 0};
    }
  });
}

kvs_status kvs_blocks_meta(const kvs_blocks* blocks, size_t i, kvs_const_span* bytes) {
  return guarded("kvs_blocks_meta", [&] {
    need(bytes, "bytes");
    const BlockBatch::Item& item = up_to(blocks, i, hit(blocks, i).layout->num_layers() - 1);
    const uint32_t tokens = item.at.shape.tokens;
    *bytes = {blocks->batch->bytes(i) + item.layout->meta_offset(tokens), item.layout->meta_bytes(tokens)};
  });
}

uint32_t kvs_blocks_tokens(const kvs_blocks* blocks, size_t i) {
  return kvs_blocks_hit(blocks, i) == 1 ? blocks->batch->item(i).at.shape.tokens : 0;
}

uint32_t kvs_blocks_layers_ready(const kvs_blocks* blocks, size_t i) {
  return kvs_blocks_hit(blocks, i) == 1 ? blocks->batch->layers_ready(i) : 0;
}

int kvs_blocks_sealed(const kvs_blocks* blocks, size_t i) { return kvs_blocks_hit(blocks, i) == 1 && blocks->batch->sealed(i); }

kvs_status kvs_blocks_wait_layers(const kvs_blocks* blocks, uint32_t layer, double timeout_s) {
  return guarded("kvs_blocks_wait_layers", [&] {
    need(blocks, "blocks");
    const timespec until = deadline_of(timeout_s);
    for (size_t i = 0; i < blocks->batch->size(); ++i) {
      if (blocks->batch->item(i).state == ItemState::Miss) continue;
      hit(blocks, i);
      blocks->batch->wait_layer(i, layer, until);
    }
  });
}

kvs_status kvs_blocks_wait_layer(const kvs_blocks* blocks, size_t i, uint32_t layer, double timeout_s) {
  return guarded("kvs_blocks_wait_layer", [&] {
    hit(blocks, i);
    blocks->batch->wait_layer(i, layer, deadline_of(timeout_s));
  });
}

}  // extern "C"
