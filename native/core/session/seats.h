// The places of the session socket: how many connections a user has, and how many there are. Thread-safe: the door takes seats,
// the threads of all namespaces give theirs back.
//
// A connection whose peer hung up has no seat any more, also before the thread that serves it has noticed: whoever leaves and
// comes back finds room. Invariant: a seat is given back before its descriptors are closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <utility>

namespace kv {

class Seats {
 public:
  explicit Seats(uint32_t most) : most_(most) {}
  size_t most() const { return most_; }
  size_t most_of(uint32_t uid) const;  // one other user holds half at most: the rest, and the owner, are still served
  bool room_for(uint32_t uid);

  struct Taken {
    uint32_t uid;
    int socket, process;  // -1: none
  };
  class Seat {
   public:
    Seat() = default;
    Seat(Seat&& other) noexcept : seats_(other.seats_), at_(other.at_) { other.seats_ = nullptr; }
    Seat& operator=(Seat&& other) noexcept {
      std::swap(seats_, other.seats_), std::swap(at_, other.at_);
      return *this;
    }
    ~Seat();

   private:
    friend class Seats;
    Seat(Seats& seats, std::list<Taken>::iterator at) : seats_(&seats), at_(at) {}
    Seats* seats_ = nullptr;
    std::list<Taken>::iterator at_;
  };
  Seat take(Taken taken);  // whoever asked room_for() before, and takes no second seat meanwhile

 private:
  const size_t most_;
  std::mutex mutex_;
  std::list<Taken> taken_;
};

}  // namespace kv
