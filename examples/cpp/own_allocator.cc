// An engine with an allocator of its own: it divides a region of the store's memory into buffers, publishes blocks out of them,
// and finds them again as every other process does. Buffers anywhere are copied; blocks that lie as the store has them are sealed
// where they are. own_allocator DIRECTORY, of a running daemon; prints what it did.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <vector>

#include "kvstored/kvstored.hpp"

namespace {

constexpr std::uint32_t kLayers = 4, kTokens = 16;
constexpr std::uint64_t kBufferBytes = 2 * 8 * kTokens * 2;  // K or V of one layer: 2 heads of 8, 16 bits each
constexpr std::uint64_t kRegionBytes = 1 << 20;
constexpr std::size_t kBlocks = 8;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "not so: " << what << "\n";
  std::exit(1);
}

// A free list over the region: buffers of one size, given out from the end, so that no block lies in one piece.
class Allocator {
 public:
  explicit Allocator(std::uint64_t length) {
    for (std::uint64_t at = 0; at + kBufferBytes <= length; at += kBufferBytes) free_.push_back(at);
    std::reverse(free_.begin() + 3, free_.end() - 5);
  }
  kvstored::Buffer take() {
    const kvstored::Buffer out{free_.back(), kBufferBytes};
    free_.pop_back();
    return out;
  }
  void give(kvstored::Buffer buffer) { free_.push_back(buffer.offset); }
  std::size_t left() const { return free_.size(); }

 private:
  std::vector<std::uint64_t> free_;
};

// Keys are digests: a number is spread over all of its bytes (splitmix64; a program that shares its keys takes SHA-256).
kvstored::Key key_of(std::uint64_t number) {
  kvstored::Key key;
  for (std::uint64_t& word : key.words) {
    word = number += 0x9e3779b97f4a7c15;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    word ^= word >> 31;
  }
  return key;
}

std::byte content(std::size_t block, std::uint32_t layer, std::uint32_t kv) {
  return static_cast<std::byte>(1 + block * 8 + layer * 2 + kv);
}

// Buffers [layers, 2, 1] of each block, filled as a model would fill them.
std::vector<kvstored::Buffer> fill(Allocator& allocator, kvstored::WritableBytes memory) {
  std::vector<kvstored::Buffer> buffers;
  for (std::size_t block = 0; block < kBlocks; ++block)
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      for (std::uint32_t kv = 0; kv < 2; ++kv) {
        buffers.push_back(allocator.take());
        std::ranges::fill(memory.subspan(buffers.back().offset, kBufferBytes), content(block, layer, kv));
      }
  return buffers;
}

void check_layers(const kvstored::Blocks& blocks) {
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto views = blocks.layers(layer).value();
    for (std::size_t block = 0; block < kBlocks; ++block) {
      expect(views[block].size() == 2 * kBufferBytes, "a layer is K and V");
      for (std::uint32_t kv = 0; kv < 2; ++kv) {
        const auto half = views[block].subspan(kv * kBufferBytes, kBufferBytes);
        expect(std::ranges::all_of(half, [&](std::byte b) { return b == content(block, layer, kv); }), "its bytes are there");
      }
    }
  }
}

// A second way: slots as long as a block, with the layers where the store has them. Nothing is copied.
void seal_in_place(kvstored::Client& client, std::uint32_t layout_id) {
  const std::uint64_t slot = client.block_bytes(layout_id).value();
  auto region = client.register_region(kBlocks * slot).value();
  std::vector<kvstored::Key> keys;
  std::vector<std::uint64_t> slots;
  for (std::size_t block = 0; block < kBlocks; ++block) {
    keys.push_back(key_of(1000 + block));
    slots.push_back((kBlocks - 1 - block) * slot);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const kvstored::Buffer place = client.block_layer(layout_id, layer).value();
      for (std::uint32_t kv = 0; kv < 2; ++kv)
        std::ranges::fill(region.memory().subspan(slots[block] + place.offset + kv * kBufferBytes, kBufferBytes),
                          content(block, layer, kv));
    }
  }
  const auto results = region.seal(keys, layout_id, slots).value();
  expect(std::ranges::all_of(results, [](std::uint8_t r) { return r == KVS_SEALED; }), "all are sealed where they lie");
  {
    const auto blocks = client.get(keys, {.verify = true}).value();
    check_layers(blocks);
    const auto held = region.give_back(std::span(keys).first(1)).value();
    expect(held[0] == KVS_STILL_READ, "a slot that is read is not given back");
  }
  const auto back = region.give_back(keys).value();
  expect(std::ranges::all_of(back, [](std::uint8_t r) { return r == KVS_TAKEN; }), "all slots are the allocator's again");
  expect(client.lookup(keys).value()[0] == KVS_MISSING, "and nobody finds what was there");
  std::cout << kBlocks << " blocks sealed where they lie, read, and their slots taken back\n";
}

