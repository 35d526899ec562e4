// Raises the classes of kvclient/errors.py from native code, by name.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace kv {

// Throws the Python exception kvclient.errors.<class_name>(message). Requires the GIL.
[[noreturn]] void raise(const char* class_name, const std::string& message);

// Raises InvalidArgument with the value and its bounds. Integers come signed from Python, so that -1 has a text too.
void check_range(const char* name, long long value, long long low, long long high);

// Of an object's class, for what a message says.
inline std::string class_of(nanobind::handle object) { return Py_TYPE(object.ptr())->tp_name; }

}  // namespace kv
