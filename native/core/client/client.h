// The client of one namespace: look up and get by reading shared memory, everything else by one message. Python's Client, Blocks
// and Writer are thin faces of these. Thread-safe; nothing here knows Python.
//
// BlockBatch: the blocks one `get` pinned. A block's pin is counted: the context holds it once, every exported view once more;
// whoever lets go last clears it. BlockWriter: the blocks one `create` granted, until they are sealed or aborted.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "core/client/attachment.h"
#include "core/client/mapped_pieces.h"
#include "core/format/keys.h"

namespace kv {

enum class ItemState : uint8_t { Miss, Hit, Exhausted };

// Deadlines are CLOCK_MONOTONIC.
timespec deadline_in(double seconds);

class BlockBatch {
 public:
  struct Item {
    Snapshot at;
    const Layout* layout = nullptr;
    ItemState state = ItemState::Miss;
    uint32_t slot = PinBoard::kNoSlot;
    std::atomic<uint32_t> holders{0};           // the context and the exports
    mutable std::atomic<bool> complete{false};  // once seen sealed: stays true when the block is deleted under our pin
  };

  BlockBatch(std::shared_ptr<Attachment> attachment, size_t count)
      : attachment_(std::move(attachment)), items_(count), round_(attachment_->board->rounds().now) {}
  ~BlockBatch() { close(); }

  size_t size() const { return items_.size(); }
  Item& item(size_t i) { return items_[i]; }
  size_t hits() const;
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  void close();  // the context lets go. Idempotent

  void hold(size_t i);  // throws Closed if the context has let go, BlockLost as check_held() does
  // Throws BlockLost if the daemon asked these pins back; the context has let go of them then. What was exported stays.
  void check_held();
  bool asked_back() const { return round_ < attachment_->board->rounds().asked_back; }
  void let_go(size_t i);
  void give_up(size_t i);  // of a batch nobody else has seen yet: block i is a miss after all

  // All of a block that is held.
  const std::byte* bytes(size_t i) const {
    const Extent& at = items_[i].at.extent;
    return at.in_pieces() ? mapped(i) : attachment_->readable(at.offset);
  }
  std::vector<Extent> pieces(size_t i) const;  // where those bytes lie in the pool
  bool sealed(size_t i) const;
  uint32_t layers_ready(size_t i) const;
  bool lost(size_t i) const;  // its writer gave it up, or it is gone, before it was sealed
  // Waits until `layer` of block i is there. Throws BlockLost, DeadlineExceeded, InvalidArgument.
  void wait_layer(size_t i, uint32_t layer, const timespec& deadline) const;
  // What stands behind block i for that layer; nothing where it was sealed without, or is still written.
  std::optional<uint32_t> checksum(size_t i, uint32_t layer) const;
  // Compares the layers with the checksums behind them. True if there are none to compare with.
  bool verify(size_t i) const;

  Attachment& attachment() const { return *attachment_; }

  // What the items' layouts point to. By whoever fills the batch, before anybody else sees it.
  const KnownLayout* keep(Attachment::Known layout);
  void keep_all(const BlockBatch& other) { layouts_.insert(layouts_.end(), other.layouts_.begin(), other.layouts_.end()); }

 private:
  const std::byte* mapped(size_t i) const;
  void unmap(size_t i);

  const std::shared_ptr<Attachment> attachment_;
  std::vector<Item> items_;
  mutable std::mutex mapped_mutex_;
  mutable std::map<size_t, MappedPieces> mapped_;  // of blocks in pieces that somebody reads
  std::vector<Attachment::Known> layouts_;
  const uint32_t round_;  // before the first pin
  std::atomic<bool> closed_{false};
  std::atomic<bool> exported_{false};  // from the first hold() on, others may let go of a block as well
};

class BlockWriter {
 public:
  struct Item {
    Item() {}  // or each is filled with zeros first, which is half of what a create of many takes here
    CreateItem wanted;
    Grant status = Grant::NoSpace;
    Handle handle{0, 0};
    Extent extent{0, 0};
    bool open = false;      // granted, neither sealed nor aborted
    bool given_up = false;  // aborted by this writer: nothing is left to seal
    uint32_t layers_marked = 0, layers_given = 0;
  };

  BlockWriter(std::shared_ptr<Attachment> attachment, const Layout& layout, uint32_t layout_id, uint32_t priority, uint32_t ttl_s)
      : attachment_(std::move(attachment)), layout_(layout), layout_id_(layout_id), priority_(priority), ttl_s_(ttl_s) {}

  ~BlockWriter();

  size_t size() const { return items_.size(); }  // keys that were asked for
  Item& item(size_t i) { return items_[i]; }     // i < size()
  const Layout& layout() const { return layout_; }
  double timeout_s() const { return attachment_->options().timeout_s; }  // of a wait that names none
  bool closed() const { return attachment_->closed(); }                  // by its client

