#include "capi/session.h"

namespace kv::capi {

void Session::reattach() {
  std::lock_guard lock(mutex_);
  if (!client_.attached()) client_.reattach();
}

void Session::forget_ids() {
  std::lock_guard lock(mutex_);
  of_attachment_ = 0;
}

// All of them, before one is used: a daemon that started empty numbers layouts anew.
void Session::renew_ids() {
  const uint64_t now = client_.attachment()->number();
  if (now == of_attachment_) return;
  std::map<uint32_t, Known> renewed;
  for (const auto& [told, layout] : known_) renewed[told] = {layout.blob, client_.register_layout(layout.blob)};
  if (client_.attachment()->number() != now) throw Error(Code::Detached, "attached anew while layouts were registered");
  know(std::move(renewed));
  of_attachment_ = now;
}

void Session::know(std::map<uint32_t, Known> now) {
  const std::lock_guard lock(known_mutex_);
  known_ = std::move(now);
}

// The pool's id, unless that was told for another layout of an earlier pool.
uint32_t Session::register_layout(std::vector<uint8_t> blob) {
  std::lock_guard lock(mutex_);
  return call([&](Client& client) {
    renew_ids();
    for (const auto& [told, layout] : known_)
      if (layout.blob == blob) return told;
    const uint32_t here = client.register_layout(blob);
    const uint32_t told = known_.contains(here) ? known_.rbegin()->first + 1 : here;
    std::map<uint32_t, Known> more = known_;
    more[told] = {blob, here};
    know(std::move(more));
    return told;
  });
}

std::pair<uint32_t, uint64_t> Session::layout_here(uint32_t told) {
  std::lock_guard lock(mutex_);
  renew_ids();
  const auto found = known_.find(told);
  return {found == known_.end() ? told : found->second.here, of_attachment_};
}

Layout Session::layout(uint32_t told) {
  const std::lock_guard lock(known_mutex_);
  const auto found = known_.find(told);
  if (found == known_.end())
    throw Error(Code::InvalidArgument, "layout " + std::to_string(told) + " was not registered by this client");
  return Layout::parse(found->second.blob);
}

void Session::after_fork() {
  std::construct_at(&mutex_), std::construct_at(&known_mutex_);
  client_.renew_lock();
}

}  // namespace kv::capi
