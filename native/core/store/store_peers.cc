// Blocks that go to other hosts, and come from there. Who reads one holds it against reuse by a pin of the daemon's, as the disk
// tier's writes do; nothing is read here.

#include <time.h>

#include "core/base/error.h"
#include "core/store/store.h"

namespace kv {

namespace {
constexpr double kMuchSooner = 4;            // than this host's disk another one's memory must be
constexpr uint64_t kCompareBytes = 1 << 20;  // what the two are compared by
}  // namespace

std::vector<Presence> Store::promote(std::span<const Key> keys, uint32_t priority, Wanting wanting) {
  Fetcher* peers = peers_.load(std::memory_order_acquire);
  std::vector<Presence> out;
  for (const Key& key : keys) out.push_back(promote_one(peers, key, priority, wanting));
  if (peers) peers->go();
  return out;
}

// Memory, disk, then the other hosts; another host that has it before the disk, if the disk is known to be much slower.
Presence Store::promote_one(Fetcher* peers, const Key& key, uint32_t priority, Wanting wanting) {
  const Presence here = lookup(key).presence;
  if (here == Presence::Pending && peers) peers->also_wanted(key, wanting);
  if (here == Presence::Resident || here == Presence::Pending) return here;
  LowerTier* below = lower();
  if (below && peers && here == Presence::OnDisk && peer_is_sooner(*peers, key))
    if (const Presence there = peers->fetch(key, priority, wanting); there != Presence::Missing) return there;
  if (const Presence there = below ? below->promote(key, priority) : here; there != Presence::Missing) return there;
  return peers ? peers->fetch(key, priority, wanting) : Presence::Missing;
}

bool Store::peer_is_sooner(const Fetcher& peers, const Key& key) const {
  const TableHeader& header = index_.header();
  const uint64_t rate = header.load_bytes_per_s.load(std::memory_order_relaxed);
  if (rate == 0 || !peers.known(key)) return false;
  const uint64_t bytes = header.load_waiting_bytes.load(std::memory_order_relaxed) + kCompareBytes;
  const double disk_s = static_cast<double>(header.load_latency_us.load(std::memory_order_relaxed)) * 1e-6 +
                        static_cast<double>(bytes) / static_cast<double>(rate);
  const double peer_s = peers.estimate_s(kCompareBytes);
  return peer_s >= 0 && kMuchSooner * peer_s < disk_s;
}

// How soon a block of another host would be here, for clients that weigh it against computing.
void Store::tell_peer_speed(uint64_t bytes_per_s, uint64_t latency_us) {
  TableHeader& header = index_.header();
  header.peer_bytes_per_s.store(bytes_per_s, std::memory_order_relaxed);
  header.peer_latency_us.store(latency_us, std::memory_order_relaxed);
}

// Sealed or being written; its memory stays until end_read().
std::optional<ReadJob> Store::begin_read(const Key& key, bool* crowded) {
  const Entry entry(*this);
  Snapshot found;
  if (index_.find(key, found) != Find::Hit || expired(found.expiry_s)) return std::nullopt;
  const Control now = found.control;
  if (now.state() != State::Sealed && now.state() != State::Created) return std::nullopt;
  const bool counted = own_pins_.is_held_for(PinOwner::Peer, found.record);  // the other half goes out, or to another host
  if (!counted && !own_pins_.may_take(PinOwner::Peer, found.extent.length, options_.capacity_bytes)) {
    if (crowded) *crowded = true;
    return std::nullopt;
  }
  if (now.state() == State::Sealed) use(found.record, use_now());
  own_pins_.take(PinOwner::Peer, {found.record, now.generation()}, found.extent.length);
  const Upkeep& u = index_.upkeep(found.record);
  return ReadJob{{found.record, now.generation()},
                 found.extent,
                 pieces_of(found.record),
                 found.shape,
                 u.fingerprint.load(std::memory_order_relaxed),
                 found.expiry_s,
                 u.parent.load(std::memory_order_relaxed),
                 now.state() == State::Sealed,
                 (now.flags() & kFlagChecksummed) != 0,
                 u.owner.load(std::memory_order_relaxed) == fetcher_.load(std::memory_order_relaxed),
                 layouts_.in(found.shape.layout)};
}

void Store::end_read(Handle handle) {
  const Lock lock(mutex_);
  own_pins_.drop(PinOwner::Peer, handle, extent_of(handle.record).length);
  pins_.gone += 1;
  scan_zombies(control(handle.record).state() == State::Zombie);
}

std::vector<uint64_t> Store::held_marks(uint32_t& record, uint32_t limit) {
  const Lock lock(mutex_);
  std::vector<uint64_t> out;
  for (uint32_t looked = 0; record < index_.max_blocks() && looked < limit; ++record, ++looked)
    if (const Control now = control(record); servable(now.state(), now.flags())) out.push_back(mark_of(key_of(record), true));
  return out;
}

size_t Store::push(const std::string& node, std::span<const Key> keys) {
  if (node.empty() || node.size() > protocol::kMaxNamespace)
    throw Error(Code::InvalidArgument, "a host's name has 1 to " + std::to_string(protocol::kMaxNamespace) + " bytes, this one " +
                                           std::to_string(node.size()));
  if (const std::optional<size_t> told = journal_.push(node, keys)) return *told;
  std::string takers;
  for (const std::string& other : journal_.takers()) takers += (takers.empty() ? "" : ", ") + other;
  throw Error(Code::Unavailable, "no host " + node + " takes what is pushed to it in namespace " + name() +
                                     "; those that do now: " + (takers.empty() ? "none" : takers));
}

}  // namespace kv
