// One batch of keys from one peer, straight into extents of the pool: each layer is verified before it is published, so who
// follows a block here reads what its writer marked there, and nothing that was not verified is ever in a sealed block. Believes
// nothing that the peer says of sizes: the layout and the frame's place decide, and whatever does not fit ends the connection.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/peer/channel.h"
#include "core/placement/in_flight.h"
#include "core/store/pool_window.h"
#include "core/store/quarantine.h"

namespace kv::peer {

// A block on its way into this host's memory.
struct Landing {
  Key key;
  uint32_t next = 0;                            // layer of this answer
  uint32_t tokens = 0, layers = 0, marked = 0;  // of the layers that are here, those that who follows may read
  bool headed = false, created = false, meta = false;
  std::shared_ptr<const KnownLayout> known{};
  const Layout* layout = nullptr;
  Handle handle{0, 0};
  Extent extent{0, 0};
  std::vector<uint32_t> sums{};
  uint64_t loan = 0;                // of its memory, to who writes there itself
  std::vector<uint32_t> offered{};  // what that one says: the sum of the meta area, then of each layer
  InFlight* counted_by = nullptr;   // where its memory is counted, as long as it is on its way
  uint64_t counted = 0;
  bool count(InFlight& by);  // its layout is known. False: too much is on its way already
  void uncount();
};

// Blocks whose connection broke under them, until another peer, or another connection, brings the rest: who follows one here
// reads on. Bounded; safe from all threads; leaves the store alone.
class Parked {
 public:
  bool put(Landing&& landing);
  std::optional<Landing> take(const Key& key);
  uint32_t layers(const Key& key) const;  // that are here of it; 0: nothing is
  bool empty() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<Key, Landing, KeyHash> landings_;
};

// The second half of a large block, which another connection brings, into memory that who asked for the block has, and gives
// back. Each layer is verified before it is counted in `here`; who has the block publishes it. Safe from all threads.
class SecondHalf {
 public:
  explicit SecondHalf(const Landing& landing);

  // By who brings it. False: it is not wanted any more. Until ended() it writes, on a channel that may be cut.
  bool begin(const Channel& channel);
  bool came();  // one layer more; false: it is not wanted any more
  // Nothing is written from here on. True if it was not wanted any more.
  bool ended();
  // By who has the block. Nothing is written behind this: who brings it is cut off and waited for; nobody begins any more.
  void stop();
  // Waits for a moment for more than the `layers` that are known to be there. False: there is nothing to wait for.
  bool wait_for_more(uint32_t layers);
  uint32_t here() const;

  std::atomic<uint64_t> bytes{0};  // that came of it, counted in small pieces
  std::atomic<bool> slow{false};   // so who has the block asks for the rest itself
  const Key key;
  const std::shared_ptr<const KnownLayout> known;
  const Extent extent;
  const uint32_t tokens, first, end;
  std::vector<uint32_t> sums;  // written by who brings it: of a layer, from `first` on, before it is here
  uint32_t copy = 0;           // of which copy of the block they are, before any is here

 private:
  enum class State { Offered, Begun, Over };
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::Offered;
  bool unwanted_ = false;
  const Channel* channel_ = nullptr;
  uint32_t here_;
};

// Whether a second half comes so slowly that who has the block, and is done with the first, had better ask for the rest itself:
// it stands still, or is much slower than the first was. Has no clock.
class SecondPace {
 public:
  // `first_bytes` took `first_ns`; `bytes` of the second are here at `now_ns`.
  SecondPace(uint64_t first_bytes, uint64_t first_ns, uint64_t bytes, uint64_t now_ns);
  bool too_slow(uint64_t bytes, uint64_t now_ns);

 private:
  const uint64_t least_;  // that are to come in the time
  uint64_t bytes_, since_ns_;
};
using Offer = std::function<void(const std::shared_ptr<SecondHalf>&)>;  // to a connection to the same peer that is idle

// Of an Over. Throws Broken.
void take_over(Channel& channel, const Frame& head, Quarantine& loans);

enum class Outcome { Open, Fetched, Missing, Lost, NoSpace, Needless, Failed, Busy, Unwanted, Later };

class BlockReceiver {
 public:
  // `parked`: where a block is left that did not come whole; null: it is given up. `loans`: if the other end may write into the
  // pool itself; it is the process of that epoch. `in_flight`: bounds the memory that blocks take on their way; one that would be
  // beyond passes by, and ends as Later.
  BlockReceiver(Store& store, const Window& window, Channel& channel, uint32_t owner, Parked* parked = nullptr,
                Quarantine* loans = nullptr, uint64_t epoch = 0, InFlight* in_flight = nullptr)
      : store_(store),
        window_(window),
        channel_(channel),
        owner_(owner),
        parked_(parked),
        loans_(loans),
        epoch_(epoch),
        in_flight_(in_flight) {}

