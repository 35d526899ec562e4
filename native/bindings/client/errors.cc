// The module is imported at the first error: kvclient.errors needs nothing native, so there is no import cycle.
#include "bindings/client/errors.h"

#include <nanobind/nanobind.h>

namespace kv {

void raise(const char* class_name, const std::string& message) {
  nanobind::object type = nanobind::module_::import_("kvclient.errors").attr(class_name);
  PyErr_SetString(type.ptr(), message.c_str());
  throw nanobind::python_error();
}

void check_range(const char* name, long long value, long long low, long long high) {
  if (value < low || value > high)
    raise("InvalidArgument", std::string(name) + " is " + std::to_string(value) + "; allowed are " + std::to_string(low) +
                                 " to " + std::to_string(high));
}

}  // namespace kv
