// crowd: what a put costs the store while others hold pins, beside the same put without them. `python -m bench.crowd` runs it.
//
//   crowd BLOCKS
//
// A full pool of BLOCKS blocks of 4 KiB; a put is create and seal of one more and what they leave to do, in processor time of the
// one thread that serves all. Prints a line of JSON for each case: p50 and worst in µs, how many creates were refused.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr int kPuts = 2000;

double cpu_us() {
  timespec now;
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

struct House {
  explicit House(uint64_t count)
      : segments(count * kPageBytes, static_cast<uint32_t>(count + count / 8)), store(segments.open()), blocks(count) {
    layout = store->register_layout(layout_blob(1, 1, 3072));
    owner = store->open_owner();
    KV_INVARIANT(eventually([&] { return store->header().frontier.load() == segments.capacity; }));
    for (next = 0; next < 2 * blocks || store->stats().evictions == 0; ++next) put(next);
  }
  bool put(uint64_t number) {
    const CreateItem item{.key = key(number), .tokens = 3072};
    const Granted granted = store->create({.owner = owner, .layout = layout, .items = {&item, 1}})[0];
    if (granted.status != Grant::Granted) return false;
    const Seal block{granted.handle};
    store->seal(owner, {&block, 1});
    store->settle();
    store->make_room_ahead();
    return true;
  }
  Handle youngest(uint64_t back) {
    const Snapshot at = store->lookup(key(next - 1 - back)).snapshot;
    return {at.record, at.control.generation()};
  }
  void measure(const char* name, uint64_t pins) {
    std::vector<double> times;
    int refused = 0;
    for (int i = 0; i < kPuts; ++i) {
      const double begin = cpu_us();
      const bool there = put(next);
      times.push_back(cpu_us() - begin);
      next += there;
      refused += !there;
    }
    std::sort(times.begin(), times.end());
    double sum = 0;
    for (const double time : times) sum += time;
    std::printf("{\"case\": \"%s\", \"pins\": %lu, \"p50_us\": %.2f, \"mean_us\": %.2f, \"worst_us\": %.1f, \"refused\": %d}\n",
                name, pins, times[times.size() / 2], sum / kPuts, times.back(), refused);
    std::fflush(stdout);
  }
  // As somebody hostile writes them, whatever it was allowed.
  void write(const Page& page, const std::vector<Handle>& handles) {
    const Mapping& memory = StoreTest::page(*store, page.id);
    auto* pins = memory.at<std::atomic<uint64_t>>(kPinsOffset);
    for (uint64_t i = 0; i < store->session_page_bytes(page.id) / 8 - kPinsOffset / 8; ++i)
      pins[i].store(pin_word(handles[i % handles.size()].record, handles[i % handles.size()].generation));
    memory.at<SessionPage>(0)->pins_high.store(~0ull), memory.at<SessionPage>(0)->allowance.store(~0ull);
  }
  // The youngest blocks, `each` by each of so many clients; or by those of another user, in every word of their pages.
  void beside(const char* name, uint32_t clients, uint64_t each, uint32_t hostile_words = 0) {
    std::vector<Handle> handles;
    for (uint64_t back = 0; handles.size() < clients * each && back < next; ++back)
      if (const Handle handle = youngest(back); handle.generation) handles.push_back(handle);
    {
      std::vector<std::unique_ptr<Page>> pages;
      uint64_t pins = 0;
      for (uint32_t c = 0; c < clients; ++c) {
        pages.push_back(std::make_unique<Page>(*store, hostile_words ? hostile_words : static_cast<uint32_t>(each),
                                               ::geteuid() + (hostile_words ? 1 : 0), hostile_words != 0));
        if (hostile_words) {
          store->allow_pins(pages.back()->id, hostile_words, 3), write(*pages.back(), handles), pins += hostile_words;
          continue;
        }
        for (uint64_t i = 0; i < each; ++i)
          pins += pages.back()->pin(handles[(c * each + i) % handles.size()]) != PinBoard::kNoSlot;
      }
      measure(name, pins);
      for (auto& page : pages) page->unmap(), store->end_session(page->id);
    }
    store->tick();
    for (uint64_t i = 0; i < blocks / 4; ++i) put(next++);
  }

  Segments segments;
  std::unique_ptr<Store> store;
  uint64_t blocks, next = 0;
  uint32_t layout = 0, owner = 0;
};

}  // namespace

int main(int argc, char** argv) {
  House house(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 65536);
  house.measure("alone", 0);
  house.beside("clients", 60, 900);
  house.measure("alone", 0);
  house.beside("one", 1, 40'000);
  house.beside("all", 2, house.blocks / 2 + house.blocks / 16);
  house.beside("stranger", 100, house.blocks / 100 + 1, 65536);
  house.measure("alone", 0);
  return 0;
}