  // Memory for the caller to fill. A layer given out counts as written: one that was not still has another prompt's bytes.
  std::byte* bytes(size_t i);                  // all layers
  std::byte* layer(size_t i, uint32_t layer);  // one
  // The meta area of block i, which was granted.
  std::byte* meta(size_t i) const { return memory(i) + layout_.meta_offset(items_[i].wanted.tokens); }

  // While one lives, the blocks that are open stay so: a seal, an abort and close() wait for its end. So it is made before the
  // caller looks whether they are.
  class Copying {
   public:
    Copying(std::shared_lock<std::shared_mutex> client, std::shared_lock<std::shared_mutex> writer)
        : client_(std::move(client)), writer_(std::move(writer)) {}

   private:
    friend class BlockWriter;
    std::shared_lock<std::shared_mutex> client_, writer_;
  };
  Copying copying();                     // throws Closed if its client was closed
  std::optional<Copying> try_copying();  // the same, or nothing: it would wait now. Throws Closed
  // Followers may read this layer of block i from now on. Throws InvalidArgument out of order or not given out, Closed if ended.
  void mark_layer(size_t i, uint32_t layer) { mark_layer(i, layer, copying()); }
  // The same of who has a Copying. Throws InvalidArgument, Closed.
  void mark_layer(size_t i, uint32_t layer, const Copying& held);
  // Copies one layer in, past the caches, and keeps its checksum. To be called for one layer by one thread, after layer(), while
  // a Copying lives. Behind `length` bytes, at most the layer's, follow zeros.
  void copy_layer(size_t i, uint32_t layer, const void* source, uint64_t length = UINT64_MAX);

  // Ends the open ones among these blocks. Throws InvalidArgument, before anything, if one has layers that were never given out
  // and `zero_rest` does not say that they are to be zeros; BlockLost, after the others, if some were aborted or the store no
  // longer knew them as ours; Closed if its client was closed.
  void seal(std::span<const size_t> which, bool zero_rest = false);
  void abort(std::span<const size_t> which);  // gives the open ones among them back
  std::vector<size_t> open_items() const;     // indices granted, neither sealed nor aborted
  // Waits for the blocks others write: each turns into Exists or Granted. False if some are still pending at the deadline.
  bool wait_pending(const timespec& deadline);

 private:
  friend class Client;
  static constexpr uint8_t kGiven = 1, kChecksummed = 2;
  std::byte* memory(size_t i) const { return attachment_->writable(items_[i].extent.offset); }
  uint8_t* layers(size_t i) { return &layers_[i * layout_.num_layers()]; }
  const uint8_t* layers(size_t i) const { return &layers_[i * layout_.num_layers()]; }
  std::unique_lock<std::shared_mutex> without_copies();  // for as long as it is held
  Copying copies();                                      // not locked yet
  void check_given(std::span<const size_t> which) const;
  void zero_rest(std::span<const size_t> which);
  void claim(std::span<const size_t> which, BlockWriter* sealing, const Chain* chain);
  std::vector<protocol::BlockItem> block_items(std::span<const size_t> which, bool seal) const;
  std::vector<protocol::BlockItem> end_open(std::span<const size_t> which, bool seal);
  void seal_apart(std::span<const size_t> which);
  void take_grants(std::span<const size_t> which, std::span<const protocol::GrantItem> grants);
  void prepare(std::span<const size_t> which, const Chain* chain);
  void prepare_one(size_t i, const Chain* chain, std::vector<std::byte>& meta);
  void write_meta(size_t i, const Chain* chain, std::span<std::byte> meta) const;
  void give_up_lost(std::span<const protocol::BlockItem> blocks, std::span<const uint8_t> answers);
  void settle_seals(size_t wanted, std::span<const uint8_t> answers);

  const std::shared_ptr<Attachment> attachment_;
  const Layout layout_;
  const uint32_t layout_id_, priority_, ttl_s_;
  std::vector<Item> items_;
  std::vector<uint8_t> layers_;  // of each item, one after the other, what of kGiven and kChecksummed each layer is
  std::optional<Chain> chain_;
  std::shared_mutex copying_mutex_;  // shared by copies; who ends blocks has it to itself
};

struct Create {
  std::span<const Key> keys;
  const Chain* chain = nullptr;  // then it gives token counts, positions, fingerprints and the meta areas
  std::span<const uint32_t> token_counts;
  uint32_t layout = 0, priority = kDefaultPriority, ttl_s = 0;
  std::optional<uint64_t> attachment{};  // whose number `layout` is: Detached in any other
  BlockWriter* sealing = nullptr;
};

class Client {
 public:
  enum class Door { SharedMemory, Socket };  // where look-ups go

  Client(AttachOptions options, Door door)
      : options_(std::move(options)), door_(door), attachment_(Attachment::make(options_, nullptr)) {}
  ~Client() { close(); }

