// Sessions that nobody maps any more, out of the table already. Their files, descriptors and mappings go by system calls, which
// no one who waits for the store's lock waits for: whoever took them out lets go of the lock first. Thread-safe by itself.
//
// A daemon that dies in between leaves a file whose lock is free: the next one finds nobody there.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/store/session_table.h"

namespace kv {

class BuriedSessions {
 public:
  void add(std::unique_ptr<SessionState> session) {
    std::lock_guard lock(mutex_);
    sessions_.push_back(std::move(session));
  }
  // Made before the lock is taken: what is there once it has been let go of goes.
  class Rites {
   public:
    explicit Rites(BuriedSessions& of) : of_(of) {}
    ~Rites() { of_.go(); }
    Rites(const Rites&) = delete;

   private:
    BuriedSessions& of_;
  };

 private:
  void go() {
    std::vector<std::unique_ptr<SessionState>> gone;
    {
      std::lock_guard lock(mutex_);
      gone.swap(sessions_);
    }
    for (auto& session : gone) session->file->unlink();
  }
  std::mutex mutex_;
  std::vector<std::unique_ptr<SessionState>> sessions_;
};

}  // namespace kv
