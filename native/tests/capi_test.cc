// Goal: the C library may be called from many threads on one client, as kvstored.h says: nobody sees another block's bytes, a
// region loses no slot, every thread has its own error text, and what is freed half done is given back.
//
// Method: a daemon's socket in this process, clients of libkvstored_client.so on it; every byte of a block is a function of its
// key. `make asan-capi` runs it under ASan, UBSan and TSan.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "kvstored/kvstored.hpp"
#include "tests/check.h"
#include "tests/session_fixture.h"

using namespace kv::test;

namespace {

constexpr std::uint32_t kLayers = 3, kTokens = 8;
constexpr std::uint64_t kLayerBytes = 2 * 2 * 64 * kTokens * 2;  // K and V, 2 heads of 64, 16 bits each
#ifdef KV_TSAN
constexpr int kRounds = 150;
#else
constexpr int kRounds = 600;
#endif

// The socket is where kvs_connect looks for it.
struct Served {
  Served() : daemon(64 * kMiB, 1024) {
    directory = std::filesystem::path(daemon.path).parent_path().string();
    std::filesystem::create_symlink(daemon.path, directory + "/kvstored.sock");
  }
  kvstored::Client client() {
    return kvstored::Client::connect({.directory = directory, .namespace_name = "test", .max_pins = 512}).value();
  }
  Daemon daemon;
  std::string directory;
};

std::uint32_t layout_of(kvstored::Client& client) {
  return client.register_layout({kLayers, 2, 2, 64, KVS_FLOAT16, kTokens, 0, 0, nullptr}).value();
}

kvstored::Key key_of(std::uint64_t number) {
  const kv::Key made = key(number);
  kvstored::Key out;
  static_assert(sizeof made == sizeof out);
  std::memcpy(&out, &made, sizeof out);
  return out;
}

std::byte stamp(std::uint64_t number, std::uint32_t layer) { return static_cast<std::byte>(1 + (number * 7 + layer) % 250); }

bool right(kvstored::Bytes bytes, std::uint64_t number, std::uint32_t layer) {
  return bytes.size() == kLayerBytes && std::ranges::all_of(bytes, [&](std::byte b) { return b == stamp(number, layer); });
}

// Does what is there under this number have its bytes? False: it is a miss.
bool read(kvstored::Client& client, std::uint64_t number) {
  const kvstored::Key name[] = {key_of(number)};
  const auto blocks = client.get(name, {.verify = true});
  if (!CHECK(blocks.has_value()) || !blocks->hit(0)) return false;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) CHECK(right(blocks->layer(0, layer).value(), number, layer));
  return true;
}

void write(kvstored::Client& client, std::uint32_t layout, std::uint64_t number, bool finish) {
  const kvstored::Key name[] = {key_of(number)};
  auto writer = client.create(name, layout);
  if (!CHECK(writer.has_value()) || !writer->granted(0)) return;
  std::vector<std::byte> bytes(kLayerBytes);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    std::ranges::fill(bytes, stamp(number, layer));
    CHECK(writer->copy_layer(0, layer, bytes).has_value());
    CHECK(writer->mark_layer(0, layer).has_value());
  }
  if (finish) CHECK(writer->seal().has_value());
}  // and what is not sealed is given up

void fill_slot(kvstored::Client& client, kvstored::Region& region, std::uint32_t layout, std::uint64_t at, std::uint64_t number) {
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const kvstored::Buffer place = client.block_layer(layout, layer).value();
    std::ranges::fill(region.memory().subspan(at + place.offset, place.length), stamp(number, layer));
  }
}

// Two threads of one client share a region: each has slots of its own, seals them where they lie and takes them back.
void own_slots(kvstored::Client& client, kvstored::Region& region, std::uint32_t layout, std::uint64_t first,
               std::uint64_t base) {
  const std::uint64_t slot = client.block_bytes(layout).value();
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t number = base + static_cast<std::uint64_t>(round % 5),
                        at = first + slot * static_cast<std::uint64_t>(round % 4);
    const kvstored::Key name[] = {key_of(number)};
    fill_slot(client, region, layout, at, number);
    const std::uint64_t offsets[] = {at};
    const auto sealed = region.seal(name, layout, offsets).value();
    if (!CHECK_EQ(int{sealed[0]}, int{KVS_SEALED})) return;
    CHECK(read(client, number));
    CHECK(eventually([&] {  // another thread may be reading it
      return region.give_back(name).value()[0] == KVS_TAKEN;
    }));
  }
}

}  // namespace

