// kvclient._core: the native half of the client library.
#include <nanobind/nanobind.h>

void bind_keys(nanobind::module_& m);  // client_keys.cc

NB_MODULE(_core, m) {
  m.doc() = "The native half of kvclient: chains, checksums, copies and the client of the store.";
  bind_keys(m);
}
