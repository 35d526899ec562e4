// How many blocks a user may pin: a share of the namespace's bytes, readers less than writers, and never all of them.
//
// Nobody can take memory back from a process that maps it, so nothing is revoked: what is beyond the budget is never given. A
// session holds only what its allowance covers (so many words of its page, each a block of so many pages), which is the daemon's
// word, and stands in the name of the page's file for the next daemon; a pin beyond it is passed over, whoever wrote it. A client
// asks for more when it needs it, and what others of its user do not use is taken back for that, by the same meeting of fences as
// a pin: the daemon writes less, fences, and looks at the words; the client writes its pin, fences, and looks at the allowance.
// One of the two sees the other.
//
// A page's words have memory as far as the allowance goes, also where there is no budget: of the daemon's own user and root.
// Invariant: the allowances of a user's sessions, slots times pages, are within its budget together, and those of all users
// within theirs.

#include <algorithm>

#include "core/base/atomics.h"
#include "core/store/slice.h"
#include "core/store/store.h"

namespace kv {
namespace {

constexpr uint64_t kParts = 8;
constexpr uint64_t kReaderParts = 2, kWriterParts = 6;       // of one user
constexpr uint64_t kUsersParts = 7;                          // of all together
constexpr uint32_t kFirstSlots = (32768 - kPinsOffset) / 8;  // a page of 32 KiB, until more is asked for
constexpr uint64_t kUserPins = 1 << 17;                      // of one user: what a scan reads for it
constexpr size_t kRecalledAtOnce = 16;                       // each is a call of the system

uint64_t less(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

}  // namespace

// What it may hold, in pages. A client that cannot ask holds blocks of any length: as long as there have been. It is the daemon's
// own user's, for longer blocks may come; or another's that an older daemon let in.
uint64_t Store::charge(const Session& session) const {
  const PinAllowance& a = session.allowance;
  return a.slots * (a.pages == PinAllowance::kAnyPages ? blocks_.longest_pages : a.pages);
}

// Beside all other sessions.
PinsLeft Store::left_for(const Session& session) const {
  const uint64_t part = options_.capacity_bytes / kPageBytes / kParts;
  uint64_t users = 0, of_user = 0, pins = 0;
  for (auto& [id, other] : sessions_) {
    if (!other->budgeted || other.get() == &session) continue;
    users += charge(*other);
    if (other->holder.uid != session.holder.uid) continue;
    of_user += charge(*other), pins += other->allowance.slots;
  }
  const uint64_t most = part * (session.holder.read_only ? kReaderParts : kWriterParts);
  return {std::min(less(most, of_user), less(part * kUsersParts, users)), less(kUserPins, pins)};
}

// Of another user it begins with nothing.
PinAllowance Store::first_allowance(const Session& session, uint32_t max_pins) {
  if (session.budgeted) return {};
  return {session.asks ? std::min(max_pins, kFirstSlots) : max_pins, PinAllowance::kAnyPages};
}

// False: it has pins that the new one would not cover, and keeps what it had, or its file could not be renamed, and it has no
// more. The next daemon goes by the file's name, so more is given only once it stands there, and less stands there only once
// nobody may use more. So the lock is held over a call of the system, of a session of another user that asks.
bool Store::set_allowance(Session& session, PinAllowance to) {
  const auto named = [&](PinAllowance allowance) { return !session.budgeted || session.file->name_allowance(allowance); };
  const PinAllowance from = session.allowance, least{std::min(from.slots, to.slots), std::min(from.pages, to.pages)};
  if (least != from) {
    session.file->allowance().store(least.pack(), std::memory_order_release);
    fence_full();
    const uint32_t used = session.file->pins_end(from.slots);
    if (used > to.slots || (used && to.pages < from.pages) || !named(least)) {
      session.file->allowance().store(from.pack(), std::memory_order_release);
      return false;
    }
    session.allowance = least;
  }
  if (to == least) return true;
  if (!named(to)) return false;
  session.file->allowance().store(to.pack(), std::memory_order_release);
  session.allowance = to;
  return true;
}

void Store::recall(Session& session) {
  if (!session.budgeted || !session.asks || !session.file) return;
  const uint32_t used = session.file->pins_end(session.allowance.slots);
  if (used < session.allowance.slots) set_allowance(session, {used, session.allowance.pages});
}

// In slices where others have to give back what they do not use: one user may have hundreds of sessions.
PinAllowance Store::allow_pins(uint32_t id, uint32_t slots, uint32_t pages) {
  const Entry entry(*this);
  const auto asker = [&]() REQUIRES(mutex_) -> Session* {
    const auto found = sessions_.find(id);
    return found == sessions_.end() || !found->second->file || found->second->ended ? nullptr : found->second.get();
  };
  Session* session = asker();
  if (!session) return {};
  const PinAllowance had = session->allowance;
  const uint32_t most = session->file->max_pins();
  slots = std::clamp(slots, 1u, most), pages = std::max(pages, 1u);
  if (!session->asks || (slots <= had.slots && pages <= had.pages)) return had;
  // No block has more, and the largest number there is means "any length", which is charged by the longest block there has been.
  if (session->budgeted) pages = static_cast<uint32_t>(std::min<uint64_t>(pages, options_.capacity_bytes / kPageBytes));
  if (!session->budgeted) {
    const PinAllowance more{std::max(slots, std::min(most, 2 * had.slots)), PinAllowance::kAnyPages};
    if (session->file->reserve(more.slots)) set_allowance(*session, more);
    return session->allowance;
  }
  uint32_t used = 0;
  const auto wanted_now = [&]() REQUIRES(mutex_) -> PinAllowance {
    const PinAllowance& has = session->allowance;
    used = session->file->pins_end(has.slots);
    return used ? PinAllowance{std::max(slots, has.slots), std::max(pages, has.pages)} : PinAllowance{slots, pages};
  };
  for (const bool of_others : {false, true}) {  // what its own user does not use, then what others do not
    if (left_for(*session).hold(wanted_now())) break;
    Slice slice(kRecalledAtOnce, 1);
    for (auto at = sessions_.begin(); at != sessions_.end();) {
      const uint32_t number = at->first;
      if (number != id && (of_others || at->second->holder.uid == session->holder.uid)) recall(*at->second);
      ++at;
      if (at == sessions_.end() || !slice.over()) continue;
      mutex_.give_way(), slice.again();
      if (!(session = asker())) return {};
      at = sessions_.at_least(number + 1);
    }
  }
  PinAllowance wanted = wanted_now();
  const PinsLeft left = left_for(*session);
  const auto more = static_cast<uint32_t>(std::min({uint64_t{most}, left.pages / wanted.pages, left.pins}));
  // Half of what is left beside it, so that it need not ask for each.
  wanted.slots = more <= wanted.slots ? more : wanted.slots + (more - wanted.slots) / 2;
  if (wanted.slots >= used && session->file->reserve(wanted.slots)) set_allowance(*session, wanted);
  return session->allowance;
}

// Of sessions that an earlier daemon opened: what it gave them. Their files' names say it, but for what a daemon before
// 2026-11-29 gave or took back since, or where none but such a one has been: that stands in the pages alone, which their clients
// write too. So a page is believed in that it has less, if it uses no more, and then in that it has more, as far as its user's
// budget goes, in the order of the sessions: one that lies has no more of it than it could have asked for.
void Store::adopt_allowances() {
  for (auto& [id, session] : sessions_) session->allowance = {};
  const auto said_by = [](const Session& session) {
    auto said = PinAllowance::unpack(session.file->page().allowance.load(std::memory_order_acquire));
    if (const auto named = session.file->named_allowance(); named && named->pages != PinAllowance::kAnyPages)
      if (said.pages == PinAllowance::kAnyPages) said = *named;  // no daemon gave that
    said.slots = std::min(said.slots, session.file->max_pins());
    return said;
  };
  for (auto& [id, session] : sessions_) {
    if (!session->file) continue;
    const uint32_t most = session->file->max_pins();
    const PinAllowance said = said_by(*session);
    if (!session->budgeted) {
      session->allowance = {said == PinAllowance{0, 0} ? most : said.slots, PinAllowance::kAnyPages};
      continue;
    }
    const std::optional<PinAllowance> named = session->file->named_allowance();
    session->asks = named.value_or(said).pages != PinAllowance::kAnyPages;
    if (!named) continue;
    const uint32_t used = session->file->pins_end(named->slots);
    session->allowance = {std::min(std::min(named->slots, most), std::max(said.slots, used)),
                          used ? named->pages : std::min(named->pages, said.pages)};
  }
  for (auto& [id, session] : sessions_) {
    if (!session->file) continue;
    if (session->budgeted) {
      const PinAllowance sure = session->allowance, said = said_by(*session);
      session->allowance = {std::max(sure.slots, said.slots), std::max(sure.pages, said.pages)};
      const PinsLeft left = left_for(*session);
      if (charge(*session) > left.pages || session->allowance.slots > left.pins) session->allowance = sure;
      if (session->file->named_allowance() != session->allowance) session->file->name_allowance(session->allowance);
    }
    session->file->allowance().store(session->allowance.pack(), std::memory_order_release);
  }
}

}  // namespace kv