TEST(many_threads_of_one_client) {
  Served served;
  auto client = served.client(), other = served.client();
  const std::uint32_t layout = layout_of(client);
  CHECK_EQ(layout_of(other), layout);
  const std::uint64_t slot = client.block_bytes(layout).value();
  auto region = client.register_region(8 * slot).value();
  std::atomic<bool> over{false};
  std::atomic<std::uint64_t> hits{0};
  std::vector<std::thread> threads;
  for (const std::uint64_t which : {0u, 1u})
    threads.emplace_back([&, which] { own_slots(client, region, layout, which * 4 * slot, 100 + which * 50); });
  threads.emplace_back([&] {
    for (int round = 0; round < kRounds; ++round) write(client, layout, static_cast<std::uint64_t>(round % 20), round % 3 != 0);
  });
  threads.emplace_back([&] {
    for (int round = 0; round < kRounds; ++round) {
      const kvstored::Key name[] = {key_of(static_cast<std::uint64_t>(round % 20))};
      CHECK(client.remove(name).has_value());
      CHECK(client.touch(name).has_value());
    }
  });
  std::vector<std::thread> readers;
  for (kvstored::Client* door : {&client, &other})
    readers.emplace_back([&, door] {
      for (std::uint64_t i = 0; !over.load(); ++i) {
        hits += read(*door, i % 20);
        hits += read(*door, 100 + i % 5 + 50 * (i % 2));
        CHECK(door->stats().has_value());
      }
    });
  for (std::thread& thread : threads) thread.join();
  over = true;
  for (std::thread& thread : readers) thread.join();
  CHECK(hits.load() > 0);
}

TEST(buffers_anywhere_from_two_threads_and_layers_one_after_the_other) {
  Served served;
  auto client = served.client();
  const std::uint32_t layout = layout_of(client);
  auto region = client.register_region(2 * kLayers * kLayerBytes).value();
  const kvstored::BufferShape shape{{1, 1, 1}, {KVS_AXIS_LAYER, KVS_AXIS_KV, KVS_AXIS_PART}};
  const auto put = [&](std::uint64_t which) {
    const std::uint64_t base = which * kLayers * kLayerBytes;
    for (std::uint64_t number = 200 + which * 50; number < 230 + which * 50; ++number) {
      const kvstored::Key name[] = {key_of(number)};
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        const kvstored::Buffer buffer[] = {{base + (kLayers - 1 - layer) * kLayerBytes, kLayerBytes}};
        std::ranges::fill(region.memory().subspan(buffer[0].offset, kLayerBytes), stamp(number, layer));
        const auto said = region.put(name, layout, shape, buffer, {.layer_index = layer}).value();
        CHECK_EQ(int{said[0]}, int{layer + 1 == kLayers ? KVS_SEALED : KVS_OPEN});
      }
      CHECK(read(client, number));
      // Back into the same memory, K and V of a layer far apart.
      std::ranges::fill(region.memory().subspan(base, kLayers * kLayerBytes), std::byte{0});
      std::vector<kvstored::Buffer> places;
      for (std::uint64_t i = 0; i < 2 * kLayers; ++i)
        places.push_back({base + (i % 2 * kLayers + i / 2) * (kLayerBytes / 2), kLayerBytes / 2});
      const auto blocks = client.get(name).value();
      CHECK_EQ(int{region.load(blocks, {{kLayers, 2, 1}, {KVS_AXIS_LAYER, KVS_AXIS_KV, KVS_AXIS_PART}}, places).value()[0]},
               int{KVS_LOADED});
      for (std::uint32_t i = 0; i < 2 * kLayers; ++i)
        CHECK(std::ranges::all_of(region.memory().subspan(places[i].offset, kLayerBytes / 2),
                                  [&](std::byte b) { return b == stamp(number, i / 2); }));
    }
  };
  std::thread first([&] { put(0); }), second([&] { put(1); });
  first.join(), second.join();
}

// Each of a block's layers by one thread, several at once: all count as written.
TEST(layers_of_one_block_from_two_threads) {
  constexpr std::uint32_t kMany = 64;
  Served served;
  auto client = served.client();
  const std::uint32_t layout = client.register_layout({kMany, 2, 1, 32, KVS_FLOAT16, kTokens, 0, 0, nullptr}).value();
  std::atomic<std::size_t> refused{0};
  for (int round = 0; round < kRounds; ++round) {
    const kvstored::Key name[] = {key_of(1)};
    auto writer = client.create(name, layout).value();
    std::atomic<std::uint32_t> ready{0};
    const auto fill = [&](std::uint32_t which) {
      for (ready += 1; ready.load() < 2;) std::this_thread::yield();
      for (std::uint32_t layer = which; layer < kMany; layer += 2) refused += !writer.layer(0, layer).has_value();
    };
    std::thread other(fill, 1);
    fill(0);
    other.join();
    refused += !writer.seal().has_value();
    CHECK_EQ(client.remove(name).value(), std::uint64_t{1});
  }
  CHECK_EQ(refused.load(), size_t{0});
}

