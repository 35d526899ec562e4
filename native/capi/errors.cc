// Errors in C: a status, and a text of the thread that called; and why a region refused items of that thread's last call.
#include <cstdio>
#include <cstring>

#include "capi/objects.h"

namespace kv::capi {
namespace {

thread_local char last_error[512] = "";

struct Refusals {
  uint64_t region = 0;
  std::vector<std::string> texts = {};
};
thread_local Refusals refusals;

kvs_status status_of(Code code) {
  switch (code) {
    case Code::InvalidArgument:
    case Code::LayoutLost:
    case Code::FailedPrecondition: return KVS_INVALID_ARGUMENT;
    case Code::NoSpace: return KVS_NO_SPACE;
    case Code::NotPermitted:
    case Code::NotFound: return KVS_NOT_PERMITTED;  // a namespace that is not there and one that is not ours look alike
    case Code::PinsExhausted: return KVS_PINS_EXHAUSTED;
    case Code::DeadlineExceeded: return KVS_DEADLINE_EXCEEDED;
    case Code::BlockLost: return KVS_BLOCK_LOST;
    case Code::Closed: return KVS_CLOSED;
    case Code::IncompatibleVersion: return KVS_INCOMPATIBLE_VERSION;
    case Code::Integrity: return KVS_INTERNAL;
    case Code::Detached:
    case Code::Fenced:
    case Code::Unavailable: break;
  }
  return KVS_UNAVAILABLE;
}

}  // namespace

void forget_error() { last_error[0] = 0; }

kvs_status failed(const char* function, const std::exception& error) {
  std::snprintf(last_error, sizeof last_error, "%s: %s", function, error.what());
  const auto* ours = dynamic_cast<const Error*>(&error);
  return ours ? status_of(ours->code) : KVS_INTERNAL;
}

std::vector<std::string>& begin_refusals(uint64_t region, size_t count) {
  refusals.region = region;
  refusals.texts.assign(count, "");
  return refusals.texts;
}

const char* refusal_text(uint64_t region, size_t i) {
  return refusals.region == region && i < refusals.texts.size() ? refusals.texts[i].c_str() : "";
}

}  // namespace kv::capi

extern "C" {

uint32_t kvs_api_version(void) { return KVS_API_VERSION; }

const char* kvs_last_error(void) { return kv::capi::last_error; }

const char* kvs_status_name(kvs_status status) {
  switch (status) {
    case KVS_OK: return "OK";
    case KVS_INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case KVS_NO_SPACE: return "NO_SPACE";
    case KVS_NOT_PERMITTED: return "NOT_PERMITTED";
    case KVS_PINS_EXHAUSTED: return "PINS_EXHAUSTED";
    case KVS_DEADLINE_EXCEEDED: return "DEADLINE_EXCEEDED";
    case KVS_BLOCK_LOST: return "BLOCK_LOST";
    case KVS_CLOSED: return "CLOSED";
    case KVS_INCOMPATIBLE_VERSION: return "INCOMPATIBLE_VERSION";
    case KVS_UNAVAILABLE: return "UNAVAILABLE";
    case KVS_INTERNAL: return "INTERNAL";
  }
  return "UNKNOWN";
}

}  // extern "C"
