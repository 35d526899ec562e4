// What stands behind the handles of kvstored.h, and how a C++ error becomes a status and a text.
#pragma once

#include <cmath>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "capi/session.h"
#include "kvstored/kvstored.h"

struct kvs_client {
  explicit kvs_client(kv::AttachOptions options) : session(std::move(options)) {}
  kv::capi::Session session;
};

struct kvs_blocks {
  std::shared_ptr<kv::BlockBatch> batch;
};

struct kvs_writer {
  std::shared_ptr<kv::BlockWriter> grants;
};

namespace kv::capi {

kvs_status failed(const char* function, const std::exception& error);  // keeps the text
void forget_error();
// Why items of this thread's last call about a region were refused, by the region's number: empty texts, to be filled.
std::vector<std::string>& begin_refusals(uint64_t region, size_t count);
const char* refusal_text(uint64_t region, size_t i);  // "" of another region, too

[[noreturn]] inline void refuse(const std::string& text) { throw Error(Code::InvalidArgument, text); }

inline void need(const void* pointer, const char* name) {
  if (!pointer) refuse(std::string(name) + " is NULL");
}

// Runs it; nothing is thrown into C.
template <typename Body>
kvs_status guarded(const char* function, Body&& body) noexcept {
  forget_error();
  try {
    body();
    return KVS_OK;
  } catch (const std::exception& error) {
    return failed(function, error);
  }
}

inline timespec deadline_of(double timeout_s) {
  if (std::isnan(timeout_s)) refuse("timeout_s is nan");
  return deadline_in(timeout_s);
}

constexpr size_t kMaxKeys = size_t{1} << 24;  // of one call

inline std::span<const Key> keys_of(const kvs_key* keys, size_t count) {
  static_assert(sizeof(Key) == sizeof(kvs_key));
  if (count) need(keys, "keys");
  if (count > kMaxKeys) refuse(std::to_string(count) + " keys; a call takes at most " + std::to_string(kMaxKeys));
  return {reinterpret_cast<const Key*>(keys), count};
}

}  // namespace kv::capi
