#include "core/store/layout_table.h"

#include <algorithm>
#include <tuple>

#include "core/base/error.h"

namespace kv {

void LayoutTable::open(std::byte* table) {
  table_ = table;
  slots_.resize(LayoutSlot::count(header()));
  const uint32_t used = header().layouts.load();
  if (used > slots_.size())
    throw Error(Code::IncompatibleVersion, "the table says " + std::to_string(used) +
                                               " layouts are registered, it has room for " + std::to_string(slots_.size()));
  for (uint32_t number = 0; number < used; ++number) {
    const auto blob = slot(number).blob();
    if (!blob) continue;  // its daemon was killed between two layouts
    Layout layout = Layout::parse(*blob);
    const Key digest = layout_digest(layout);
    by_digest_[digest] = number;
    slots_[number].known =
        std::make_shared<const KnownLayout>(KnownLayout{layout_id(number, slot(number).generation()), digest, std::move(layout)});
    slots_[number].used_at = ++uses_;
  }
}

const LayoutTable::Known& LayoutTable::by_id(uint32_t id) {
  const uint32_t number = layout_slot(id);
  if (number >= header().layouts.load(std::memory_order_relaxed))
    throw Error(Code::InvalidArgument, "layout " + std::to_string(id) + " is not registered");
  Slot& found = slots_[number];
  if (!found.known || found.known->id != id)
    throw Error(Code::LayoutLost,
                "layout " + std::to_string(id) + " had no block left and its slot was given to another: register it again");
  found.used_at = ++uses_;
  return found.known;
}

LayoutTable::Known LayoutTable::by_digest(const Key& digest) {
  const auto found = by_digest_.find(digest);
  if (found == by_digest_.end()) return nullptr;
  slots_[found->second].used_at = ++uses_;
  return slots_[found->second].known;
}

bool LayoutTable::newer(TableHeader& table) {
  return std::atomic_ref(table.version).load(std::memory_order_acquire) != kOldestFormat;
}

// An empty slot, a new one, then those of no block in memory: rather one that no session has registered, rather one of no files,
// and of those the one used longest ago.
std::optional<uint32_t> LayoutTable::take(const Held& held, bool older_readers) {
  const uint32_t used = header().layouts.load(std::memory_order_relaxed);
  const uint32_t most = older_readers ? std::min(kFirstLayouts, size()) : size();
  std::optional<uint32_t> found;
  if (!older_readers) {
    auto rank = [&](uint32_t number) {
      const Slot& entry = slots_[number];
      return std::tuple(entry.known != nullptr, held[number], entry.on_disk > 0, entry.used_at);
    };
    for (uint32_t number = 0; number < used; ++number) {
      const Slot& entry = slots_[number];
      if (entry.taken || entry.blocks || slot(number).generation() == kLastLayoutGeneration) continue;
      if (!found || rank(number) < rank(*found)) found = number;
    }
  }
  if (used < most && (!found || slots_[*found].known)) found = used;
  if (!found) return std::nullopt;
  Slot& slot_ = slots_[*found];
  if (*found >= kFirstLayouts || *found < used)  // before anything changes that they would misread
    std::atomic_ref(header().version).store(kFormatVersion, std::memory_order_release);
  if (slot_.known) by_digest_.erase(slot_.known->digest);
  if (*found < used) slot(*found).change(slot(*found).generation() + 1, {});
  slot_.known = nullptr, slot_.taken = true;
  return found;
}

std::optional<uint32_t> LayoutTable::victim(const Held& held, uint64_t& after) const {
  std::optional<uint32_t> found;
  for (uint32_t number = 0; number < size(); ++number) {
    const Slot& entry = slots_[number];
    if (!entry.known || held[number] || entry.used_at <= after || slot(number).generation() == kLastLayoutGeneration) continue;
    if (!found || entry.used_at < slots_[*found].used_at) found = number;
  }
  if (found) after = slots_[*found].used_at;
  return found;
}

uint32_t LayoutTable::put(uint32_t number, Layout layout) {
  Slot& entry = slots_[number];
  KV_INVARIANT(entry.taken && !entry.known && entry.blocks == 0 && entry.on_disk == 0);
  const Key digest = layout_digest(layout);
  const uint32_t id = layout_id(number, slot(number).generation());
  slot(number).change(layout_generation(id), layout.blob);
  if (number >= header().layouts.load(std::memory_order_relaxed)) header().layouts.store(number + 1, std::memory_order_release);
  by_digest_[digest] = number;
  entry.known = std::make_shared<const KnownLayout>(KnownLayout{id, digest, std::move(layout)});
  entry.taken = false, entry.used_at = ++uses_;
  return id;
}

void LayoutTable::give_back(uint32_t number) { slots_[number].taken = false; }

void LayoutTable::check(const std::vector<uint64_t>& blocks, const std::vector<uint64_t>& on_disk) const {
  for (uint32_t number = 0; number < size(); ++number) {
    const Slot& entry = slots_[number];
    if (blocks[number] == entry.blocks && on_disk[number] == entry.on_disk && (entry.known || entry.blocks == 0)) continue;
    throw Error(Code::Integrity, "layout slot " + std::to_string(number) + " is said to have " + std::to_string(entry.blocks) +
                                     " blocks, it has " + std::to_string(blocks[number]));
  }
}

std::string LayoutTable::full(bool older_readers) const {
  if (older_readers)
    return "the first " + std::to_string(std::min(kFirstLayouts, size())) +
           " layouts are taken, and a client of an older version, which knows of no others, is attached to this namespace";
  return "all " + std::to_string(size()) + " layouts of this namespace have blocks in memory";
}

}  // namespace kv
