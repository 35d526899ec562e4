// Sessions: their page files, their ends, and what they leave behind.

#include <unistd.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/base/process.h"
#include "core/store/store.h"

namespace kv {

bool Store::is_budgeted(uint32_t uid) { return uid != 0 && uid != ::geteuid(); }

std::pair<uint32_t, Fd> Store::open_session(uint32_t max_pins, uint32_t pid, uint32_t uid, bool read_only, uint32_t protocol) {
  const bool asks = protocol >= protocol::kVersionAsks;
  if (max_pins == 0 || max_pins > kMaxPins)
    throw Error(Code::InvalidArgument, "max_pins is " + std::to_string(max_pins) + ", must be 1 to " + std::to_string(kMaxPins));
  auto session = std::make_unique<Session>();
  session->holder = {uid, read_only};
  session->budgeted = is_budgeted(uid), session->asks = asks, session->protocol = protocol;
  check_reader(protocol, uid);
  uint32_t id;
  {
    const Entry entry(*this);
    check_reader(protocol);
    id = session->id = sessions_.new_id();
    session->allowance = first_allowance(*session, max_pins);
  }
  // The file is made outside the lock: it takes system calls.
  session->file = SessionFile::create(options_.session_directory, options_.session_prefix, options_.pool_id, id, max_pins,
                                      session->holder, session->allowance, protocol);
  session->file->allowance().store(session->allowance.pack(), std::memory_order_release);
  try {
    session->guard = Guard(session->file->mapping(), &session->truncated);
  } catch (...) {
    session->file->unlink();
    throw;
  }
  session->attached = true;
  session->pid = pid, session->uid = uid;
  Fd locked = session->file->take_locked();
  const Lock lock(mutex_);
  try {
    check_reader(protocol);  // again: a layout may have come meanwhile
  } catch (...) {
    session->file->unlink();
    throw;
  }
  sessions_.add(std::move(session));
  return {id, std::move(locked)};
}

void Store::check_reader(uint32_t protocol, uint32_t user) const {
  const auto refuse = [&](const std::string& who, uint32_t oldest, const std::string& why) {
    throw Error(Code::IncompatibleVersion, "the client speaks version " + std::to_string(protocol) +
                                               " of the session protocol; " + who + std::to_string(oldest) + " to " +
                                               std::to_string(protocol::kVersion) + why);
  };
  if (protocol < protocol::kVersionAsks && is_budgeted(user))
    refuse("another user than the daemon's needs ", protocol::kVersionAsks, ", from which on a client knows what it may hold");
  if (protocol < protocol::kVersionLayouts && LayoutTable::newer(index_.header()))
    refuse("namespace " + options_.name + " has layouts that only versions ", protocol::kVersionLayouts, " can read");
}

void Store::reap_left_sessions() {
  const BuriedSessions::Rites after(buried_);
  const Lock lock(mutex_);
  reap_in_slices();
}

bool Store::resume_session(uint32_t id, const Id& token, uint32_t pid, uint32_t uid, uint32_t protocol) {
  const Entry entry(*this);
  check_reader(protocol);
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return false;
  Session& session = *found->second;
  if (!session.file || session.attached || session.truncated || session.file->token() != token) return false;
  if (session.ended && !std::erase(sessions_.ended, id)) return false;  // its end is under way
  session.attached = session.resumed = true;
  session.since = std::chrono::steady_clock::now();
  if (session.is_left()) left_.drop(session.uid);
  session.ended = false;
  session.pid = pid, session.uid = uid;
  session.protocol = protocol;
  return true;
}

size_t Store::keepable(uint32_t owner, std::vector<Handle>& open) {
  const Entry entry(*this);
  const auto found = sessions_.find(owner);
  const std::vector<uint32_t> none, &unsealed = found == sessions_.end() ? none : found->second->unsealed;
  std::erase_if(open, [&](const Handle& block) {
    if (block.record >= index_.max_blocks()) return true;
    const uint32_t place = index_.upkeep(block.record).link.load(std::memory_order_relaxed);
    if (place >= unsealed.size() || unsealed[place] != block.record) return true;
    const Control now = control(block.record);
    return now.state() != State::Quarantined || block.generation + 1 != now.generation();
  });
  return unsealed.size();
}

// What a resumed session no longer knows of: nobody writes there any more.
void Store::keep_only(uint32_t owner, std::vector<Handle> open) {
  std::sort(open.begin(), open.end(), [](const Handle& a, const Handle& b) { return a.record < b.record; });
  const Entry entry(*this);
  auto found = sessions_.find(owner);
  if (found == sessions_.end()) return;
  Slice slice(kSlice);
  for (uint32_t record : std::vector<uint32_t>(found->second->unsealed)) {
    if (slice.over()) {
      mutex_.give_way(), slice.again();
      if (found = sessions_.find(owner); found == sessions_.end()) return;
    }
    const Control now = control(record);
    if (now.state() != State::Quarantined || index_.upkeep(record).owner.load(std::memory_order_relaxed) != owner) continue;
    const auto at = std::lower_bound(open.begin(), open.end(), record, [](const Handle& a, uint32_t b) { return a.record < b; });
    if (at != open.end() && at->record == record && at->generation + 1 == now.generation()) continue;
    blocks_.quarantined -= 1;
    drop_unsealed(*found->second, record);
    to_zombie(record, Event::Abort);
    counters_.aborts += 1;
  }
  scan_zombies();
}

uint32_t Store::open_owner() {
  const Entry entry(*this);
  const uint32_t id = sessions_.new_id();
  auto session = std::make_unique<Session>();
  session->id = id;
  session->attached = true;
  sessions_.add(std::move(session));
  return id;
}

// A list with its places kept in the records: one block comes and one goes all the time.
void Store::add_unsealed(Session& session, uint32_t record) {
  index_.upkeep(record).link.store(static_cast<uint32_t>(session.unsealed.size()), std::memory_order_relaxed);
  session.unsealed.push_back(record);
}

void Store::drop_unsealed(Session& session, uint32_t record) {
  const uint32_t place = index_.upkeep(record).link.load(std::memory_order_relaxed), last = session.unsealed.back();
  KV_INVARIANT(place < session.unsealed.size() && session.unsealed[place] == record);
  session.unsealed[place] = last;
  index_.upkeep(last).link.store(place, std::memory_order_relaxed);
  session.unsealed.pop_back();
}

// Its writers may still touch the memory they were granted: it is quarantined until the session's lock is free. In slices, from
// the last one on: what leaves the list meanwhile makes place for one that was looked at.
void Store::end_session_locked(Session& session) {
  session.ended = true;
  session.attached = false;
  if (session.is_left()) left_.add(session.uid);
  std::vector<uint32_t> ended;
  const auto wake = [&]() REQUIRES(mutex_) {
    if (!ended.empty() && anybody_waits())
      for (const uint32_t record : ended) futex_wake_all(progress_[record]);
    ended.clear();
  };
  Slice slice(kSlice);
  for (size_t at = session.unsealed.size(); at-- > 0;) {
    if (slice.over()) wake(), mutex_.give_way(), slice.again();
    if (at >= session.unsealed.size()) continue;
    const uint32_t record = session.unsealed[at];
    if (control(record).state() != State::Created) continue;
    if (!session.file) {  // nobody but this process wrote here
      to_zombie(record, Event::Abort);
      continue;
    }
    index_.erase(key_of(record), record);
    transition(record, Event::SessionEnd, State::Quarantined, control(record).flags() & kFlagOnDisk);
    blocks_.created -= 1, blocks_.quarantined += 1;
    publish_progress(record, Phase::Ended);
    ended.push_back(record);
  }
  wake();
  if (session.file) sessions_.ended.push_back(session.id);  // last: from now on it may be reaped
}

void Store::end_truncated_sessions() {
  for (auto at = sessions_.begin(); at != sessions_.end();) {
    const uint32_t id = at->first;
    if (at->second->truncated.load(std::memory_order_acquire) && !at->second->ended) end_session_locked(*at->second);
    at = id == ~0u ? sessions_.end() : sessions_.at_least(id + 1);
  }
}

void Store::end_session(uint32_t id) {
  if (Fetcher* peers = peers_.load(std::memory_order_acquire)) peers->let_go_of_all(id);
  const BuriedSessions::Rites after(buried_);
  const Lock lock(mutex_);
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second->ended) return;
  end_session_locked(*found->second);
  if (!found->second->file) sessions_.erase(id);
  reap_sessions(kReapSlice);
  scan_zombies();
}

