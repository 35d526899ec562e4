// The CPU's kernels in children, in threads of children and among signals: the same bits as before the fork, while processes that
// all hold AMX's tile registers take turns on the cores; and no tile register stays configured behind a call. Of the best path
// that this CPU has, so the name of a failure says little where there is no AMX.
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <random>

#include "kernels.h"
#include "tests/check.h"

namespace {

// fp32 weights that are rounded to bf16: 45 rows are laid out one way, seven another, by the tiles' thresholds.
struct Product {
  std::vector<float> w, out;
  std::vector<uint16_t> x;
  kvk_linear args{};

  explicit Product(uint32_t rows) : w(200 * 576), out(rows * 200), x(rows * 576) {
    std::mt19937 source(rows);
    for (float& value : w) value = std::normal_distribution<float>()(source);
    for (uint16_t& value : x) value = static_cast<uint16_t>(0x3f00 + source() % 256);
    args.size = sizeof args, args.abi = KVK_ABI, args.inputs = 576, args.outputs = 200, args.rows = rows;
    args.dtype = KVK_ROUNDED, args.x = x.data(), args.w = w.data(), args.out = out.data();
    args.x_row_stride = 576, args.out_row_stride = 200;
  }
  bool says(const std::vector<float>& wanted, uint32_t threads) {
    out.assign(out.size(), 0);
    args.threads = threads;
    return kvk_linear_multiply(&args) == KVK_OK && out == wanted;
  }
  std::vector<float> once() {
    args.threads = 1;
    CHECK_EQ(kvk_linear_multiply(&args), KVK_OK);
    return out;
  }
};

bool again_and_again(Product& many, Product& few, const std::vector<float>& wanted_many, const std::vector<float>& wanted_few,
                     int times) {
  for (int i = 0; i < times; ++i)
    if (!many.says(wanted_many, 1 + i % 3) || !few.says(wanted_few, 1 + i % 2)) return false;
  return true;
}

volatile sig_atomic_t rung = 0;
volatile float rung_sum = 0;
void ring(int) {
  rung = rung + 1;
  for (int i = 1; i < 50; ++i) rung_sum = rung_sum + 1.0f / static_cast<float>(i);
}

// Which states the processor holds in this thread, tile registers among them: XGETBV with 1, where there is such a thing.
uint64_t tiles_in_use() {
  if (kvk_cpu_lacks(KVK_CPU_AMX) != nullptr) return 0;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return low & (uint32_t{3} << 17);  // their shapes, their data
}

}  // namespace

TEST(children_and_their_threads_compute_what_their_parent_does) {
  Product many(45), few(7);
  const auto wanted_many = many.once(), wanted_few = few.once();
  CHECK(many.says(wanted_many, 3));  // the parent's threads are there before the fork
  pid_t children[4];
  for (pid_t& child : children) {
    child = fork();
    if (child == 0) _exit(again_and_again(many, few, wanted_many, wanted_few, 150) ? 0 : 1);
    CHECK(child > 0);
  }
  CHECK(again_and_again(many, few, wanted_many, wanted_few, 150));
  for (pid_t child : children) {
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
}

TEST(signals_change_no_bit) {
  Product many(45), few(7);
  const auto wanted_many = many.once(), wanted_few = few.once();
  struct sigaction action{}, before{};
  action.sa_handler = ring, action.sa_flags = SA_RESTART;
  CHECK_EQ(sigaction(SIGALRM, &action, &before), 0);
  const itimerval often{{0, 150}, {0, 150}}, never{};
  CHECK_EQ(setitimer(ITIMER_REAL, &often, nullptr), 0);
  for (int i = 0; i < 20000 && (i < 150 || rung < 50); ++i) CHECK(again_and_again(many, few, wanted_many, wanted_few, 1));
  CHECK_EQ(setitimer(ITIMER_REAL, &never, nullptr), 0);
  CHECK(rung >= 50);
  CHECK_EQ(sigaction(SIGALRM, &before, nullptr), 0);
}

TEST(no_tile_stays_configured_behind_a_call) {
  Product many(45), few(7);
  CHECK_EQ(tiles_in_use(), uint64_t{0});
  many.once();
  CHECK_EQ(tiles_in_use(), uint64_t{0});
  few.once();
  CHECK_EQ(tiles_in_use(), uint64_t{0});
}
