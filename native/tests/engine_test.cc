// Goal: what an engine writes, it reads back; it never takes more than its depth, reports each transfer once, with its error
// where there is one, and rings its eventfd until all is taken.
// Method: real files with direct I/O on the disk of the build; where that refuses direct I/O, the test says so and is skipped.
#include "core/files/engine.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>

#include "core/files/files.h"
#include "tests/check.h"
#include "tests/disk_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

// A directory with direct I/O, an engine on it.
struct Fixture {
  Directory directory;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<RealFiles> files;
};

void with_each_engine(void (*test)(Fixture&)) {
  Fixture fixture;
  const Fd probe(::open((fixture.directory / "probe").c_str(), O_CREAT | O_RDWR | O_DIRECT, 0600));
  if (!probe) {
    std::printf("skipped for aio: no direct I/O here\n");
  } else {
    fixture.engine = std::make_unique<AioEngine>(4);
    fixture.files = std::make_unique<RealFiles>(fixture.directory.path, true);
    test(fixture);
  }
  fixture.engine = std::make_unique<ThreadEngine>(4);
  fixture.files = std::make_unique<RealFiles>(fixture.directory.path, false);
  test(fixture);
}

int new_file(Fixture& fixture, uint64_t bytes) {
  std::string temp;
  const int fd = fixture.files->create_temp(bytes, &temp);
  KV_INVARIANT(fd >= 0);
  return fd;
}

bool ringing(Engine& engine) {
  pollfd event{engine.event_fd(), POLLIN, 0};
  return ::poll(&event, 1, 0) == 1;
}

}  // namespace

TEST(a_block_is_written_and_read_whole) {
  with_each_engine([](Fixture& fixture) {
    BlockImage image(1, layout_of_sizes({1000, 2000, 3000}), 100);
    const Fd fd(new_file(fixture, image.bytes.size));
    Transfer write = transfer(fd.get(), true, 0, image.bytes.data, 4096);
    write.parts[1] = {image.data, image.header().data_bytes};
    write.count = 2;
    CHECK_EQ(run(*fixture.engine, write), static_cast<int64_t>(image.bytes.size));
    Aligned back(image.bytes.size);
    CHECK_EQ(run(*fixture.engine, transfer(fd.get(), false, 0, back.data, back.size)), static_cast<int64_t>(back.size));
    CHECK(std::memcmp(back.data, image.bytes.data, back.size) == 0);
    CHECK_EQ(run(*fixture.engine, transfer(fd.get(), false, 4096 + 512, back.data, 1024)), 1024);  // a layer of it
    CHECK(std::memcmp(back.data, image.data + 512, 1024) == 0);
  });
}

TEST(no_more_in_flight_than_its_depth) {
  with_each_engine([](Fixture& fixture) {
    Engine& engine = *fixture.engine;
    constexpr size_t kPiece = 1 << 20;
    const Fd fd(new_file(fixture, 8 * kPiece));
    Aligned data(8 * kPiece);
    std::vector<Transfer> transfers;
    for (size_t i = 0; i < 8; ++i) transfers.push_back(transfer(fd.get(), true, i * kPiece, data.data + i * kPiece, kPiece));
    std::set<Transfer*> done;
    size_t next = 0;
    while (done.size() < 8) {
      while (next < 8 && engine.submit(&transfers[next])) ++next;
      CHECK(engine.in_flight() <= engine.depth());
      if (engine.in_flight() == engine.depth()) {
        Transfer extra = transfers[7];
        CHECK(!engine.submit(&extra));
      }
      for (Transfer* transfer : await(engine, 1)) {
        CHECK(done.insert(transfer).second);
        CHECK_EQ(transfer->result, static_cast<int64_t>(kPiece));
      }
    }
    CHECK_EQ(engine.in_flight(), 0u);
    // The kernel tells first and rings then: what was taken in between rings for nothing, once for each.
    int idle = 0;
    for (Transfer* none[kMaxDepth]; idle < 100 && ringing(engine); ++idle) CHECK_EQ(engine.completed(none), 0u);
    CHECK(idle <= 8);
  });
}

