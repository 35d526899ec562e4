// kvs_writer: what a create granted.
#include "capi/objects.h"

using namespace kv;
using namespace kv::capi;

namespace {

BlockWriter& of(const kvs_writer* writer) {
  need(writer, "writer");
  return *writer->grants;
}

BlockWriter& open(const kvs_writer* writer, size_t i) {
  BlockWriter& grants = of(writer);
  if (i >= grants.size()) refuse("block " + std::to_string(i) + " of " + std::to_string(grants.size()));
  const BlockWriter::Item& item = grants.item(i);
  if (item.status == Grant::NoSpace) throw Error(Code::NoSpace, "there was no memory for block " + std::to_string(i));
  if (item.status != Grant::Granted) refuse("block " + std::to_string(i) + " was not granted to this writer");
  if (!item.open || grants.closed()) throw Error(Code::Closed, "block " + std::to_string(i) + " was sealed or aborted");
  return grants;
}

void check_layer(const BlockWriter& grants, uint32_t layer) {
  if (layer >= grants.layout().num_layers())
    refuse("layer is " + std::to_string(layer) + "; the block has " + std::to_string(grants.layout().num_layers()));
}

std::vector<size_t> chosen(BlockWriter& grants, size_t i) {
  if (i == KVS_ALL) return grants.open_items();
  if (i >= grants.size()) refuse("block " + std::to_string(i) + " of " + std::to_string(grants.size()));
  return {i};
}

}  // namespace

extern "C" {

kvs_status kvs_create(kvs_client* client, const kvs_key* keys, size_t count, uint32_t layout_id, const uint32_t* token_counts,
                      uint32_t priority, uint32_t ttl_s, kvs_writer** writer) {
  return guarded("kvs_create", [&] {
    need(client, "client");
    need(writer, "writer");
    *writer = nullptr;
    if (priority > kMaxPriority) refuse("priority is " + std::to_string(priority) + "; it must be 0 to 100");
    const auto wanted = keys_of(keys, count);
    for (size_t i = 0; token_counts && i < count; ++i)
      if (token_counts[i] < 1 || token_counts[i] > kMaxTokens)
        refuse("token_counts[" + std::to_string(i) + "] is " + std::to_string(token_counts[i]));
    auto grants = client->session.call([&](Client& c) {
      const auto [here, attachment] = client->session.layout_here(layout_id);
      Create request{.keys = wanted,
                     .chain = nullptr,
                     .token_counts = {},
                     .layout = here,
                     .priority = priority,
                     .ttl_s = ttl_s,
                     .attachment = attachment};
      if (token_counts) request.token_counts = {token_counts, count};
      return c.create(request);
    });
    *writer = new kvs_writer{std::move(grants)};
  });
}

void kvs_writer_free(kvs_writer* writer) {
  if (!writer) return;
  kvs_writer_abort(writer, KVS_ALL);
  delete writer;
}

size_t kvs_writer_count(const kvs_writer* writer) { return writer ? writer->grants->size() : 0; }

int kvs_writer_grant(const kvs_writer* writer, size_t i) {
  if (!writer || i >= writer->grants->size()) return -1;
  return static_cast<int>(writer->grants->item(i).status);
}

kvs_status kvs_writer_layer(kvs_writer* writer, size_t i, uint32_t layer, kvs_span* bytes) {
  return guarded("kvs_writer_layer", [&] {
    need(bytes, "bytes");
    BlockWriter& grants = open(writer, i);
    check_layer(grants, layer);
    *bytes = {grants.layer(i, layer), grants.layout().layer_bytes(layer, grants.item(i).wanted.tokens)};
  });
}

kvs_status kvs_writer_meta(kvs_writer* writer, size_t i, kvs_span* bytes) {
  return guarded("kvs_writer_meta", [&] {
    need(bytes, "bytes");
    BlockWriter& grants = open(writer, i);
    *bytes = {grants.meta(i), grants.layout().meta_bytes(grants.item(i).wanted.tokens)};
  });
}

kvs_status kvs_writer_copy_layer(kvs_writer* writer, size_t i, uint32_t layer, const void* source, uint64_t length) {
  return guarded("kvs_writer_copy_layer", [&] {
    need(source, "source");
    const auto copying = of(writer).copying();
    BlockWriter& grants = open(writer, i);
    check_layer(grants, layer);
    const uint64_t wanted = grants.layout().layer_bytes(layer, grants.item(i).wanted.tokens);
    if (length != wanted) refuse("the source has " + std::to_string(length) + " bytes, the layer has " + std::to_string(wanted));
    grants.layer(i, layer);
    grants.copy_layer(i, layer, source);
  });
}

kvs_status kvs_writer_mark_layer(kvs_writer* writer, size_t i, uint32_t layer) {
  return guarded("kvs_writer_mark_layer", [&] { open(writer, i).mark_layer(i, layer); });
}

kvs_status kvs_writer_seal(kvs_writer* writer, size_t i, int zero_rest) {
  return guarded("kvs_writer_seal", [&] {
    BlockWriter& grants = of(writer);
    grants.seal(i == KVS_ALL ? chosen(grants, i) : (open(writer, i), chosen(grants, i)), zero_rest != 0);
  });
}

kvs_status kvs_writer_abort(kvs_writer* writer, size_t i) {
  return guarded("kvs_writer_abort", [&] {
    BlockWriter& grants = of(writer);
    grants.abort(chosen(grants, i));
  });
}

kvs_status kvs_writer_wait_pending(kvs_writer* writer, double timeout_s) {
  return guarded("kvs_writer_wait_pending", [&] {
    if (!of(writer).wait_pending(deadline_of(timeout_s))) throw Error(Code::DeadlineExceeded, "blocks are still being written");
  });
}

}  // extern "C"