TEST(every_thread_has_its_own_text) {
  Served served;
  auto client = served.client();
  const auto ask = [&](std::uint32_t priority) {
    const std::string value = std::to_string(priority);
    const kvstored::Key name[] = {key_of(1)};
    for (int i = 0; i < kRounds; ++i) {
      const auto refused = client.prefetch(name, priority);
      CHECK(!refused && refused.error().status == KVS_INVALID_ARGUMENT && refused.error().text.find(value) != std::string::npos);
    }
  };
  std::thread first([&] { ask(101); }), second([&] { ask(7777); });
  first.join(), second.join();
  CHECK(client.prefetch({}, 35).has_value());
  CHECK_EQ(std::string(kvs_last_error()), "");
}

// Of a region that two threads share.
TEST(every_thread_hears_why_its_own_items_were_refused) {
  Served served;
  auto client = served.client();
  const std::uint32_t layout = layout_of(client);
  auto region = client.register_region(kLayers * kLayerBytes).value(), other = client.register_region(1).value();
  const kvstored::BufferShape shape{{1, 1, 1}, {KVS_AXIS_LAYER, KVS_AXIS_KV, KVS_AXIS_PART}};
  const auto ask = [&](std::uint64_t outside) {
    const kvstored::Key name[] = {key_of(outside)};
    const kvstored::Buffer buffer[] = {{outside, kLayerBytes}};
    for (int i = 0; i < kRounds; ++i) {
      CHECK_EQ(int{region.put(name, layout, shape, buffer).value()[0]}, int{KVS_REFUSED});
      CHECK(region.refusal(0).find("at " + std::to_string(outside) + " ") != std::string::npos);
    }
  };
  std::thread first([&] { ask(1 << 20); }), second([&] { ask(1 << 21); });
  first.join(), second.join();
  const kvstored::Key name[] = {key_of(1)};
  const std::uint64_t outside[] = {1 << 20};
  CHECK_EQ(int{region.seal(name, layout, outside).value()[0]}, int{KVS_REFUSED});
  CHECK(!region.refusal(0).empty());
  CHECK_EQ(region.refusal(1), "");
  CHECK_EQ(other.refusal(0), "");
  CHECK(!region.seal(name, 47, outside).has_value());
  CHECK_EQ(region.refusal(0), "");
}

TEST(what_cannot_be_sealed_there_is_refused_alone) {
  Served served;
  auto client = served.client();
  const std::uint32_t layout = layout_of(client);
  const std::uint64_t slot = client.block_bytes(layout).value();
  auto region = client.register_region(4 * slot).value();
  const kvstored::Key names[] = {key_of(1), key_of(2), key_of(3)};
  fill_slot(client, region, layout, slot, 3);
  const std::uint64_t offsets[] = {4 * slot, 64, slot};
  const auto said = region.seal(names, layout, offsets).value();
  CHECK(said == (std::vector<std::uint8_t>{KVS_REFUSED, KVS_REFUSED, KVS_SEALED}));
  CHECK(region.refusal(0).find("not inside") != std::string::npos);
  CHECK(region.refusal(1).find("within a page") != std::string::npos);
  CHECK_EQ(region.refusal(2), "");
  CHECK(read(client, 3));

  // In pieces: whose lengths are right modulo 2^64 only; one that ends outside, beside one that does not.
  const kvstored::BufferShape parts{{kLayers, 1, 3}, {KVS_AXIS_LAYER, KVS_AXIS_KV, KVS_AXIS_PART}};
  const kvstored::BufferShape pages{{kLayers, 1, 1}, {KVS_AXIS_LAYER, KVS_AXIS_KV, KVS_AXIS_PART}};
  constexpr std::uint64_t kHalf = std::uint64_t{1} << 63;
  std::vector<kvstored::Buffer> wraps, two;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    wraps.insert(wraps.end(), {{0, kHalf}, {kHalf, kHalf}, {layer * kLayerBytes, kLayerBytes}});
  const kvstored::Key hostile[] = {key_of(4)}, last[] = {key_of(5), key_of(6)};
  CHECK_EQ(int{region.seal_pieces(hostile, layout, parts, wraps).value()[0]}, int{KVS_REFUSED});
  fill_slot(client, region, layout, 2 * slot, 6);
  for (const std::uint64_t first : {4 * slot - kLayerBytes, 2 * slot})
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) two.push_back({first + layer * kLayerBytes, kLayerBytes});
  CHECK(region.seal_pieces(last, layout, pages, two).value() == (std::vector<std::uint8_t>{KVS_REFUSED, KVS_SEALED}));
  CHECK(region.refusal(0).find("not inside") != std::string::npos);
  CHECK(read(client, 6));
}

