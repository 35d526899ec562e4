#include "core/session/seats.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace kv {
namespace {

bool is_own(uint32_t uid) { return uid == 0 || uid == ::geteuid(); }

// Those whose peers have not hung up and whose processes live.
std::vector<uint32_t> present(const std::list<Seats::Taken>& taken) {
  std::vector<pollfd> asked;
  for (const Seats::Taken& seat : taken) asked.push_back({seat.socket, POLLRDHUP, 0}), asked.push_back({seat.process, POLLIN, 0});
  ::poll(asked.data(), asked.size(), 0);  // that fails: all are there
  std::vector<uint32_t> out;
  size_t at = 0;
  for (const Seats::Taken& seat : taken) {
    if (!(asked[at].revents & (POLLRDHUP | POLLHUP)) && !asked[at + 1].revents) out.push_back(seat.uid);
    at += 2;
  }
  return out;
}

}  // namespace

size_t Seats::most_of(uint32_t uid) const { return is_own(uid) ? most_ : std::max<size_t>(1, most_ / 2); }

// An eighth is the owner's: who may come as one of a group may have many user ids.
bool Seats::room_for(uint32_t uid) {
  const size_t kept = most_ > 1 ? std::max<size_t>(1, most_ / 8) : 0;
  const auto room = [&](const std::vector<uint32_t>& there) {
    if (there.size() >= most_) return false;
    if (is_own(uid)) return true;
    const auto theirs = static_cast<size_t>(std::ranges::count(there, uid));
    const auto others = static_cast<size_t>(std::ranges::count_if(there, [](uint32_t seat_uid) { return !is_own(seat_uid); }));
    return theirs < most_of(uid) && others < most_ - kept;
  };
  std::lock_guard lock(mutex_);
  std::vector<uint32_t> all;
  for (const Taken& seat : taken_) all.push_back(seat.uid);
  return room(all) || room(present(taken_));
}

Seats::Seat Seats::take(Taken taken) {
  std::lock_guard lock(mutex_);
  return {*this, taken_.insert(taken_.end(), taken)};
}

Seats::Seat::~Seat() {
  if (!seats_) return;
  std::lock_guard lock(seats_->mutex_);
  seats_->taken_.erase(at_);
}

}  // namespace kv
