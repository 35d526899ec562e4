// A namespace's layouts: which lies in which slot of the table, how many blocks have it, and which slot another one may have.
// Not thread-safe: the store's lock guards it. Knows no session and no record.
//
// Invariants: a slot changes hands only while no block in memory has its layout, and then under the next generation; while a
// reader lives that knows of no generations, none changes hands and only the first kFirstLayouts are used.
#pragma once

#include <bitset>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/format/layout.h"

namespace kv {

class LayoutTable {
 public:
  using Known = std::shared_ptr<const KnownLayout>;
  using Held = std::bitset<kMaxLayouts>;  // slots whose layouts sessions have registered

  // Of a table laid out by any daemon: what it holds is read. Throws IncompatibleVersion if it cannot be.
  void open(std::byte* table);

  // By what a client was told. Throws InvalidArgument for an id that was never told, LayoutLost for one whose slot went to
  // another.
  const Known& by_id(uint32_t id);
  Known by_digest(const Key& digest);
  const Known& in(uint32_t slot) const { return slots_[slot].known; }  // null if it is empty
  bool is_known(uint32_t slot) const { return slot < slots_.size() && slots_[slot].known; }
  uint32_t size() const { return static_cast<uint32_t>(slots_.size()); }

  // A slot for another layout, empty from here on and nobody else's; its blocks on disk are the caller's to forget before put().
  // Nothing: every slot's layout has blocks in memory, or older readers keep it from changing.
  std::optional<uint32_t> take(const Held& held, bool older_readers);
  uint32_t put(uint32_t slot, Layout layout);  // the id
  void give_back(uint32_t slot);               // after take(), what is there is not needed any more
  // Where take() has nothing: the slot whose blocks in memory may go for another layout, which no session has registered and
  // which was used longest ago, `after` the one before. Nothing: there is none.
  std::optional<uint32_t> victim(const Held& held, uint64_t& after) const;
  // What a registration that found none should be told.
  std::string full(bool older_readers) const;
  // Where a reader of protocol before kVersionLayouts would misread it.
  static bool newer(TableHeader& table);

  // Blocks of the layout in a slot.
  void came(uint32_t slot) { slots_[slot].blocks += 1; }
  void went(uint32_t slot) { slots_[slot].blocks -= 1; }
  void came_on_disk(uint32_t slot) { slots_[slot].on_disk += 1; }
  void went_from_disk(uint32_t slot) { slots_[slot].on_disk -= 1; }
  uint64_t blocks(uint32_t slot) const { return slots_[slot].blocks; }
  uint64_t on_disk(uint32_t slot) const { return slots_[slot].on_disk; }

  // Throws Integrity if the records of each slot's layout are not so many.
  void check(const std::vector<uint64_t>& blocks, const std::vector<uint64_t>& on_disk) const;

 private:
  struct Slot {
    Known known;
    uint64_t blocks = 0, on_disk = 0, used_at = 0;
    bool taken = false;
  };
  TableHeader& header() const { return *reinterpret_cast<TableHeader*>(table_); }
  LayoutSlot slot(uint32_t number) const { return {table_, number}; }

  std::byte* table_ = nullptr;
  std::vector<Slot> slots_;
  std::unordered_map<Key, uint32_t, KeyHash> by_digest_;
  uint64_t uses_ = 0;
};

}  // namespace kv