void Store::reap_sessions(size_t most) {
  for (size_t look = std::min(most, sessions_.ended.size()); look > 0 && !sessions_.ended.empty(); --look) reap_one();
}

// All of them.
void Store::reap_in_slices() {
  Slice slice(kReapSlice, 1);
  for (size_t left = sessions_.ended.size(); left > 0 && !sessions_.ended.empty();) {
    if (!reap_one()) --left;
    if (slice.over()) mutex_.give_way(), slice.again();
  }
}

// Looks at the one that was not looked at for longest. True: it is gone, and had so much open that some is left to do.
bool Store::reap_one() {
  const uint32_t id = sessions_.ended.front();
  Session& session = *sessions_.at(id);
  if (!session.file->lock_free() || process_lives(session.device)) {
    std::rotate(sessions_.ended.begin(), sessions_.ended.begin() + 1, sessions_.ended.end());
    return false;
  }
  for (size_t step = 0; !session.unsealed.empty(); ++step) {
    if (step == kSlice / kReapSlice) return true;
    const uint32_t record = session.unsealed.back();
    session.unsealed.pop_back();
    if (control(record).state() != State::Quarantined) continue;
    blocks_.quarantined -= 1;
    to_zombie(record, Event::SessionLockFree);
  }
  sessions_.ended.erase(sessions_.ended.begin());
  counters_.hits += credible(session, session.file->page().hits);
  counters_.misses += credible(session, session.file->page().misses);
  if (session.is_left()) left_.drop(session.uid);
  // Its count goes with it and must not be missed; how many pins it still had nobody knows: enough to be worth a scan.
  pins_.gone += session.file->page().released.load(std::memory_order_relaxed) + pins_.last_scan + 1;
  buried_.add(sessions_.take(id));
  return false;
}

Store::Session& Store::session_of(uint32_t id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second->ended) throw Error(Code::FailedPrecondition, "no such session");
  return *found->second;
}

Mapping Store::session_page_head(uint32_t id) {
  const Lock lock(mutex_);
  return session_of(id).file->head_again();
}

uint64_t Store::session_page_bytes(uint32_t id) {
  const Lock lock(mutex_);
  const auto found = sessions_.find(id);
  return found == sessions_.end() || !found->second->file ? 0 : found->second->file->bytes();
}

std::vector<SessionInfo> Store::sessions() {
  const Lock lock(mutex_);
  std::map<uint32_t, PinsNamed> held = held_by_each();
  std::vector<SessionInfo> out;
  for (auto& [id, s] : sessions_) {
    if (!s->file) continue;
    const PinsNamed& by = held[id];
    const std::chrono::duration<double> attached = std::chrono::steady_clock::now() - s->since;
    out.push_back({id, s->pid, s->uid, by.words, by.bytes, s->unsealed.size(), attached.count(), s->attached, s->resumed,
                   s->device != 0, s->terms});
  }
  return out;
}

}  // namespace kv
