// A session's page file, both ends of it. The daemon makes the file, takes flock(LOCK_EX) on one open file description and
// hands that description to the client; the kernel drops the lock when the last descriptor and the last mapping of that
// description are gone, forks included. So "can I take the lock on a description of my own" is the question "can anybody still
// touch the memory".
//
// Daemon: SessionFile. Client: PinBoard, which takes and clears pins by the hazard protocol.
// Invariant: a pin is written into a word that was 0, never moves, and is cleared only by the process that wrote it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/atomics.h"
#include "core/format/block.h"
#include "core/format/segment.h"

namespace kv {

using Id = std::array<uint8_t, 16>;
Id random_id();
std::string hex(const Id& id);

// Whose a session is: in its file's name, which only the daemon can change.
struct SessionHolder {
  uint32_t uid = 0;
  bool read_only = false;
};

constexpr uint64_t session_file_bytes(uint32_t max_pins) { return kPinsOffset + uint64_t{8} * max_pins; }

class SessionFile {
 public:
  // Makes "<directory>/<prefix>.s.<session>.<user><r|w>.<allowance>.<random>", 0600, filled and locked; the locked descriptor is
  // taken by take_locked().
  static SessionFile create(const std::string& directory, const std::string& prefix, const Id& pool_id, uint32_t session,
                            uint32_t max_pins, SessionHolder holder = {}, PinAllowance allowance = {~0u}, uint32_t protocol = 0);
  // Takes memory for so many words; without it touching them could end the program, where the file system is full. False: it is.
  bool reserve(uint32_t slots);
  // The session that the name of a page says, without "<prefix>.s."; ~0 if it says none.
  static uint32_t number_in(const std::string& name);
  static std::optional<SessionHolder> holder_in(const std::string& name);  // none: a name of a daemon before 2026-11-25
  // What the daemon gave last, which its client's word in the page may not be. None: a name of a daemon before 2026-11-29.
  std::optional<PinAllowance> named_allowance() const;
  bool name_allowance(PinAllowance allowance);  // for the next daemon. False: the name cannot be changed
  // Opens one left by an earlier daemon. Throws InvalidArgument if it is not a page of this pool, of this user, 0600, one link.
  static SessionFile open(const std::string& path, const Id& pool_id);

  Fd take_locked() { return std::move(locked_); }
  // True once nobody holds the client's description any more. From then on the lock is ours.
  bool lock_free();
  void unlink();

  const SessionPage& page() const { return *mapping_.at<SessionPage>(0); }
  const Id& token() const { return token_; }
  uint32_t max_pins() const { return max_pins_; }
  uint64_t bytes() const { return mapping_.size(); }
  const Mapping& mapping() const { return mapping_; }
  Mapping head_again() const {
    return Mapping(own_.get(), kPinsOffset, true);
  }  // another mapping, of what stands before the pins

  std::atomic<uint64_t>& allowance() { return mapping_.at<SessionPage>(0)->allowance; }
  std::atomic<uint64_t>& rounds() { return mapping_.at<SessionPage>(0)->rounds; }
  std::atomic<uint64_t>& device() { return mapping_.at<SessionPage>(0)->device; }

  // Those of the first `slots` words that may have a pin. Read with acquire: what its reader read is over when a word is 0.
  std::span<const std::atomic<uint64_t>> pin_words(uint32_t slots) const {
    const uint64_t high = page().pins_high.load(std::memory_order_acquire);
    return {mapping_.at<const std::atomic<uint64_t>>(kPinsOffset), std::min<uint64_t>(high, std::min(slots, max_pins_))};
  }
  // Calls f(pin word) for every pin among them.
  template <class F>
  void each_pin(uint32_t slots, F&& f) const {
    for (const auto& word : pin_words(slots))
      if (const uint64_t pin = word.load(std::memory_order_acquire)) f(pin);
  }
  // The word behind the last pin of the first `slots`. Believes no hint.
  uint32_t pins_end(uint32_t slots) const;

 private:
  std::string path_;
  Fd own_;     // the daemon's description: not locked while the client lives
  Fd locked_;  // the client's
  Mapping mapping_;
  Id token_{};
  uint32_t max_pins_ = 0;  // of the daemon's making; the client's copy in the page is not believed
};

// The client's side of its page. Thread-safe.
class PinBoard {
 public:
  static constexpr uint32_t kNoSlot = ~0u;

  explicit PinBoard(Mapping page);

  // Writes pins into free words, as many as there are. Returns how many, their places in `slots`. The caller fences and verifies.
  // `pages`: of each one's block, if they are bounded. Ends at the first that is not allowed.
  size_t take(std::span<const uint64_t> pins, uint32_t* slots, std::span<const uint32_t> pages = {});
  PinAllowance allowance() const;  // asked behind the fence: which pins are still honoured?
  PinRounds rounds() const { return PinRounds::unpack(page().rounds.load(std::memory_order_relaxed)); }
  // By an allowance that may grow.
  bool bounded() const { return allowance().pages != PinAllowance::kAnyPages || allowance().slots < slots(); }
  size_t taken();
  size_t slots() const { return (mapping_.size() - kPinsOffset) / 8; }
  void clear(std::span<const uint32_t> slots);
  void touched(std::span<const uint32_t> records);
  void count(uint64_t hits, uint64_t misses);

  // While one lives, the daemon wakes this session's sleepers. Made before the last look at the record (see
  // Store::anybody_waits).
  class Waiting {
   public:
    explicit Waiting(PinBoard& board) : count_(board.mapping_.at<SessionPage>(0)->waiting) {
      count_.fetch_add(1, std::memory_order_relaxed);
      fence_full();
    }
    ~Waiting() { count_.fetch_sub(1, std::memory_order_relaxed); }
    Waiting(const Waiting&) = delete;

   private:
    std::atomic<uint64_t>& count_;
  };

  const SessionPage& page() const { return *mapping_.at<SessionPage>(0); }
  Mailbox& mailbox() const { return *mapping_.at<Mailbox>(kMailboxOffset); }

 private:
  std::atomic<uint64_t>* pins() const { return mapping_.at<std::atomic<uint64_t>>(kPinsOffset); }

  Mapping mapping_;
  uint32_t free_slot(uint32_t allowed);  // kNoSlot: none below this

  std::mutex mutex_;
  std::vector<uint32_t> free_;  // that had a pin. Those used last on top, so that scans stay short
  uint32_t fresh_ = 0;          // from here on no slot ever had one
};

}  // namespace kv
