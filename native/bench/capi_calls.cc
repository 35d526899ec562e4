// What a call of the C library costs: capi_calls DIRECTORY, of a running daemon. Nanoseconds of processor time, the best and the
// middle of many rounds, so that a busy machine shows in the distance between the two.
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <random>
#include <vector>

#include "kvstored/kvstored.hpp"

namespace {

constexpr std::size_t kKeys = 64;
constexpr int kRounds = 200, kCalls = 500;

double now_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return 1e9 * static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec);
}

template <typename Call>
void measure(const char* name, Call&& call) {
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    const double start = now_ns();
    for (int i = 0; i < kCalls; ++i) call();
    rounds.push_back((now_ns() - start) / kCalls);
  }
  std::sort(rounds.begin(), rounds.end());
  std::printf("%-28s best %7.0f ns, median %7.0f ns\n", name, rounds.front(), rounds[rounds.size() / 2]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  auto client = kvstored::Client::connect({.directory = argv[1]}).value();
  const std::uint32_t layout = client.register_layout({4, 2, 2, 8, KVS_FLOAT16, 16, 0, 0, nullptr}).value();
  std::vector<kvstored::Key> keys(kKeys);
  std::mt19937_64 random(1);  // as digests are: the table takes a key's own bits
  for (kvstored::Key& key : keys)
    for (std::uint64_t& word : key.words) word = random();
  {
    auto writer = client.create(keys, layout).value();
    writer.seal(KVS_ALL, true).value();
  }
  std::array<std::uint8_t, kKeys> states;
  measure("kvs_lookup of 64", [&] { kvs_lookup(client.get(), keys.data(), kKeys, states.data()); });
  measure("kvs_get and free of 1", [&] {
    kvs_blocks* blocks = nullptr;
    kvs_get(client.get(), keys.data(), 1, 0, 0, &blocks);
    kvs_blocks_free(blocks);
  });
  measure("the same with its layer", [&] {
    kvs_blocks* blocks = nullptr;
    kvs_const_span bytes;
    kvs_get(client.get(), keys.data(), 1, 0, 0, &blocks);
    kvs_blocks_layer(blocks, 0, 3, &bytes);
    kvs_blocks_free(blocks);
  });
}