TEST(a_layer_of_all_blocks_is_waited_for) {
  Served served;
  auto client = served.client(), other = served.client();
  const std::uint32_t layout = layout_of(client);
  const kvstored::Key names[] = {key_of(1), key_of(9), key_of(2)};
  const kvstored::Key mine[] = {key_of(1), key_of(2)};
  auto writer = client.create(mine, layout).value();
  const std::vector<std::byte> bytes(kLayerBytes, std::byte{7});
  const auto fill = [&](std::size_t i, std::uint32_t layer) {
    CHECK(writer.copy_layer(i, layer, bytes).has_value() && writer.mark_layer(i, layer).has_value());
  };
  fill(0, 0), fill(0, 1), fill(1, 0);
  const auto blocks = other.get(names, {.follow = true}).value();
  CHECK(!blocks.layers(1).has_value());
  const auto late = blocks.layers(1, 0.02);
  CHECK(!late.has_value() && late.error().status == KVS_DEADLINE_EXCEEDED);
  std::thread filling([&] { fill(1, 1); });
  const auto found = blocks.layers(1, 60).value();
  filling.join();
  CHECK_EQ(found.size(), std::size_t{3});
  CHECK(found[0].size() == kLayerBytes && found[1].empty() && found[2].size() == kLayerBytes);
  CHECK(std::ranges::all_of(found[2], [](std::byte b) { return b == std::byte{7}; }));
  CHECK(blocks.wait_layers(47, 1).error().status == KVS_INVALID_ARGUMENT);
}

TEST(what_is_freed_half_done_is_given_back) {
  Served served;
  {
    auto client = served.client();
    const std::uint32_t layout = layout_of(client);
    auto region = client.register_region(4 * client.block_bytes(layout).value()).value();
    const kvstored::Key names[] = {key_of(1), key_of(2)};
    const kvstored::Buffer buffers[] = {{0, kLayerBytes}, {kLayerBytes, kLayerBytes}};
    const kvstored::BufferShape shape{{1, 1, 1}, {KVS_AXIS_LAYER, KVS_AXIS_KV, KVS_AXIS_PART}};
    const auto said = region.put(names, layout, shape, buffers).value();
    CHECK(std::ranges::all_of(said, [](std::uint8_t state) { return state == KVS_OPEN; }));
    const kvstored::Key mine[] = {key_of(3)};
    auto writer = client.create(mine, layout).value();
    CHECK(writer.layer(0, 0).has_value());
  }
  CHECK(eventually([&] { return served.daemon.stats().used_bytes == 0; }));
  served.daemon.rig.store->check_integrity();
}

// Until its last layer is there nobody knows whose bytes those beside the layers are.
TEST(what_stands_beside_the_layers_of_a_followed_block_is_refused_until_it_is_whole) {
  Served served;
  auto client = served.client();
  const std::uint32_t layout = client.register_layout({kLayers, 2, 2, 64, KVS_FLOAT16, kTokens, 16, 0, nullptr}).value();
  const kvstored::Key name[] = {key_of(1)};
  auto writer = client.create(name, layout).value();
  const std::vector<std::byte> bytes(kLayerBytes);
  const auto refused = [](const auto& answer) { return !answer && answer.error().status == KVS_INVALID_ARGUMENT; };
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto blocks = client.get(name, {.follow = true}).value();
    CHECK(blocks.hit(0));
    CHECK(refused(blocks.meta(0)));
    CHECK(writer.copy_layer(0, layer, bytes).has_value() && writer.mark_layer(0, layer).has_value());
  }
  const auto blocks = client.get(name, {.follow = true}).value();
  CHECK_EQ(blocks.meta(0).value().size(), size_t{16});

  // a wait of no number would end at once, or never
  CHECK(refused(blocks.wait_layer(0, 0, NAN)));
  CHECK(refused(writer.wait_pending(NAN)));
  CHECK(writer.seal().has_value());
}

TEST(a_daemon_that_begins_anew_costs_an_error_and_no_more) {
  Served served;
  auto client = served.client();
  const std::uint32_t layout = layout_of(client);
  auto region = client.register_region(2 * client.block_bytes(layout).value()).value();
  write(client, layout, 1, true);
  CHECK(read(client, 1));
  served.daemon.restart();
  CHECK(eventually([&] {
    const kvstored::Key name[] = {key_of(1)};
    const auto states = client.lookup(name);
    return states && (*states)[0] == KVS_RESIDENT;
  }));
  CHECK(read(client, 1));
  fill_slot(client, region, layout, 0, 2);  // the memory is still mapped
  const kvstored::Key name[] = {key_of(2)};
  const std::uint64_t offsets[] = {0};
  const auto said = region.seal(name, layout, offsets).value();
  CHECK_EQ(int{said[0]}, int{KVS_REGION_NO_SPACE});
  write(client, layout, 3, true);
  CHECK(read(client, 3));
}
