// What a thread of ours says of itself when it begins: its name, as `top -H` and a debugger show it.
#pragma once

#include <pthread.h>

namespace kv {

// At most 15 bytes.
inline void name_thread(const char* name) { ::pthread_setname_np(::pthread_self(), name); }

}  // namespace kv
