// Goal: a block file's header is believed only if every byte of it is right, and the names of files and keys match one to one.
// Method: one good header is damaged field by field, with and without a checksum that fits the damage.
#include "core/files/block_file.h"

#include <set>

#include "core/format/sha256.h"
#include "tests/check.h"
#include "tests/disk_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

const Layout& layout() {
  static const Layout layout = layout_of_sizes({100, 200, 100, 8});
  return layout;
}

std::string_view wrong_after(void (*damage)(FileHeader&), bool with_checksum) {
  BlockImage image(1, layout(), 16);
  damage(image.header());
  if (with_checksum) image.header().header_checksum = crc32c(&image.header(), offsetof(FileHeader, header_checksum));
  return decode(image.bytes.page(), image.bytes.size).wrong;
}

}  // namespace

TEST(a_header_comes_back) {
  BlockImage image(7, layout(), 16);
  const Decoded decoded = decode(image.bytes.page(), image.bytes.size);
  CHECK(decoded);
  CHECK_EQ(decoded.wrong, std::string_view{});
  const FileHeader& h = *decoded.header;
  CHECK(h.key == key_of_number(7));
  CHECK_EQ(h.layers, 4u);
  CHECK_EQ(h.layer_bytes(0), 1600u);
  CHECK_EQ(h.layer_bytes(1), 3200u);
  CHECK_EQ(h.layer_bytes(2), 1600u);
  CHECK_EQ(h.layers_bytes(), layout().layers_bytes(16));
  CHECK_EQ(h.data_bytes, layout().extent_bytes(16));
  for (uint32_t layer = 0; layer < 4; ++layer) CHECK(layer_matches(h, layer, image.data + layout().layer_offset(layer, 16)));
  CHECK(tail_matches(h, image.data + h.layers_bytes()));
}

TEST(a_header_of_something_else_is_told) {
  BlockImage image(7, layout(), 16);
  FileHeader& h = image.header();
  const Key digest = layout_digest(layout());
  CHECK_EQ(mismatch(h, h.key, layout(), digest, h.identity), "");
  CHECK_EQ(mismatch(h, h.key, layout(), digest, Key{}), "");
  CHECK_EQ(mismatch(h, key_of_number(8), layout(), digest, h.identity), "of another block");
  CHECK_EQ(mismatch(h, h.key, layout(), digest, key_of_number(8)), "of another model");
  CHECK_EQ(mismatch(h, h.key, layout(), key_of_number(8), h.identity), "of another layout");
  const Layout other = layout_of_sizes({100, 200, 200, 8});
  CHECK_EQ(mismatch(h, h.key, other, digest, h.identity), "of another layout");
  h.layers = 5;  // consistent in itself: the fifth layer lies in the meta area
  image.seal();
  CHECK(decode(image.bytes.page(), image.bytes.size));
  CHECK_EQ(mismatch(h, h.key, layout(), digest, h.identity), "of another layout");
}

