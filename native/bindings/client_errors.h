// Raises the classes of kvclient/errors.py from native code, by name.
#pragma once

#include <string>

namespace kv {

// Throws the Python exception kvclient.errors.<class_name>(message). Requires the GIL.
[[noreturn]] void raise(const char* class_name, const std::string& message);

}  // namespace kv
