// One attachment of a client to a daemon: the session socket and the memory it handed out. Immutable once made; shared by
// every view, pin and writer that came from it, and gone with the last of them.
//
// The session page is mapped before the pool and unmapped after it (member order), so that as long as a byte of the pool can be
// touched the session's lock is held. After a fork the child's copy is foreign: it clears no pins and sends nothing.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/client/page_tables.h"
#include "core/format/index.h"
#include "core/format/layout.h"
#include "core/format/protocol.h"
#include "core/format/segment.h"
#include "core/format/session_file.h"
#include "core/format/store_types.h"

namespace kv {

// A word that differs in every process, and in a forked child from its parent, at the cost of a load: its page is wiped by fork.
uint64_t process_token();

struct AttachOptions {
  std::string socket_path;
  std::string name;
  bool read_only = false;
  uint32_t max_pins = 65536;
  double timeout_s = 5;
  PinTerms terms = {};  // of its pins
};

class BlockBatch;

class Attachment : public std::enable_shared_from_this<Attachment> {
 public:
  // Connects and maps. With `previous`, resumes its session if the daemon still has it in the same pool; then the answer is
  // `previous` itself with a new socket. Throws Unavailable, NotPermitted, NotFound, IncompatibleVersion, DeadlineExceeded.
  static std::shared_ptr<Attachment> make(const AttachOptions& options, const std::shared_ptr<Attachment>& previous);
  ~Attachment();

  bool foreign() const { return token_ != process_token(); }
  // Nothing changes in memory while no daemon mutates it, so reads go on until the epoch says that one has taken over.
  bool current() const { return index.header().epoch.load(std::memory_order_acquire) == epoch_.load(std::memory_order_relaxed); }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  bool connected() const { return connected_.load(std::memory_order_acquire); }
  // Who attaches next begins a session. This one's memory stays what it is until nothing here maps it any more.
  void never_resume() { resumable_.store(false, std::memory_order_relaxed); }

  // One request and its reply's body. Throws the error the daemon answered, or Detached if it cannot be reached. After
  // DeadlineExceeded the connection is closed, because a late reply would answer the wrong request.
  // `meanwhile` runs between the two: work that does not depend on the answer. `taken` runs with the answer, before the session
  // can be resumed: a block granted in it is either known as open by then, or given up.
  std::vector<uint8_t> ask(protocol::Op op, uint32_t count, std::span<const uint8_t> body,
                           const std::function<void()>& meanwhile = {},
                           const std::function<void(std::span<const uint8_t>)>& taken = {});
  void close();  // gives up what is unsealed, then disconnects; memory stays mapped while anything points to it

  using Known = std::shared_ptr<const KnownLayout>;
  // The layout told under that id, read from shared memory. Throws InvalidArgument if there is none, LayoutLost if its slot was
  // given to another.
  Known layout(uint32_t id);
  Known layout_in(uint32_t slot);  // of a block that is pinned: while it lives its layout keeps the slot
  // As PinBoard::take, of blocks of so many pages.
  size_t take_pins(std::span<const uint64_t> pins, std::span<const uint32_t> pages, uint32_t* slots);
  std::string exhausted() const;  // why there was no pin
  // Of a batch that nobody fills any more: lets go of what is asked back at a later let_go_of_asked(), also if nobody looks at
  // it.
  void watch(const std::shared_ptr<BlockBatch>& batch);
  void let_go_of_asked();
  // A device may write this process's memory of the pool from now on; or is done with all of it, and nothing of it is given back
  // before. False: the daemon is older and knows nothing of it.
  bool give_to_device(bool writes);
  // The same of a region, whose owner may register it with a device; `more`: made or closed. What the client itself said stays.
  void count_region(int more);
  const std::byte* readable(uint64_t offset) const { return pool_.data() + offset; }
  std::byte* writable(uint64_t offset) const { return (writable_ ? writable_ : pool_).data() + offset; }

  // To be locked, which it is not yet, while memory is written that close() would give up.
  std::shared_lock<std::shared_mutex> copies() { return {copying_mutex_, std::defer_lock}; }

  // What each of this session's writers has open: a daemon that resumes the session is told, close() gives it up.
  void opened(const void* writer, std::span<const Handle> blocks);
  void ended(const void* writer, std::span<const protocol::BlockItem> blocks);

  std::array<uint8_t, 32> salt();              // of the namespace, as the daemon last attached to said it; zeros: none
  uint64_t number() const { return number_; }  // of this process's attachments, from 1; a resumed one keeps it
  uint32_t session() const { return session_; }
  uint32_t protocol() const { return protocol_.load(std::memory_order_relaxed); }  // that the daemon last attached to speaks, too
  uint64_t epoch() const { return epoch_.load(std::memory_order_relaxed); }
  uint64_t pool_bytes() const { return pool_.size(); }
  const AttachOptions& options() const { return options_; }
  uint64_t mailed() const { return mailed_.load(std::memory_order_relaxed); }  // requests that went by the mailbox
  std::atomic<uint64_t>& progress(uint32_t record) const { return progress_words_[record]; }

 private:
  Attachment();
  std::vector<uint8_t> handshake(Fd& socket, const Attachment* previous, std::vector<Fd>& descriptors);
  std::vector<protocol::BlockItem> open_items() const;
  void give_up_open();
  void hang_up();
  void tell_open(int socket);
  void tell_terms(int socket);
  bool tell_device();
  void map(const protocol::Attached& reply, std::vector<Fd>& descriptors);

  const uint64_t number_;
  AttachOptions options_;
  uint64_t token_ = 0;
  uint32_t session_ = 0;
  Id pool_id_{};
  std::atomic<uint64_t> epoch_{0};
  std::atomic<uint32_t> protocol_{0};
  std::atomic<bool> connected_{false}, resumable_{true};
  std::atomic<bool> closed_{false};

  std::mutex socket_mutex_;
  Fd socket_;
  std::array<uint8_t, 32> salt_{};
  uint32_t tag_ = 0;
  std::atomic<uint64_t> mailed_{0};

  std::shared_mutex copying_mutex_;

  std::mutex watched_mutex_;
  std::vector<std::weak_ptr<BlockBatch>> watched_;  // of pins on terms
  size_t sweep_at_ = 64;
  std::atomic<uint32_t> asked_seen_{0};

  std::mutex device_mutex_;  // guards these two, and their telling
  bool given_ = false;       // as the client said
  int regions_ = 0;

  std::mutex open_mutex_;
  std::unordered_map<const void*, std::vector<Handle>> open_;  // by writer

 public:
  std::unique_ptr<PinBoard> board;  // before the pool
 private:
  Mapping table_, progress_, pool_, writable_;
  std::atomic<uint64_t>* progress_words_ = nullptr;
  std::mutex layouts_mutex_;
  std::vector<Known> layouts_;  // by slot, as they were last read

 public:
  Index index;
  std::unique_ptr<PageTables> tables;  // after the mappings
};

}  // namespace kv
