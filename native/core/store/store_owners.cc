// On what terms a session holds blocks (pin_owners.h), and memory that a device may still write.
//
// That no process maps a session's page says that no program writes its memory any more. It does not say so of a device that was
// given the memory: a GPU's or a network card's transfer ends later. So what a session with such memory leaves behind stays as it
// is, quarantined or pinned, until the client has said that the device is done with it, or its process has ended, and with it all
// that the kernel held for it.

#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/base/process.h"
#include "core/store/each_pin.h"

namespace kv {

void Store::set_pin_terms(uint32_t id, const PinTerms& terms) {
  KV_INVARIANT(terms.owner == PinOwner::Client || terms.owner == PinOwner::Engine);
  const Entry entry(*this);
  session_of(id).terms = terms;
}

bool Store::ask_pins_back(uint32_t id) {
  const Entry entry(*this);
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || !found->second->file) return false;
  found->second->age.ask_all_back(monotonic_ns());
  tell_rounds(*found->second);
  return true;
}

void Store::tell_rounds(Session& session) {
  const uint64_t now = session.age.rounds().pack();
  std::atomic<uint64_t>& said = session.file->rounds();
  if (PinRounds::unpack(now).asked_back != PinRounds::unpack(said.load(std::memory_order_relaxed)).asked_back)
    counters_.asked_back += 1;
  said.store(now, std::memory_order_release);
}

std::map<uint32_t, PinsNamed> Store::held_by_each(uint32_t first, uint32_t last) {
  std::map<uint32_t, PinsNamed> out;
  PinsNamed* of = nullptr;
  uint32_t whose = 0;
  Slice slice(kSlice);
  each_pin_of_in_slices(slice, first, last, [&](uint32_t id, uint32_t record, uint64_t generation, uint32_t) REQUIRES(mutex_) {
    if (!of || whose != id) of = &out[id], whose = id;
    of->words += 1;
    const Control now = control(record);  // a block that goes keeps its memory while it is pinned
    if (now.state() == State::Free || now.state() == State::Disk || now.generation() - generation > 2) return;
    of->count += 1, of->bytes += extent_of(record).length;
  });
  return out;
}

// Whether some hold blocks on terms, so that they are looked at again soon.
bool Store::look_after_terms() {
  bool any = false;
  const uint64_t now_ns = monotonic_ns();
  for (auto at = sessions_.begin(); at != sessions_.end();) {
    const uint32_t id = at->first;
    if (at->second->file && at->second->terms.bounded()) {
      const std::map<uint32_t, PinsNamed> found = held_by_each(id, id);
      const PinsHeld held = found.empty() ? PinsNamed{} : found.begin()->second;
      any |= held.count > 0;
      at = sessions_.find(id);
      if (at != sessions_.end()) {
        Session& session = *at->second;
        session.age.look(session.terms, now_ns, session.terms.bytes && held.bytes > session.terms.bytes);
        tell_rounds(session);
      }
    }
    if (id == ~0u) break;
    at = sessions_.at_least(id + 1);
  }
  return any;
}

void Store::give_to_device(uint32_t id, bool writes) {
  const Entry entry(*this);
  Session& session = session_of(id);
  if (!session.file) return;
  const uint64_t process = writes ? process_identity(session.pid) : 0;
  if (writes && !process)
    throw Error(Code::FailedPrecondition, "process " + std::to_string(session.pid) +
                                              " cannot be seen from here, so nobody would know when its device is done");
  session.device = process;
  session.file->device().store(process, std::memory_order_release);
}

}  // namespace kv