TEST(it_rings_until_all_is_taken) {
  with_each_engine([](Fixture& fixture) {
    Engine& engine = *fixture.engine;
    const Fd fd(new_file(fixture, 4 * 4096));
    Aligned data(4 * 4096);
    std::vector<Transfer> transfers;
    for (size_t i = 0; i < 4; ++i) transfers.push_back(transfer(fd.get(), true, i * 4096, data.data + i * 4096, 4096));
    for (Transfer& t : transfers) CHECK(engine.submit(&t));
    std::set<Transfer*> done;
    while (done.size() < 4) {
      pollfd event{engine.event_fd(), POLLIN, 0};
      if (::poll(&event, 1, 10'000) != 1) break;
      Transfer* transfer = nullptr;
      if (engine.completed({&transfer, 1}) == 1) done.insert(transfer);
    }
    CHECK_EQ(done.size(), 4u);
  });
}

TEST(an_error_comes_back_as_a_completion) {
  with_each_engine([](Fixture& fixture) {
    Engine& engine = *fixture.engine;
    Aligned data(8192);
    CHECK_EQ(run(engine, transfer(-1, false, 0, data.data, 4096)), -EBADF);
    const Fd fd(new_file(fixture, 8192));
    CHECK_EQ(run(engine, transfer(fd.get(), false, 8192, data.data, 4096)), 0);     // behind the end
    CHECK_EQ(run(engine, transfer(fd.get(), false, 4096, data.data, 8192)), 4096);  // short at the end
    CHECK_EQ(engine.in_flight(), 0u);
  });
}

// A client can truncate the pool while the engine works on it: an error, not the end of the daemon.
TEST(memory_that_is_gone_is_an_error) {
  with_each_engine([](Fixture& fixture) {
    const Fd memory(::memfd_create("pool", MFD_CLOEXEC));
    KV_INVARIANT(::ftruncate(memory.get(), 1 << 20) == 0);
    const Mapping map(memory.get(), 1 << 20, true);
    std::memset(map.data(), 7, 1 << 20);
    const Fd fd(new_file(fixture, 1 << 20));
    CHECK_EQ(run(*fixture.engine, transfer(fd.get(), true, 0, map.data(), 1 << 20)), 1 << 20);
    KV_INVARIANT(::ftruncate(memory.get(), 0) == 0);
    CHECK_EQ(run(*fixture.engine, transfer(fd.get(), true, 0, map.data(), 1 << 20)), -EFAULT);
    CHECK_EQ(run(*fixture.engine, transfer(fd.get(), false, 0, map.data(), 1 << 20)), -EFAULT);
  });
}

TEST(an_engine_that_goes_waits_for_its_transfers) {
  with_each_engine([](Fixture& fixture) {
    const Fd fd(new_file(fixture, 4 << 20));
    Aligned data(4 << 20), back(4 << 20);
    std::memset(data.data, 5, data.size);
    Transfer write = transfer(fd.get(), true, 0, data.data, data.size);
    CHECK(fixture.engine->submit(&write));
    fixture.engine.reset();
    CHECK_EQ(::pread(fd.get(), back.data, back.size, 0), static_cast<ssize_t>(back.size));
    CHECK(std::memcmp(data.data, back.data, back.size) == 0);
  });
}

TEST(its_depth_is_bounded) {
  CHECK_EQ(AioEngine(100).depth(), kMaxDepth);
  CHECK_EQ(AioEngine(0).depth(), 1u);
  CHECK_EQ(ThreadEngine(100).depth(), kMaxDepth);
  CHECK_EQ(ThreadEngine(0).depth(), 1u);
}

TEST(the_choice_names_its_reason_and_works) {
  Directory here;
  for (const std::string& directory : {here.path, std::string("/dev/shm/kv_choice_") + std::to_string(::getpid())}) {
    Choice choice = choose_engine(directory, 4);
    std::printf("%s: %s\n", directory.starts_with("/dev") ? "tmpfs" : "build", choice.reason.c_str());
    CHECK_EQ(choice.direct, choice.engine->name() == "aio");
    CHECK(choice.reason.starts_with(choice.engine->name()));
    CHECK(choice.alignment <= kPageBytes);
    if (directory.starts_with("/dev")) CHECK_EQ(choice.engine->name(), "threads");
    RealFiles files(directory, choice.direct);
    std::string temp;
    const Fd fd(files.create_temp(8192, &temp));
    Aligned data(8192);
    CHECK_EQ(run(*choice.engine, transfer(fd.get(), true, 0, data.data, 8192)), 8192);
    CHECK_EQ(run(*choice.engine, transfer(fd.get(), false, choice.alignment, data.data, 4096)), 4096);
    CHECK_EQ(files.remove(temp), 0);
    CHECK(std::filesystem::is_empty(directory + "/tmp"));
    if (directory != here.path) std::filesystem::remove_all(directory);
  }
  try {
    choose_engine("/proc/nothing", 4);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code == Code::Unavailable);
  }
}
