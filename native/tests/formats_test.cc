// Goal: the shared structures have the offsets and sizes that docs/formats.md promises.
// Method: prints `struct field offset size` for each; tests/unit/formats/test_formats.py compares that with the document. Run
// alone it checks that no structure has a hole: a compiler that put one there would make another format.
#include <cstdio>

#include "core/files/block_file.h"
#include "core/format/block.h"
#include "core/format/protocol.h"

namespace {

struct Field {
  const char* type;
  const char* name;
  size_t offset;
  size_t size;
};

#define FIELD(type, name) \
  Field { #type, #name, offsetof(kv::type, name), sizeof(kv::type::name) }
#define PROTOCOL(type, name) \
  Field { #type, #name, offsetof(kv::protocol::type, name), sizeof(kv::protocol::type::name) }
constexpr Field kFields[] = {
    FIELD(TableHeader, magic),
    FIELD(TableHeader, version),
    FIELD(TableHeader, max_blocks),
    FIELD(TableHeader, buckets),
    FIELD(TableHeader, header_bytes),
    FIELD(TableHeader, capacity_bytes),
    FIELD(TableHeader, records_offset),
    FIELD(TableHeader, upkeep_offset),
    FIELD(TableHeader, buckets_offset),
    FIELD(TableHeader, layouts_offset),
    FIELD(TableHeader, geometry_offset),
    FIELD(TableHeader, total_bytes),
    FIELD(TableHeader, pool_id),
    FIELD(TableHeader, epoch),
    FIELD(TableHeader, frontier),
    FIELD(TableHeader, faulted),
    FIELD(TableHeader, origin_s),
    FIELD(TableHeader, layouts),
    FIELD(TableHeader, finder_buckets),
    FIELD(TableHeader, finder_offset),
    FIELD(TableHeader, load_bytes_per_s),
    FIELD(TableHeader, load_waiting_bytes),
    FIELD(TableHeader, load_latency_us),
    FIELD(TableHeader, score_ns),
    FIELD(TableHeader, peers_up),
    FIELD(TableHeader, peer_bytes_per_s),
    FIELD(TableHeader, peer_latency_us),
    FIELD(Record, control),
    FIELD(Record, sequence),
    FIELD(Record, expiry_s),
    FIELD(Record, key),
    FIELD(Record, extent),
    FIELD(Record, shape),
    FIELD(Upkeep, fingerprint),
    FIELD(Upkeep, rank),
    FIELD(Upkeep, owner),
    FIELD(Upkeep, created_s),
    FIELD(Upkeep, link),
    FIELD(Upkeep, parent),
    FIELD(Bucket, sequence),
    FIELD(Bucket, overflow),
    FIELD(Bucket, slot),
    FIELD(SessionPage, magic),
    FIELD(SessionPage, version),
    FIELD(SessionPage, max_pins),
    FIELD(SessionPage, session),
    FIELD(SessionPage, protocol),
    FIELD(SessionPage, pool_id),
    FIELD(SessionPage, token),
    FIELD(SessionPage, pins_high),
    FIELD(SessionPage, ring_head),
    FIELD(SessionPage, hits),
    FIELD(SessionPage, misses),
    FIELD(SessionPage, waiting),
    FIELD(SessionPage, ring),
    FIELD(SessionPage, released),
    FIELD(SessionPage, allowance),
    FIELD(SessionPage, rounds),
    FIELD(SessionPage, device),
    FIELD(Mailbox, asked),
    FIELD(Mailbox, request_bytes),
    FIELD(Mailbox, asleep),
    FIELD(Mailbox, processor),
    FIELD(Mailbox, reserved_asking),
    FIELD(Mailbox, answered),
    FIELD(Mailbox, answer_bytes),
    FIELD(Mailbox, attended),
    FIELD(Mailbox, reserved_answering),
    FIELD(Mailbox, bytes),
    FIELD(FileHeader, magic),
    FIELD(FileHeader, version),
    FIELD(FileHeader, header_bytes),
    FIELD(FileHeader, key),
    FIELD(FileHeader, content_key),
    FIELD(FileHeader, identity),
    FIELD(FileHeader, layout),
    FIELD(FileHeader, fingerprint),
    FIELD(FileHeader, data_bytes),
    FIELD(FileHeader, tokens),
    FIELD(FileHeader, base_position),
    FIELD(FileHeader, priority),
    FIELD(FileHeader, parent),
    FIELD(FileHeader, created_s),
    FIELD(FileHeader, expiry_s),
    FIELD(FileHeader, layers),
    FIELD(FileHeader, tail_checksum),
    FIELD(FileHeader, layer_checksums),
    FIELD(FileHeader, layer_sizes),
    FIELD(FileHeader, layer_size_index),
    FIELD(FileHeader, reserved),
    FIELD(FileHeader, header_checksum),
    PROTOCOL(Request, magic),
    PROTOCOL(Request, op),
    PROTOCOL(Request, reserved),
    PROTOCOL(Request, count),
    PROTOCOL(Request, tag),
    PROTOCOL(Reply, magic),
    PROTOCOL(Reply, op),
    PROTOCOL(Reply, status),
    PROTOCOL(Reply, count),
    PROTOCOL(Reply, tag),
    PROTOCOL(Attach, version),
    PROTOCOL(Attach, read_only),
    PROTOCOL(Attach, max_pins),
    PROTOCOL(Attach, resume_session),
    PROTOCOL(Attach, resume_token),
    PROTOCOL(Attach, name),
    PROTOCOL(Attached, session),
    PROTOCOL(Attached, resumed),
    PROTOCOL(Attached, epoch),
    PROTOCOL(Attached, table_bytes),
    PROTOCOL(Attached, progress_bytes),
    PROTOCOL(Attached, pool_bytes),
    PROTOCOL(Attached, page_bytes),
    PROTOCOL(Attached, pool_id),
    PROTOCOL(Attached, salt),
    PROTOCOL(BlockItem, record),
    PROTOCOL(BlockItem, checksummed),
    PROTOCOL(BlockItem, generation),
    PROTOCOL(CreateHead, layout),
    PROTOCOL(CreateHead, priority),
    PROTOCOL(CreateHead, ttl_s),
    PROTOCOL(CreateHead, seals),
    PROTOCOL(CreateItem, key),
    PROTOCOL(CreateItem, fingerprint),
    PROTOCOL(CreateItem, tokens),
    PROTOCOL(CreateItem, base_position),
    PROTOCOL(CreateItem, parent),
    PROTOCOL(CreateItem, region_pages),
    PROTOCOL(GrantItem, record),
    PROTOCOL(GrantItem, status),
    PROTOCOL(GrantItem, generation),
    PROTOCOL(GrantItem, offset),
    PROTOCOL(GrantItem, length),
    PROTOCOL(LookUpItem, presence),
    PROTOCOL(LookUpItem, record),
    PROTOCOL(LookUpItem, control),
    PROTOCOL(LookUpItem, extent),
    PROTOCOL(LookUpItem, shape),
    PROTOCOL(KeepHead, more),
    PROTOCOL(KeepHead, reserved),
    PROTOCOL(PinsWanted, slots),
    PROTOCOL(PinsWanted, pages),
    PROTOCOL(PinsOnTerms, owner),
    PROTOCOL(PinsOnTerms, deadline_ms),
    PROTOCOL(PinsOnTerms, bytes),
    PROTOCOL(DeviceMemory, writes),
    PROTOCOL(DeviceMemory, reserved),
    PROTOCOL(PushHead, node),
    PROTOCOL(PromoteHead, priority),
    PROTOCOL(PromoteHead, wanted_ms),
    PROTOCOL(PromiseItem, presence),
    PROTOCOL(PromiseItem, reserved),
    PROTOCOL(RegionHead, layout),
    PROTOCOL(RegionHead, priority),
    PROTOCOL(RegionHead, ttl_s),
    PROTOCOL(RegionHead, reserved),
    PROTOCOL(PublishItem, key),
    PROTOCOL(PublishItem, offset),
    PROTOCOL(PublishItem, tokens),
    PROTOCOL(PublishItem, checksummed),
    PROTOCOL(PublishItem, rest),
    PROTOCOL(TakeBackItem, key),
    PROTOCOL(TakeBackItem, region),
    PROTOCOL(TakeBackItem, record),
    PROTOCOL(TakeBackItem, reserved),
    PROTOCOL(TakeBackItem, generation),
    PROTOCOL(RegionItem, status),
    PROTOCOL(RegionItem, record),
    PROTOCOL(RegionItem, generation),
    PROTOCOL(RegionItem, opened),
    PROTOCOL(RegionItem, ended),
    PROTOCOL(RegionItem, opened_generation),
    PROTOCOL(RegionItem, ended_generation),
};
#undef PROTOCOL
#undef FIELD

}  // namespace

int main() {
  int holes = 0;
  const Field* before = nullptr;
  for (const Field& field : kFields) {
    std::printf("%s %s %zu %zu\n", field.type, field.name, field.offset, field.size);
    const size_t expected = before != nullptr && before->type == field.type ? before->offset + before->size : 0;
    if (field.offset != expected) {
      std::fprintf(stderr, "%s.%s starts at %zu, the field before it ends at %zu\n", field.type, field.name, field.offset,
                   expected);
      ++holes;
    }
    before = &field;
  }
  return holes == 0 ? 0 : 1;
}
