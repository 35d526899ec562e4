// Raises the classes of kvstored/errors.py from native code, by name.
#pragma once

#include "core/base/error.h"

// Makes every kv::Error that leaves a bound function the class of its code.
void translate_errors();