  struct Received {
    uint64_t bytes = 0, halves = 0;    // the latter that another connection brought
    uint64_t placed = 0, corrupt = 0;  // of blocks that the other end placed itself
  };
  // `ended(i, outcome)` for each key as soon as it is known; who waits for blocks is woken here, once for what came together.
  // Throws Broken, with every key ended: those open as Failed, their memory given back, or parked. `again`: if the connection is
  // gone those stay open, for they will be asked for once more. `unwanted()`, asked now and then, says that nobody waits for what
  // is open: where nobody has pinned it either this ends so, by a Broken, for the other end knows no other way to stop. `offer`,
  // if there is one: a large block that is asked for alone comes by halves.
  Received fetch(uint32_t request, std::span<const Key> keys, const std::function<void(size_t, Outcome)>& ended,
                 bool again = false, const std::function<bool()>& unwanted = nullptr, const Offer& offer = nullptr);
  // Of a block that another connection asked for. Throws Broken.
  void bring(uint32_t request, SecondHalf& half);

  // Of the key that has just ended as Busy: nodes that it was sent to.
  const std::vector<std::string>& instead() const { return instead_; }

 private:
  struct Item : Landing {
    Outcome outcome = Outcome::Open;
    Outcome unwanted = Outcome::Needless;  // why it has no memory here
    bool whole = false;                    // and to be sealed
    uint32_t middle = 0, copy = 0;         // where this answer ends, if that is a half, and of which copy it is
    bool half = false;                     // and that is here
    BlockHead head{};
    uint16_t number = 0;
  };
  std::vector<Item> begin(std::span<const Key> keys);
  void ask(std::span<const Key> keys, std::vector<Item>& landings);
  void go_on(std::span<const Key> keys, std::vector<Item>& landings, const std::function<bool()>& unwanted);
  void tell();
  void look_at_the_clock();
  void look_whether_wanted(const std::vector<Item>& landings, const std::function<bool()>& unwanted);
  void take_frame(const Frame& head, Item& landing);
  void take_layout(const Frame& head);
  void find_layout(Item& landing);
  void take_head(const Frame& head, Item& landing);
  void take_busy(const Frame& head, Item& landing);
  void take_meta(const Frame& head, Item& landing);
  void take_layer(const Frame& head, Item& landing);
  void take_whole(Item& landing);
  void take_half(Item& landing);
  void take_second(Item& landing, const SecondHalf& half);
  bool gather(std::vector<Item>& landings, const std::function<bool()>& unwanted);
  void stop_second();
  void take_second_head(const Frame& frame, const SecondHalf& half);
  void take_second_layer(const Frame& head, SecondHalf& half);
  void create_headed();
  void seal_whole();
  void take_offer(const Frame& head, Item& landing);
  void take_placed(Item& landing);
  bool is_as_offered(const Item& landing) const;
  void answer(Kind kind, const Item& landing, uint32_t layer, std::span<const std::byte> payload);
  void take_bytes(const Frame& head, Item& landing, uint64_t offset, uint64_t bytes, uint64_t padded);
  void mark();
  void give_up(Item& landing, Outcome outcome);
  void leave(Item& landing, Outcome outcome);
  [[noreturn]] void differs(Item& landing);

  Store& store_;
  const Window& window_;
  Channel& channel_;
  const uint32_t owner_;
  Parked* const parked_;
  Quarantine* const loans_;
  const uint64_t epoch_;
  InFlight* const in_flight_;
  std::vector<std::string> instead_;
  std::vector<std::shared_ptr<const KnownLayout>> told_;  // layouts told on this connection, the latest last, without their ids
  uint32_t unheaded_ = 0;                                 // layouts that were told since the last head
  uint32_t learnt_ = 0, brought_ = 0;  // layouts registered on this connection's word, and blocks that it brought
  uint32_t request_ = 0;
  Received received_;
  uint32_t beside_ = 0;      // frames of this answer since the last layer
  uint64_t asked_ns_ = 0;    // when this answer was asked for
  uint64_t end_ns_ = 0;      // until when the next one has time,
  bool moved_ = false;       // and whether one has come since that was set
  Item* to_mark_ = nullptr;  // has layers that were not marked: of what came together, and is little, the last is marked
  uint64_t unmarked_bytes_ = 0;
  std::vector<Item*> headed_;           // their memory is yet to be asked for: of what came together at once
  const Offer* offer_ = nullptr;        // of this answer
  bool by_halves_ = false;              // and its only block may come so
  std::shared_ptr<SecondHalf> second_;  // that was offered
  std::vector<Item*> whole_;            // all of each is here: what came together is sealed at once
  bool to_tell_ = false;                // something became visible that nobody has been woken for
};

}  // namespace kv::peer
