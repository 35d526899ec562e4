// kvclient._core: the native half of the client library.
#include <nanobind/nanobind.h>

#include <functional>

#include "bindings/client/store.h"

void bind_keys(nanobind::module_& m);  // keys.cc

NB_MODULE(_core, m) {
  nanobind::set_leak_warnings(false);  // objects alive at exit are the user's business
  m.doc() = "The native half of kvclient: chains, checksums, copies and the client of the store.";
  bind_keys(m);
  kv::bind_memory(m);
  kv::bind_blocks(m);
  kv::bind_writer(m);
  kv::bind_client(m);
  kv::bind_region(m);
  kv::bind_search(m);
  kv::bind_stretches(m);
}