void run(const char* directory) {
  auto client = kvstored::Client::connect({.directory = directory}).value();
  const kvs_layout layout{kLayers, 2, 2, 8, KVS_FLOAT16, kTokens, 0, 0, nullptr};
  const std::uint32_t layout_id = client.register_layout(layout).value();

  auto region = client.register_region(kRegionBytes).value();
  Allocator allocator(region.memory().size());
  const std::size_t all = allocator.left();
  std::vector<kvstored::Key> keys;
  for (std::size_t i = 0; i < kBlocks; ++i) keys.push_back(key_of(i));
  (void)client.remove(keys).value();  // what an earlier run left
  const auto buffers = fill(allocator, region.memory());
  const kvstored::BufferShape shape{{kLayers, 2, 1}, {KVS_AXIS_LAYER, KVS_AXIS_KV, KVS_AXIS_PART}};

  const auto results = region.put(keys, layout_id, shape, buffers).value();  // a batch
  expect(std::ranges::all_of(results, [](std::uint8_t r) { return r == KVS_SEALED; }), "all blocks are sealed");
  for (const kvstored::Buffer& buffer : buffers) allocator.give(buffer);
  std::ranges::fill(region.memory(), std::byte{0});  // the engine goes on; what it published stays
  expect(allocator.left() == all, "the allocator has its buffers back");

  auto outside = buffers;
  outside[0].offset = region.memory().size() - 64;
  const kvstored::Key more[] = {key_of(100)};
  const auto refused = region.put(more, layout_id, shape, std::span(outside).first(2 * kLayers)).value();
  expect(refused[0] == KVS_REFUSED, "what is not inside is refused");
  std::cout << "refused: " << region.refusal(0) << "\n";

  expect(std::ranges::all_of(client.lookup(keys).value(), [](std::uint8_t s) { return s == KVS_RESIDENT; }), "all are found");
  {
    const auto blocks = client.get(keys, {.verify = true}).value();
    check_layers(blocks);
    // Back into buffers of the allocator's, K and V apart as they were.
    std::vector<kvstored::Buffer> places;
    for (std::size_t i = 0; i < buffers.size(); ++i) places.push_back(allocator.take());
    const auto loaded = region.load(blocks, shape, places).value();
    expect(std::ranges::all_of(loaded, [](std::uint8_t r) { return r == KVS_LOADED; }), "all are loaded");
    for (std::size_t i = 0; i < places.size(); ++i)
      expect(std::ranges::all_of(region.memory().subspan(places[i].offset, kBufferBytes),
                                 [&](std::byte b) { return b == content(i / (2 * kLayers), i / 2 % kLayers, i % 2); }),
             "each buffer has its part");
  }
  expect(client.remove(std::span(keys).first(1)).value() == 1, "one is given back");
  const auto left = client.lookup(keys).value();
  expect(left[0] == KVS_MISSING && left[1] == KVS_RESIDENT, "the others stay");
  const auto missing = client.get(std::span(keys).first(1)).value();
  expect(!missing.hit(0) && !missing.layer(0, 0), "a miss is a value, an error has a text");
  std::cout << "error: " << missing.layer(0, 0).error().text << "\n";
  std::cout << kBlocks << " blocks of " << kLayers << " layers: put, found, read, loaded, given back\n";
  seal_in_place(client, layout_id);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: own_allocator DIRECTORY\n";
    return 2;
  }
  try {
    run(argv[1]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
