// Goal: a scan finds every block, reports everything else by what it is, follows no link and holds few blocks at a time.
// Method: directories made by hand with every kind of stray, and one with more files than a batch.
#include "core/files/scan.h"

#include <sys/stat.h>

#include <fstream>
#include <map>
#include <set>

#include "core/files/files.h"
#include "tests/check.h"
#include "tests/disk_fixture.h"

using namespace kv;
using namespace kv::test;
namespace fs = std::filesystem;

namespace {

struct Tree {
  Directory directory;
  RealFiles files{directory.path, false};

  void block(uint64_t number, Fanout fanout = {2, 2}, uint64_t bytes = 8192) {
    put(path_of(key_of_number(number), fanout), bytes);
  }
  void put(const std::string& path, uint64_t bytes = 100) {
    fs::create_directories(fs::path(directory / path).parent_path());
    std::ofstream(directory / path).flush();
    fs::resize_file(directory / path, bytes);
  }
  Scanned scan(std::optional<Fanout> fanout = Fanout{2, 2}) {
    keys.clear();
    strays.clear();
    largest = 0;
    return kv::scan(directory.path, fanout, visitor);
  }

  std::set<std::string> keys;
  std::map<std::string, Stray> strays;
  size_t largest = 0;
  Visitor visitor{[this](std::span<const FoundFile> found) {
                    for (const FoundFile& each : found) CHECK(keys.insert(hex(each.key)).second);
                    largest = std::max(largest, found.size());
                    return true;
                  },
                  [this](Stray kind, const std::string& path, uint64_t) { strays[path] = kind; }};
};

}  // namespace

TEST(every_block_is_found_once) {
  Tree tree;
  for (uint64_t n = 0; n < 3000; ++n) tree.block(n, {2, 1});
  const Scanned scanned = tree.scan(Fanout{2, 1});
  CHECK_EQ(scanned.files, 3000u);
  CHECK_EQ(tree.keys.size(), 3000u);
  CHECK_EQ(scanned.bytes, 3000u * 8192);
  CHECK_EQ(scanned.strays, 0u);
  CHECK_EQ(scanned.errors, 0u);
  CHECK(scanned.complete);
  CHECK_EQ(tree.largest, kScanBatch);
  CHECK_EQ(tree.scan(std::nullopt).files, 3000u);
  CHECK_EQ(tree.scan(Fanout{2, 2}).files, 0u);  // the directories of another fan-out are no place for a block
  CHECK_EQ(tree.strays.size(), 3000u);
}

TEST(any_fanout_is_scanned) {
  for (const Fanout fanout : {Fanout{0, 0}, Fanout{1, 4}, Fanout{4, 1}, Fanout{3, 2}}) {
    Tree tree;
    for (uint64_t n = 0; n < 20; ++n) tree.block(n, fanout);
    CHECK_EQ(tree.scan(fanout).files, 20u);
    CHECK_EQ(tree.scan(std::nullopt).files, 20u);
    CHECK_EQ(tree.strays.size(), 0u);
  }
}

TEST(strays_are_told_apart) {
  Tree tree;
  tree.block(1);
  const std::string path = path_of(key_of_number(1), {2, 2}), level = path.substr(0, 3), leaf = path.substr(0, 6),
                    name = path.substr(6), other = path_of(key_of_number(2), {2, 2}).substr(6);
  std::map<std::string, Stray> expected{
      {leaf + other, Stray::Misplaced},          {other, Stray::Misplaced},
      {leaf + "notes.txt", Stray::Foreign},      {leaf + name + "x", Stray::Foreign},
      {"tmp/0123456789abcdef.tmp", Stray::Temp}, {"tmp/mine", Stray::Foreign},
      {"aside/" + name + ".0", Stray::Aside},
  };
  for (const auto& [each, kind] : expected) tree.put(each);
  const auto link = [&](const std::string& to, const std::string& at) {
    fs::create_symlink(to, tree.directory / at);
    expected[at] = Stray::Link;
  };
  link(name, leaf + other.substr(1));
  link(path, path_of(key_of_number(2), {2, 2}).substr(0, 2) + "link.kv");
  link("/etc", "ff");  // a level of directories that leads away
  link("/etc/passwd", "tmp/0123456789abcde0.tmp");
  fs::create_directories(tree.directory / (leaf + "x" + other));
  expected[leaf + "x" + other] = Stray::Directory;
  fs::create_directories(tree.directory / "lost+found/deep");
  expected["lost+found"] = Stray::Directory;
  fs::create_directories(tree.directory / (level + "abcde"));  // longer than any level's
  expected[level + "abcde"] = Stray::Directory;
  CHECK_EQ(::mkfifo((tree.directory / (leaf + "0" + name.substr(1))).c_str(), 0600), 0);
  expected[leaf + "0" + name.substr(1)] = Stray::Special;

  const Scanned scanned = tree.scan();
  CHECK_EQ(scanned.files, 1u);
  CHECK_EQ(scanned.strays, expected.size());
  for (const auto& [each, kind] : expected) {
    const auto found = tree.strays.find(each);
    if (!CHECK(found != tree.strays.end() && found->second == kind)) std::fprintf(stderr, "%s\n", each.c_str());
  }
  CHECK_EQ(tree.strays.size(), expected.size());
}

// Strays are no batch that could answer.
TEST(it_ends_at_any_name) {
  Tree tree;
  for (int n = 0; n < 50; ++n) tree.put("01/" + std::to_string(n) + ".txt"), tree.put("tmp/" + std::to_string(n));
  tree.visitor.over = [&] { return tree.strays.size() == 3; };
  const Scanned scanned = tree.scan();
  CHECK_EQ(scanned.strays, 3u);
  CHECK(!scanned.complete);
}

TEST(a_visitor_can_end_it) {
  Tree tree;
  for (uint64_t n = 0; n < 2 * kScanBatch + 10; ++n) tree.block(n, {0, 0}, 0);
  size_t seen = 0;
  const Scanned scanned = scan(tree.directory.path, Fanout{0, 0}, {[&](auto found) { return (seen += found.size()) < 1; }, {}});
  CHECK(!scanned.complete);
  CHECK_EQ(seen, kScanBatch);
}

TEST(what_cannot_be_read_is_counted) {
  Tree tree;
  tree.block(1);
  if (::geteuid() == 0) {
    std::printf("skipped: root reads everything\n");
  } else {
    fs::permissions(tree.directory / path_of(key_of_number(1), {2, 2}).substr(0, 2), fs::perms::none);
    const Scanned scanned = tree.scan();
    CHECK_EQ(scanned.errors, 1u);
    CHECK_EQ(scanned.first_error, EACCES);
    fs::permissions(tree.directory / path_of(key_of_number(1), {2, 2}).substr(0, 2), fs::perms::owner_all);
  }
  try {
    scan(tree.directory / "none", std::nullopt, {});
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code == Code::Unavailable);
  }
}