  void reattach();  // to the daemon that is there now. Throws Unavailable
  void close();     // ends the session; what is asked afterwards throws Closed
  // In a forked child, before anything else: a thread that the child does not have may have held it at the fork.
  void renew_lock() { std::construct_at(&mutex_); }

  // A Presence each. Throws Detached if another daemon took over meanwhile.
  std::vector<uint8_t> lookup(std::span<const Key> keys);
  // The blocks that are in memory, pinned; with `follow` also those being written. Waits for nothing. Throws Detached.
  std::shared_ptr<BlockBatch> get(std::span<const Key> keys, bool follow);
  // Asks the daemon to load what lies on disk, and to have brought what other hosts have: for so long, 0: whoever waits. Waits
  // for nothing. `node`: the host that is said to have them, which is asked first; a hint, which an older daemon is not given.
  // Throws InvalidArgument for a name that none can have, Detached for an answer of another size.
  std::vector<protocol::PromiseItem> promote(std::span<const Key> keys, uint32_t priority, uint32_t wanted_ms = 0,
                                             const std::string& node = "");
  // Has that host told to come for these blocks, and waits for nothing. How many it is told of: what waits to be told is bounded.
  // Throws Unavailable if it takes none now, InvalidArgument for a name that none can have.
  uint32_t push(std::span<const Key> keys, const std::string& node);
  // Turns the batch's misses into hits as their blocks are loaded, or sealed by who writes them. False: the deadline came first.
  // Throws Detached if the batch is of an attachment before.
  bool await(BlockBatch& batch, std::span<const Key> keys, bool follow, const timespec& deadline);
  // Compares the bytes of the batch's blocks with their checksums; those that differ become misses.
  void verify(BlockBatch& batch, std::span<const Key> keys);
  // Seconds until a load of so many bytes, asked for now, would be done. Negative: the daemon has loaded nothing yet.
  double load_estimate_s(uint64_t bytes) const;
  // Asks the daemon, in one message, which of the missing are known to lie on another host, and says so in the states; it asks
  // nobody in turn. Nothing is sent if nothing is missing or there is no other host. Throws Detached for an answer of another
  // size.
  void look_elsewhere(std::span<const Key> keys, std::vector<uint8_t>& states);
  double peer_estimate_s(uint64_t bytes) const;  // as load_estimate_s
  uint64_t peers_up() const;                     // other hosts that get() with a wait would ask
  // Claims what of the keys nobody has. NoSpace is an answer of the block. Throws InvalidArgument, Detached if the layout's
  // number is another attachment's.
  std::shared_ptr<BlockWriter> create(const Create& request);
  // How many sealed blocks were deleted.
  uint32_t remove(std::span<const Key> keys) { return count_over(protocol::Op::Delete, keys); }
  // How many blocks count as used now.
  uint32_t touch(std::span<const Key> keys) { return count_over(protocol::Op::Touch, keys); }
  uint64_t mailed() { return usable()->mailed(); }          // messages that went through shared memory
  uint32_t register_layout(std::span<const uint8_t> blob);  // its id; the same for the same bytes
  std::string stats();                                      // the daemon's, of this namespace, as JSON
  std::vector<uint8_t> token();                             // what this session shows on the gRPC socket for other users
  std::array<uint8_t, 32> salt() const { return attachment()->salt(); }  // of the namespace, for identities

  Door door() const { return door_; }
  bool closed() const { return closed_.load(); }
  std::shared_ptr<Attachment> attachment() const;  // throws Closed
  std::shared_ptr<Attachment> usable() const;      // throws Detached when it must be taken up anew
  bool attached() const;                           // to a daemon that still runs, as far as this client has noticed
  bool answers() const;  // memory answers reads: no daemon has taken it over since the last that this client was attached to
  bool awaited() const;  // one has, or began to, and kept the pool: it or its successor will be there for this client

 private:
  Find pin_one(const std::shared_ptr<Attachment>& at, BlockBatch& batch, std::span<const Key> keys, size_t i, bool follow,
               Snapshot& there);
  uint32_t count_over(protocol::Op op, std::span<const Key> keys);
  void find_all(Attachment& at, std::span<const Key> keys, std::vector<Find>& found, std::vector<Snapshot>& where);
  void ask_where(Attachment& at, std::span<const Key> keys, std::span<const size_t> which, std::vector<Find>& found,
                 std::vector<Snapshot>& where);
  void pin_all(Attachment& at, BlockBatch& batch, bool follow, std::vector<Find>& found, const std::vector<Snapshot>& where);

  const AttachOptions options_;
  const Door door_;
  mutable std::mutex mutex_;  // guards the pointer, not what it points to
  std::shared_ptr<Attachment> attachment_;
  std::atomic<bool> closed_{false};
};

}  // namespace kv
