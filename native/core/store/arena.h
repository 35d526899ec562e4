// The arena hands out extents of the pool. Slabs: runs of units cut into slots of one size class, so that a block freed
// makes room for the next block of its size and long runs stay whole. It owns no memory and touches none: it knows offsets.
// The store tells it which record lies in a slot, so that it can show the store, in address order, what stands where.
//
// Invariant: a slot is held by at most one record; the slots of all slabs and the free units tile [0, frontier).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "core/format/block.h"

namespace kv {

class Arena {
 public:
  static constexpr uint32_t kNobody = ~0u;

  // `geometry` has slab_words(capacity) words that outlive the arena: where its slabs were cut, so that an adopted pool is cut
  // the same way again. A hint: claim() believes it only where it fits. May be null.
  explicit Arena(uint64_t capacity_bytes, std::atomic<uint64_t>* geometry = nullptr);
  static uint64_t geometry_words(uint64_t capacity_bytes);

  // The pool exists up to here; extents are granted only below. Never shrinks.
  void set_frontier(uint64_t bytes);

  // An extent of at least `length` bytes in a slab of its class, or nothing. Never evicts.
  std::optional<uint64_t> allocate(uint64_t length, uint32_t record);
  bool has_room(uint64_t length);  // would allocate() succeed?
  // How many more extents of this length have room, counted no further than `most`.
  size_t room(uint64_t length, size_t most);
  void release(Extent extent, uint32_t record);
  void prefetch(Extent extent) const;  // what release() will touch

  // As allocate(), but each unit cut in pages from the start, so that its parts can be handed over one by one, and what became of
  // them goes unit by unit: a region.
  std::optional<uint64_t> allocate_pages(uint64_t length, uint32_t record);
  // Who holds all of the extent, in slots that end where it ends; kNobody: no one does, or they do not.
  uint32_t holder(Extent extent) const;
  void hand_over(Extent extent, uint32_t from, uint32_t to);  // of an extent that holder() says is from's

  // Takes exactly [offset, offset + length), which must be free: adoption, and the last resort of `create`.
  // False if any slot in it is taken.
  bool claim(Extent extent, uint32_t record);

  // The size class of a length: blocks of one class share slabs. The key of the eviction policy's queues.
  static uint64_t size_class(uint64_t length);
  uint64_t slab_bytes_for(uint64_t length) const;

  // Pieces of the pool in address order, for choosing what to evict when a class has nothing left: whole slabs and free runs
  // (`by_slab`), or single slots and the gaps between them.
  struct Piece {
    Extent extent;
    std::vector<uint32_t> records;  // who stands in it
  };
  // Only those of the slabs and free runs that reach into [from, to).
  std::vector<Piece> pieces(bool by_slab, uint64_t from = 0, uint64_t to = ~0ull) const;

  uint64_t unit_bytes() const { return unit_; }
  uint64_t slack_bytes() const { return slack_; }  // slot bytes that the extents in them do not need
  void check_integrity() const;

 private:
  struct Slab {
    uint32_t first_unit = 0;
    uint32_t units = 0;  // 0: this entry is unused
    uint32_t used = 0;
    uint64_t slot_bytes = 0;
    std::vector<uint32_t> slots;  // record or kNobody; one more than fit for the tail that is too short for a slot
    std::vector<uint32_t> free;   // free slots of normal size, taken from the back
    bool listed = false;          // in its class's list
    uint32_t all = kNobody;       // who has every slot: then `slots` and `free` are empty
    uint32_t who(uint32_t slot) const { return all != kNobody ? all : slots[slot]; }
  };

  uint32_t normal_slots(const Slab& slab) const { return static_cast<uint32_t>(slab.units * unit_ / slab.slot_bytes); }
  uint32_t slot_count(const Slab& slab) const;
  Extent slab_extent(const Slab& slab) const { return {slab.first_unit * unit_, slab.units * unit_}; }
  Extent slot_extent(const Slab& slab, uint32_t slot) const;
  void part(Slab& slab);  // its slots are different people's from now on
  Slab* new_slab(uint64_t length);
  bool restore_slab(uint32_t unit);
  uint32_t add_slab(uint32_t first_unit, uint32_t units, uint64_t slot_bytes, uint32_t all = kNobody);
  void list(uint32_t slab);
  void dissolve_if_empty(uint32_t slab);
  std::optional<uint32_t> find_units(uint32_t count);  // the first of the lowest free run of so many
  void take_units(uint32_t first, uint32_t count);     // which are free
  void give_units(uint32_t first, uint32_t count);
  void take_slots(Extent extent, uint32_t record);
  template <class F>
  void each_slab(Extent extent, F&& f) const;
  template <class F>
  void each_slot(Extent extent, F&& f) const;

  uint64_t unit_;
  std::atomic<uint64_t>* geometry_;  // per unit: units:24 | slot pages:40 where a slab begins, else 0
  uint32_t units_ready_ = 0;
  uint32_t hopeless_run_ = kNobody;         // no run of so many free units exists
  std::vector<uint32_t> unit_slab_;         // slab of a unit, or kNobody
  std::map<uint32_t, uint32_t> free_runs_;  // of units below units_ready_: first unit -> count; never two that touch
  std::vector<Slab> slabs_;
  std::vector<uint32_t> unused_slabs_;
  std::map<uint64_t, std::vector<uint32_t>> classes_;  // class -> slabs with a free slot
  uint64_t slack_ = 0;
};

}  // namespace kv
