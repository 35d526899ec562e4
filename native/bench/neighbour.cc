// neighbour: what a put takes in one namespace while another is under load, beside the same put while it is not, and while two
// threads that know nothing of any store take as much of the processor. `python -m bench.crowd` runs it.
//
// Two namespaces behind one session socket. In the first 100 sessions of another user have their pages full of pins, every block
// is pinned by the owner, and a client asks for creates without a pause, each refused. In the second a client puts blocks of
// 4 KiB. By the clock, in turns: alone, beside the crowd (two threads: who asks, and who serves), beside two threads that only
// count. On two cores the last is what sharing the processor costs, whatever shares it. A line of JSON for each, p50 and worst in
// µs.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "core/base/polling.h"
#include "core/client/client.h"
#include "core/session/session_server.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kBlocks = 16384;
constexpr int kTurns = 20, kPuts = 200;
enum Beside { kNothing, kCrowd, kCounting, kBesides };

std::unique_ptr<Client> client(const std::string& path, const char* name) {
  return std::make_unique<Client>(AttachOptions{.socket_path = path, .name = name, .max_pins = 64}, Client::Door::SharedMemory);
}

// False if it was refused.
bool put(Client& by, uint64_t number) {
  const Key wanted = key(number);
  const uint32_t tokens = 1;
  const auto grants = by.create({.keys = {&wanted, 1}, .token_counts = std::vector<uint32_t>{tokens}, .layout = 0});
  const size_t all[] = {0};
  if (!grants->item(0).open) return false;
  grants->bytes(0), grants->seal(all);
  return true;
}

void print(const char* name, std::vector<double> times) {
  std::sort(times.begin(), times.end());
  double sum = 0;
  for (const double time : times) sum += time;
  std::printf("{\"case\": \"%s\", \"pins\": 0, \"p50_us\": %.2f, \"mean_us\": %.2f, \"worst_us\": %.1f, \"refused\": 0}\n", name,
              times[times.size() / 2], sum / static_cast<double>(times.size()), times.back());
}

// Every block, by the owner; and all words of 100 pages of another user's, whatever it was allowed.
std::vector<std::unique_ptr<Page>> crowd(Rig& rig) {
  std::vector<uint64_t> words;
  std::vector<std::unique_ptr<Page>> pages;
  pages.push_back(std::make_unique<Page>(*rig.store, kMaxPins));
  for (uint64_t i = 0; rig.put(i, 2) == Grant::Granted && rig.store->stats().evictions == 0; ++i) {
    const Handle at = rig.handle(i);
    pages[0]->pin(at), words.push_back(pin_word(at.record, at.generation));
  }
  for (int stranger = 0; stranger < 100; ++stranger) {
    pages.push_back(std::make_unique<Page>(*rig.store, kMaxPins, ::geteuid() + 1, true));
    const Mapping& page = StoreTest::page(*rig.store, pages.back()->id);
    auto* pins = page.at<std::atomic<uint64_t>>(kPinsOffset);
    const uint64_t room = (rig.store->session_page_bytes(pages.back()->id) - kPinsOffset) / 8;
    for (uint64_t i = 0; i < room; ++i) pins[i].store(words[i % words.size()]);
    page.at<SessionPage>(0)->pins_high.store(~0ull), page.at<SessionPage>(0)->allowance.store(~0ull);
  }
  return pages;
}

}  // namespace

int main() {
  Rig loaded(kBlocks * 2 * kPageBytes, kBlocks * 2, false, 1024, "loaded"), quiet(64 << 20, 4096, false, 1024, "quiet");
  const std::string path = loaded.segments.directory + "/socket";
  SessionServer server({path, 256, kMaxPins, {}}, {loaded.store.get(), quiet.store.get()});
  server.start();
  const auto pages = crowd(loaded);
  const auto asking = client(path, "loaded"), putting = client(path, "quiet");
  std::atomic<int> beside{kNothing};
  std::atomic<bool> over{false};
  std::atomic<uint64_t> asked{0}, counted{0};
  const auto while_it_is = [&](Beside turn, const auto& step) {
    while (!over.load()) beside.load() == turn ? step() : void(::usleep(100));
  };
  std::thread crowding(
      [&, next = uint64_t{1} << 20]() mutable { while_it_is(kCrowd, [&] { put(*asking, next++), asked.fetch_add(1); }); });
  const auto count = [&] { while_it_is(kCounting, [&] { counted.fetch_add(1); }); };
  std::thread counting(count), counting_too(count);
  std::vector<double> times[kBesides];
  uint64_t number = 0;
  for (int turn = 0; turn < kBesides * kTurns; ++turn) {
    const int now = turn % kBesides;
    const uint64_t asked_before = asked.load(), counted_before = counted.load();
    beside.store(now);
    while (now == kCrowd && asked.load() < asked_before + 2) ::sched_yield();
    while (now == kCounting && counted.load() < counted_before + 2) ::sched_yield();
    for (int i = 0; i < kPuts; ++i) {
      const uint64_t begin = monotonic_ns();
      KV_INVARIANT(put(*putting, number++));
      times[now].push_back(static_cast<double>(monotonic_ns() - begin) * 1e-3);
    }
  }
  over.store(true);
  crowding.join(), counting.join(), counting_too.join();
  print("alone", times[kNothing]), print("neighbour", times[kCrowd]), print("counting", times[kCounting]);
  return 0;
}
