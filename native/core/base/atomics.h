// The fences of the pin protocol, and what stands for them under ThreadSanitizer, which does not model fences.
#pragma once

#include <atomic>
#include <cstdint>

namespace kv {

#ifdef KV_TSAN
inline std::atomic<uint64_t> tsan_fence{0};
inline void fence_full() { tsan_fence.fetch_add(1, std::memory_order_seq_cst); }
inline void fence_acquire() { tsan_fence.fetch_add(0, std::memory_order_acq_rel); }
inline void fence_release() { tsan_fence.fetch_add(0, std::memory_order_acq_rel); }
#else
inline void fence_full() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void fence_acquire() { std::atomic_thread_fence(std::memory_order_acquire); }
inline void fence_release() { std::atomic_thread_fence(std::memory_order_release); }
#endif

}  // namespace kv
