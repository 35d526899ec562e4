#include "tests/emulation/cuda/lanes.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

namespace kvk::emulation {
namespace {

constexpr size_t kStack = 128 << 10;
constexpr uint32_t kLanes = 32;

struct Copy {
  void* to;
  const void* from;
  uint32_t bytes, there;
};

enum class State { kReady, kInWarp, kInBlock, kDone };

struct Fiber {
  std::unique_ptr<char[]> stack;
  ucontext_t start;
  jmp_buf at;
  bool begun = false;
  State state = State::kReady;
  void* record = nullptr;
  void (*work)(void* const*) = nullptr;
  std::vector<Copy> gathered;
  std::deque<std::vector<Copy>> groups;
};

[[noreturn]] void stop(const char* why) {
  std::fprintf(stderr, "emulated kernel: %s\n", why);
  std::abort();
}

struct Block {
  std::vector<Fiber*> fibers;
  std::vector<uint64_t> shared;
  Place place{};
  jmp_buf scheduler;
  void (*body)(const void*) = nullptr;
  const void* context = nullptr;
  uint32_t order = 1;
};

Block* block = nullptr;

Fiber& self() { return *block->fibers[block->place.thread]; }

// A fiber goes from block to block and from launch to launch: a new stack is 128 KiB of page faults.
void enter() {
  for (;;) {
    block->body(block->context);
    Fiber& fiber = self();
    if (!fiber.gathered.empty() || !fiber.groups.empty()) stop("a thread ended with copies under way");
    fiber.state = State::kDone;
    if (_setjmp(fiber.at) == 0) _longjmp(block->scheduler, 1);
  }
}

// The first `threads` fibers of this process, which keep their stacks.
std::vector<Fiber*> fibers(uint32_t threads) {
  static auto* kept = new std::deque<Fiber>;  // never destroyed: nobody knows what runs when the process ends
  std::vector<Fiber*> all;
  for (uint32_t thread = 0; thread < threads; ++thread) {
    if (thread == kept->size()) kept->emplace_back().stack.reset(new char[kStack]);
    all.push_back(&(*kept)[thread]);
  }
  return all;
}

void leave(State state) {
  Fiber& fiber = self();
  fiber.state = state;
  if (_setjmp(fiber.at) == 0) _longjmp(block->scheduler, 1);
}

void resume(uint32_t thread) {
  block->place.thread = thread;
  if (_setjmp(block->scheduler) != 0) return;
  Fiber& fiber = self();
  if (fiber.begun) _longjmp(fiber.at, 1);
  fiber.begun = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = kStack;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, enter, 0);
  setcontext(&fiber.start);
}

// Lets a warp or the block go on where all of its threads wait.
void release() {
  const uint32_t threads = block->place.threads;
  for (uint32_t first = 0; first < threads; first += kLanes) {
    void* records[kLanes];
    uint32_t waiting = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const Fiber& fiber = *block->fibers[first + lane];
      if (fiber.state != State::kInWarp) continue;
      records[lane] = fiber.record;
      ++waiting;
    }
    if (waiting != kLanes) continue;
    for (uint32_t lane = 1; lane < kLanes; ++lane)
      if (block->fibers[first + lane]->work != block->fibers[first]->work) stop("lanes of a warp meet for different things");
    block->fibers[first]->work(records);
    for (uint32_t lane = 0; lane < kLanes; ++lane) block->fibers[first + lane]->state = State::kReady;
  }
  uint32_t waiting = 0;
  for (const Fiber* fiber : block->fibers) waiting += fiber->state == State::kInBlock;
  if (waiting == threads)
    for (Fiber* fiber : block->fibers) fiber->state = State::kReady;
}

void run_block() {
  const uint32_t threads = block->place.threads;
  for (Fiber* fiber : block->fibers) fiber->state = State::kReady;
  for (;;) {
    block->order = block->order * 1664525 + 1013904223;
    const uint32_t first = block->order >> 8, step = block->order >> 4 & 1 ? 1 : threads - 1;
    uint32_t ran = 0, done = 0;
    for (uint32_t i = 0; i < threads; ++i) {
      const uint32_t thread = (first % threads + i * step) % threads;
      if (block->fibers[thread]->state == State::kReady) resume(thread), ++ran;
      done += block->fibers[thread]->state == State::kDone;
    }
    if (done == threads) return;
    if (ran == 0) stop("threads wait for each other and none comes");
    release();
  }
}

}  // namespace

const Place& here() { return block->place; }
uint8_t* shared() {
  return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(block->shared.data()) + 127) & ~uintptr_t{127});
}

void sync_block() { leave(State::kInBlock); }

void meet(void* record, void (*work)(void* const* records)) {
  self().record = record;
  self().work = work;
  leave(State::kInWarp);
}

void copy_async(void* to, const void* from, uint32_t bytes, uint32_t there) {
  std::memset(to, 0xff, bytes);
  self().gathered.push_back({to, from, bytes, there});
}

void commit() {
  self().groups.push_back(std::move(self().gathered));
  self().gathered.clear();
}

void wait(uint32_t groups) {
  Fiber& fiber = self();
  while (fiber.groups.size() > groups) {
    for (const Copy& copy : fiber.groups.front()) {
      std::memset(copy.to, 0, copy.bytes);
      if (copy.there != 0) std::memcpy(copy.to, copy.from, copy.there);
    }
    fiber.groups.pop_front();
  }
}

void run(uint32_t blocks, uint32_t threads, size_t shared_bytes, void (*body)(const void*), const void* context) {
  if (threads == 0 || threads % kLanes != 0) stop("a block must be whole warps");
  Block started;
  started.fibers = fibers(threads);
  started.body = body, started.context = context;
  block = &started;
  for (uint32_t i = 0; i < blocks; ++i) {
    started.place = {0, threads, i, blocks};
    started.shared.assign(shared_bytes / 8 + 33, ~uint64_t{0});
    run_block();
  }
  block = nullptr;
}

}  // namespace kvk::emulation
