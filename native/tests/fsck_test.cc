// Goal: a check finds every kind of damage to a directory of blocks and nothing else; a repair removes exactly that, so that a
// second check finds nothing, and touches no name that is not ours.
// Method: good blocks, one damage at a time from a table of every field, layer and boundary, and directories full of strays.
#include "core/files/fsck.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <map>

#include "core/files/files.h"
#include "tests/check.h"
#include "tests/disk_fixture.h"

using namespace kv;
using namespace kv::test;
namespace fs = std::filesystem;

namespace {

bool reads_fail = false;

}  // namespace

// Instead of the C library's, for all of this program.
extern "C" ssize_t pread(int fd, void* to, size_t bytes, off_t at) {
  if (reads_fail) return errno = EIO, -1;
  return ::syscall(SYS_pread64, fd, to, bytes, at);
}

namespace {

const Layout& layout() {
  static const Layout layout = layout_of_sizes({1000, 3000, 1000, 8});
  return layout;
}

struct Tree {
  Directory directory;
  RealFiles files{directory.path, false};

  std::string put(const BlockImage& image, const std::string& path) {
    fs::create_directories(fs::path(directory / path).parent_path());
    std::ofstream(directory / path, std::ios::binary).write(reinterpret_cast<const char*>(image.bytes.data), image.bytes.size);
    return path;
  }
  std::string block(uint64_t number, uint32_t tokens = 100) {
    return put(BlockImage(number, layout(), tokens), path_of(key_of_number(number), {}));
  }
  FsckReport check(FsckOptions options = {}) {
    seen.clear();
    return fsck(directory.path, options,
                {[this](Finding kind, const std::string& path, const std::string& why, Action action) {
                   seen[path] = {kind, why, action};
                 },
                 {}});
  }
  struct Seen {
    Finding kind;
    std::string why;
    Action action;
  };
  std::map<std::string, Seen> seen;
};

void overwrite(const std::string& path, uint64_t at, const void* data, size_t bytes) {
  const Fd fd(::open(path.c_str(), O_WRONLY));
  KV_INVARIANT(::pwrite(fd.get(), data, bytes, static_cast<off_t>(at)) == static_cast<ssize_t>(bytes));
}

void flip(const std::string& path, uint64_t at) {
  const Fd fd(::open(path.c_str(), O_RDWR));
  char byte = 0;
  KV_INVARIANT(::pread(fd.get(), &byte, 1, static_cast<off_t>(at)) == 1);
  byte ^= 0x10;
  KV_INVARIANT(::pwrite(fd.get(), &byte, 1, static_cast<off_t>(at)) == 1);
}

}  // namespace

TEST(good_blocks_are_good) {
  Tree tree;
  for (uint64_t n = 0; n < 20; ++n) tree.block(n, 1 + 12 * n);
  const FsckReport report = tree.check({.repair = true});
  CHECK_EQ(report.files, 20u);
  CHECK_EQ(report.read_bytes, report.bytes);
  CHECK_EQ(report.wrong(), 0u);
  CHECK_EQ(report.repaired, 0u);
  CHECK_EQ(tree.seen.size(), 0u);
}

TEST(a_block_longer_than_the_window_is_read_whole) {
  Tree tree;
  const Layout wide = layout_of_sizes({40000, 40000, 24});
  const std::string path = tree.put(BlockImage(1, wide, 200), path_of(key_of_number(1), {}));
  CHECK_EQ(tree.check().wrong(), 0u);
  CHECK(fs::file_size(tree.directory / path) > 3 * (4 << 20));
  for (const auto& [at, why] : std::map<uint64_t, std::string>{{4096 + (5 << 20), "layer 0 differs"},
                                                               {4096 + wide.layer_offset(1, 200) + (7 << 20), "layer 1 differs"},
                                                               {4096 + wide.layer_offset(2, 200), "layer 2 differs"}}) {
    flip(tree.directory / path, at);
    CHECK_EQ(tree.check().wrong(), 1u);
    CHECK_EQ(tree.seen[path].why, why);
    flip(tree.directory / path, at);
  }
}