TEST(every_bit_of_the_header_is_covered) {
  BlockImage image(3, layout(), 16);
  for (size_t bit = 0; bit < 8 * kBlockFileHeaderBytes; ++bit) {
    image.bytes.data[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    CHECK(!decode(image.bytes.page(), image.bytes.size));
    image.bytes.data[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
  CHECK(decode(image.bytes.page(), image.bytes.size));
}

TEST(a_field_out_of_bounds_is_refused_under_a_good_checksum) {
  void (*const damages[])(FileHeader&) = {
      [](FileHeader& h) { h.magic[7] = '2'; },
      [](FileHeader& h) { h.version = 2; },
      [](FileHeader& h) { h.header_bytes = 8192; },
      [](FileHeader& h) { h.data_bytes += 4096; },
      [](FileHeader& h) { h.data_bytes -= 4096; },
      [](FileHeader& h) { h.data_bytes = ~0ull; },
      [](FileHeader& h) { h.data_bytes = 0; },
      [](FileHeader& h) { h.tokens = 0; },
      [](FileHeader& h) { h.tokens = kMaxTokens + 1; },
      [](FileHeader& h) { h.tokens = kMaxTokens; },  // layers longer than the file
      [](FileHeader& h) { h.layers = 0; },
      [](FileHeader& h) { h.layers = 3; },
      [](FileHeader& h) { h.layers = kMaxLayers + 1; },
      [](FileHeader& h) { h.layers = ~0u; },
      [](FileHeader& h) { h.base_position = kMaxBasePosition + 1; },
      [](FileHeader& h) { h.priority = kMaxPriority + 1; },
      [](FileHeader& h) { h.layer_sizes[0] = 0; },
      [](FileHeader& h) { h.layer_sizes[0] = 1u << 25; },
      [](FileHeader& h) { h.layer_sizes[3] = 1; },
      [](FileHeader& h) { h.layer_size_index[0] = 1; },
      [](FileHeader& h) { h.layer_size_index[3] = 200; },
      [](FileHeader& h) { h.layer_size_index[511] = 1; },
      [](FileHeader& h) { h.layer_checksums[511] = 1; },
      [](FileHeader& h) { h.reserved[315] = 1; },
  };
  for (auto* damage : damages) {
    CHECK(!wrong_after(damage, true).empty());
    CHECK(!wrong_after(damage, false).empty());
  }
}

TEST(a_file_of_another_length_is_refused) {
  BlockImage image(3, layout(), 16);
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{4095}, uint64_t{4096}, uint64_t{image.bytes.size - 1},
                               uint64_t{image.bytes.size + 1}, uint64_t{image.bytes.size + 4096}, ~uint64_t{0}})
    CHECK(!decode(image.bytes.page(), bytes));
}

TEST(one_changed_byte_fails_its_layer_only) {
  BlockImage image(5, layout(), 16);
  const FileHeader& h = image.header();
  for (uint32_t damaged = 0; damaged < 5; ++damaged) {
    std::byte* at = image.data + layout().layer_offset(damaged, 16) + (damaged < 4 ? h.layer_bytes(damaged) - 1 : 3);
    *at ^= std::byte{1};
    for (uint32_t layer = 0; layer < 4; ++layer)
      CHECK_EQ(layer_matches(h, layer, image.data + layout().layer_offset(layer, 16)), layer != damaged);
    CHECK_EQ(tail_matches(h, image.data + h.layers_bytes()), damaged != 4);
    *at ^= std::byte{1};
  }
}

// The block of tests/golden/reference_block_file.py, field by field.
TEST(the_golden_file_is_written) {
  const std::vector<uint32_t> words{3, 2, 2, 4, 0, 16, 0, 80, 4, 48, 96, 48};
  std::vector<uint8_t> blob(4 + 4 * words.size());
  std::memcpy(blob.data(), "KVL1", 4);
  std::memcpy(blob.data() + 4, words.data(), 4 * words.size());
  const Layout golden = Layout::parse(blob);
  const auto digest = [](std::string_view text) { return Sha256().update(text.data(), text.size()).finish(); };
  constexpr uint32_t kTokens = 5;

  Aligned file(kBlockFileHeaderBytes + golden.extent_bytes(kTokens));
  std::byte* const data = file.data + kBlockFileHeaderBytes;
  FileHeader header = {};
  CHECK(describe(header, golden, kTokens));
  for (uint32_t layer = 0; layer < 3; ++layer) {
    std::byte* const at = data + golden.layer_offset(layer, kTokens);
    for (uint64_t i = 0; i < golden.layer_bytes(layer, kTokens); ++i) at[i] = static_cast<std::byte>((1 + 31 * layer + i) % 251);
    header.layer_checksums[layer] = crc32c(at, golden.layer_bytes(layer, kTokens));
  }
  std::memcpy(data + golden.checksums_offset(kTokens), header.layer_checksums, 12);
  std::byte* const meta = data + golden.meta_offset(kTokens);
  const Key parent = digest("parent"), content = digest("content 1");
  std::memcpy(meta, "KVM1\5", 5);
  std::memcpy(meta + 16, &parent, 32);
  std::memcpy(meta + 48, &content, 32);
  for (uint32_t token = 0; token < kTokens; ++token) std::memcpy(meta + 80 + 4 * token, &token, 4);
  header.key = digest("key 1"), header.content_key = content, header.identity = digest("model");
  header.fingerprint = 0x123456789abcdef, header.base_position = 16, header.priority = 35, header.parent = 0x89abcdef;
  header.created_s = 1'700'000'000;
  header.tail_checksum = crc32c(data + golden.layers_bytes(kTokens), header.data_bytes - golden.layers_bytes(kTokens));
  encode(header, file.page());
  CHECK(decode(file.page(), file.size));
  CHECK_EQ(hex(Sha256().update(file.data, file.size).finish()),
           "24c7917ae8721fc9dc058ad3bedc307cf4998b1692c62829993be73ad3f8556a");
}

TEST(the_largest_layouts_fit) {
  const Layout many = layout_of_sizes(std::vector<uint32_t>(512, 64), 0);
  BlockImage image(1, many, 16);
  CHECK(decode(image.bytes.page(), image.bytes.size));
  std::vector<uint32_t> sizes(256);
  for (uint32_t i = 0; i < 256; ++i) sizes[i] = i + 1;
  BlockImage different(1, layout_of_sizes(sizes), 16);
  CHECK(decode(different.bytes.page(), different.bytes.size));
  sizes.push_back(1000);
  FileHeader header = {};
  CHECK(!describe(header, layout_of_sizes(sizes), 16));
}

TEST(names_and_keys_match) {
  std::set<std::string> paths;
  for (uint64_t n = 0; n < 1000; ++n) {
    const Key key = key_of_number(n);
    const std::string path = path_of(key, {2, 2});
    CHECK_EQ(path.size(), 6u + 64 + 3);
    CHECK_EQ(path.substr(0, 2) + path.substr(3, 2), path.substr(6, 4));
    CHECK(key_of(path.substr(6)) == key);
    paths.insert(path);
  }
  CHECK_EQ(paths.size(), 1000u);
  CHECK_EQ(path_of(key_of_number(1), {0, 2}), hex(key_of_number(1)) + ".kv");
  CHECK_EQ(path_of(key_of_number(1), {3, 1}).find(hex(key_of_number(1))), 6u);
  const std::string good = hex(key_of_number(1)), cut = good.substr(1);
  CHECK(key_of(good + ".kv"));
  for (const std::string& name : std::vector<std::string>{"", ".kv", good, good + ".kv2", good + ".KV", cut + ".kv"})
    CHECK(!key_of(name));
  for (const char first : {'g', 'G', 'A', 'F', '/', ':', '\0', ' '}) CHECK(!key_of(std::string(1, first) + cut + ".kv"));
}
