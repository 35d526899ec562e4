#include "core/tls/openssl.h"

#include <dlfcn.h>

#include "core/base/error.h"

namespace kv::peer {
namespace {

constexpr const char* kLibrary = "libssl.so.3";  // whose functions keep their types through all of OpenSSL 3

OpenSsl load() {
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw Error(Code::Unavailable,
                std::string("TLS needs OpenSSL 3, which is not on this host (Debian: libssl3): ") + ::dlerror());
  OpenSsl found;
#define X(name, result, arguments)                          \
  if (void* at = ::dlsym(library, #name))                   \
    found.name = reinterpret_cast<result(*) arguments>(at); \
  else                                                      \
    throw Error(Code::Unavailable, std::string(kLibrary) + " has no " #name);
  KV_OPENSSL(X)
#undef X
  return found;
}

}  // namespace

const OpenSsl& openssl() {
  static const OpenSsl loaded = load();  // again at the next call if it throws
  return loaded;
}

}  // namespace kv::peer