TEST(every_damage_is_found_and_repaired) {
  const BlockImage other(2, layout(), 100);
  const uint64_t size = other.bytes.size, data = kBlockFileHeaderBytes, tail = data + layout().layers_bytes(100);
  using Damage = std::function<void(const std::string& path)>;
  std::map<std::string, Damage> damages;
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{4095}, uint64_t{4096}, uint64_t{4097}, tail, size - 4096,
                               size - 1, size + 1, size + 4096, uint64_t{1} << 40})
    damages["length " + std::to_string(bytes)] = [bytes](const std::string& path) { fs::resize_file(path, bytes); };
  for (uint32_t layer = 0; layer < 4; ++layer) {
    const uint64_t first = data + layout().layer_offset(layer, 100), last = first + layout().layer_bytes(layer, 100) - 1;
    damages["first of layer " + std::to_string(layer)] = [first](const std::string& path) { flip(path, first); };
    damages["last of layer " + std::to_string(layer)] = [last](const std::string& path) { flip(path, last); };
  }
  for (const uint64_t at : {tail, tail + 16, size - 1})
    damages["behind the layers " + std::to_string(at - tail)] = [at](const std::string& path) { flip(path, at); };
  for (uint64_t at = 0; at < data; at += 197)
    damages["header " + std::to_string(at)] = [at](const std::string& path) { flip(path, at); };
  damages["another block's file"] = [&](const std::string& path) { overwrite(path, 0, other.bytes.data, size); };
  damages["another block's data"] = [&](const std::string& path) { overwrite(path, data, other.data, size - data); };
  damages["another block's header"] = [&](const std::string& path) { overwrite(path, 0, other.bytes.data, data); };
  for (const auto& [what, damage] : damages) {
    for (const bool keep : {false, true}) {
      Tree tree;
      tree.block(3);
      const std::string path = tree.block(1);
      damage(tree.directory / path);
      const FsckReport found = tree.check();
      if (!CHECK(found.wrong() == 1 && tree.seen.size() == 1 && tree.seen[path].kind == Finding::Corrupt))
        std::fprintf(stderr, "%s\n", what.c_str());
      const FsckReport repaired = tree.check({.repair = true, .keep_corrupt = keep});
      CHECK_EQ(repaired.repaired, 1u);
      CHECK_EQ(repaired.wrong(), 0u);
      CHECK(tree.seen[path].action == (keep ? Action::Kept : Action::Removed));
      CHECK(!fs::exists(tree.directory / path));
      const FsckReport again = tree.check();
      CHECK_EQ(again.files, 1u);
      CHECK_EQ(again.wrong(), 0u);
      CHECK_EQ(again.aside, keep ? 1u : 0u);
    }
  }
}

TEST(headers_alone_are_quick_and_say_less) {
  Tree tree;
  const std::string path = tree.block(1);
  flip(tree.directory / path, 5000);
  CHECK_EQ(tree.check({.layers = false}).wrong(), 0u);
  CHECK_EQ(tree.check().wrong(), 1u);
}

