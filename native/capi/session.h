// A client that stays attached: what kvclient.client.client is to Python. Asks again after a daemon's restart, and keeps the
// layout ids it told valid across it. Thread-safe; knows nothing of C.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/base/error.h"
#include "core/client/client.h"

namespace kv::capi {

class Session {
 public:
  explicit Session(AttachOptions options) : client_(std::move(options), Client::Door::SharedMemory) {}

  // ask(client), again after attaching anew where the daemon that was attached to is gone. Throws Unavailable.
  template <typename Ask>
  auto call(Ask&& ask) {
    for (int left = kAttachTries;; --left) {
      bool lost = false;
      try {
        return ask(client_);
      } catch (const Error& error) {
        if (error.code != Code::Detached && error.code != Code::LayoutLost) throw;
        if (left == 0) throw Error(error.code == Code::Detached ? Code::Unavailable : error.code, error.what());
        lost = error.code == Code::LayoutLost;
      }
      lost ? forget_ids() : reattach();
    }
  }

  uint32_t register_layout(std::vector<uint8_t> blob);
  // The id in the pool attached to now, and of which attachment that is. One that was told by another client stands for itself.
  std::pair<uint32_t, uint64_t> layout_here(uint32_t told);
  // As it was registered here. Waits for nothing. Throws InvalidArgument for an id that was not.
  Layout layout(uint32_t told);
  void after_fork();

 private:
  static constexpr int kAttachTries = 3;
  void reattach();
  void forget_ids();  // a layout of ours had no block left, and another has its slot: all are registered again
  struct Known {
    std::vector<uint8_t> blob;
    uint32_t here;  // its id in this attachment's pool
  };
  void renew_ids();  // under mutex_
  void know(std::map<uint32_t, Known> now);

  Client client_;
  std::recursive_mutex mutex_;
  uint64_t of_attachment_ = 0;       // whose ids `here` are; none is number 0
  std::map<uint32_t, Known> known_;  // by the id told; changed under both
  std::mutex known_mutex_;           // nobody is asked under it
};

}  // namespace kv::capi
