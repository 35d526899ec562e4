// A block of CUDA threads on the CPU, so that kernels run without a GPU: what cuda/device.h stands for when g++ compiles it.
//
// Every thread is a fiber of its own; one runs until it meets others. A warp's collective (shuffle, mma, ldmatrix) waits for
// all 32 lanes, computes once over what they brought, and goes on; lanes that bring different collectives stop the program.
// Asynchronous copies land when their thread waits for them, never before, and what they will overwrite is made NaN at once:
// a read too early shows. The order of threads changes from meeting to meeting: so does a missing barrier.
// Never faster than it must be; one kernel at a time in a process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvk::emulation {

struct Place {
  uint32_t thread, threads, block, blocks;
};

const Place& here();
uint8_t* shared();

void sync_block();
// Waits until all 32 lanes brought a record of theirs and `work`, which then sees all records in the order of lanes.
void meet(void* record, void (*work)(void* const* records));

void copy_async(void* to, const void* from, uint32_t bytes, uint32_t there);  // what is not there becomes 0
void commit();
void wait(uint32_t groups);  // until no more than so many of this thread's groups are under way

// Runs body(context) on every thread of every block. `shared_bytes` are NaN at the start of each block.
void run(uint32_t blocks, uint32_t threads, size_t shared_bytes, void (*body)(const void*), const void* context);

}  // namespace kvk::emulation