TEST(only_our_names_are_removed) {
  Tree tree;
  const std::string good = tree.block(1), leaf = good.substr(0, 4);
  const std::string key = path_of(key_of_number(2), {0, 0});
  const std::string placed = path_of(key_of_number(2), {});
  const auto touch = [&](const std::string& path) {
    fs::create_directories(fs::path(tree.directory / path).parent_path());
    std::ofstream(tree.directory / path) << "x";
  };
  std::map<std::string, Finding> expected;
  for (const std::string& path : {std::string("notes.txt"), leaf + "README", leaf + key + ".bak", std::string("tmp/mine")}) {
    touch(path);
    expected[path] = Finding::Foreign;
  }
  fs::create_directories(tree.directory / "lost+found");
  expected["lost+found"] = Finding::Foreign;
  touch("tmp/0123456789abcdef.tmp");
  expected["tmp/0123456789abcdef.tmp"] = Finding::Leftover;
  touch(leaf + key);
  expected[leaf + key] = Finding::Misplaced;
  fs::create_directories(fs::path(tree.directory / placed).parent_path());
  fs::create_symlink(tree.directory / good, tree.directory / placed);
  expected[placed] = Finding::Blocked;
  const std::string fifo = path_of(key_of_number(5), {0, 0}), folder = path_of(key_of_number(6), {0, 0});
  CHECK_EQ(::mkfifo((tree.directory / fifo).c_str(), 0600), 0);
  expected[fifo] = Finding::Blocked;
  fs::create_directories(tree.directory / folder);
  touch(folder + "/inside");
  expected[folder] = Finding::Unusable;
  fs::create_symlink("/", tree.directory / "b");
  expected["b"] = Finding::Unusable;

  for (const bool repair : {false, true}) {
    const FsckReport report = tree.check({.repair = repair});
    for (const auto& [path, kind] : expected)
      if (!CHECK(tree.seen.contains(path) && tree.seen[path].kind == kind)) std::fprintf(stderr, "%s\n", path.c_str());
    CHECK_EQ(tree.seen.size(), expected.size());
    CHECK_EQ(report.wrong(), repair ? 2u : 6u);
  }
  for (const auto& [path, kind] : expected)
    CHECK_EQ(fs::exists(fs::symlink_status(tree.directory / path)), kind == Finding::Foreign || kind == Finding::Unusable);
  CHECK_EQ(tree.check().wrong(), 2u);
  CHECK(fs::exists(tree.directory / good));
}

TEST(a_directory_in_use_is_not_repaired) {
  Tree tree;
  tree.block(1);
  const Fd held(lock_directory(tree.directory.path));
  CHECK(held);
  CHECK_EQ(lock_directory(tree.directory.path), -EWOULDBLOCK);
  CHECK_EQ(tree.check().wrong(), 0u);
  try {
    tree.check({.repair = true});
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code == Code::FailedPrecondition);
  }
}

// With every number of descriptors from too few on: there is one with which the directory is listed and its block is not opened.
TEST(a_block_that_cannot_be_opened_is_not_taken_for_corrupt) {
  Tree tree;
  const std::string good = tree.block(1);
  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const Fd probe(::open("/", O_RDONLY | O_CLOEXEC));
  uint64_t unopened = 0;
  for (rlim_t more = 0; more < 12; ++more) {
    const rlimit few{static_cast<rlim_t>(probe.get()) + 1 + more, before.rlim_max};
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    try {
      const FsckReport report = tree.check({.repair = true});
      unopened += report.found[static_cast<size_t>(Finding::Unopened)];
      CHECK_EQ(report.found[static_cast<size_t>(Finding::Corrupt)], 0u);
      CHECK(more + 1 < 12 || report.wrong() == 0);
    } catch (const Error& error) {  // not even the directory
      CHECK(error.code == Code::Unavailable);
    }
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    CHECK(fs::exists(tree.directory / good));
  }
  CHECK(unopened > 0);
}

TEST(a_block_that_cannot_be_read_is_not_taken_for_corrupt) {
  Tree tree;
  const std::string good = tree.block(1);
  for (const bool keep : {false, true}) {
    reads_fail = true;
    const FsckReport report = tree.check({.repair = true, .keep_corrupt = keep});
    reads_fail = false;
    CHECK(tree.seen[good].kind == Finding::Unreadable);
    CHECK_EQ(name(tree.seen[good].kind), "unreadable");
    CHECK_EQ(report.wrong(), 1u);
    CHECK_EQ(report.repaired, 0u);
    CHECK(fs::exists(tree.directory / good));
  }
  tree.put(BlockImage(2, layout(), 100), path_of(key_of_number(1), {}));  // and after an error, an end is an end
  CHECK_EQ(tree.check({}).found[static_cast<size_t>(Finding::Corrupt)], 1u);
}

TEST(nothing_is_made_where_nothing_was) {
  Directory directory;
  CHECK_EQ(fsck(directory.path, {.repair = true}, {}).files, 0u);
  CHECK(fs::is_empty(directory.path));
  try {
    fsck(directory / "none", {}, {});
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code == Code::Unavailable);
  }
  CHECK(fs::is_empty(directory.path));
}
