// Goal: stretches come whole and with their checksums, from several threads at one time; a failure names where; nothing writes
// into the memory once read() is back; close() ends what runs. Method: a real file, both engines, and the faults of faults.h:
// errors, short reads, bits that flip, a queue without slots.
#include "core/weights/stretch_reader.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/files/faults.h"
#include "tests/check.h"
#include "tests/disk_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kBytes = 3 * StretchReader::kPartBytes + 5 * kPageBytes;

// A file of known bytes, and memory for it.
struct Fixture {
  Directory directory;
  std::vector<std::byte> bytes = std::vector<std::byte>(kBytes);
  Fd fd;
  bool direct = true;
  std::byte* memory;
  std::unique_ptr<Faults> faults;
  std::unique_ptr<StretchReader> reader;

  explicit Fixture(bool asked, const std::string& schedule = "") {
    uint64_t word = 7;
    for (std::byte& byte : bytes) word = word * 6364136223846793005 + 1, byte = static_cast<std::byte>(word >> 56);
    const std::string path = directory / "weights";
    const Fd out(::open(path.c_str(), O_CREAT | O_WRONLY, 0600));
    KV_INVARIANT(::write(out.get(), bytes.data(), kBytes) == static_cast<ssize_t>(kBytes));
    if (asked) fd.reset(::open(path.c_str(), O_RDONLY | O_DIRECT));
    if (!fd) direct = false, fd.reset(::open(path.c_str(), O_RDONLY));
    memory = static_cast<std::byte*>(::mmap(nullptr, 4 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::unique_ptr<Engine> engine;
    if (direct)
      engine = std::make_unique<AioEngine>(3);
    else
      engine = std::make_unique<ThreadEngine>(3);
    if (!schedule.empty()) {
      faults = std::make_unique<Faults>(schedule, "", nullptr, std::move(engine));
      engine = faults->take_engine();
    }
    reader = std::make_unique<StretchReader>(std::move(engine));
  }
  ~Fixture() {
    reader.reset();
    ::munmap(memory, 4 * kBytes);
  }
  Stretch whole(uint64_t slot = 0) { return {fd.get(), 0, memory + slot * kBytes, kBytes, kBytes}; }
  bool right(uint64_t slot = 0) const { return std::memcmp(memory + slot * kBytes, bytes.data(), kBytes) == 0; }
};

}  // namespace

TEST(stretches_come_whole_with_their_checksums) {
  for (const bool direct : {true, false}) {
    Fixture fixture(direct);
    Stretch two[] = {fixture.whole(), {fixture.fd.get(), kPageBytes, fixture.memory + kBytes, 2 * kPageBytes, 5000}};
    CHECK(!fixture.reader->read(two));
    CHECK(fixture.right());
    CHECK(two[0].crc == crc32c(fixture.bytes.data(), kBytes));
    CHECK(two[1].crc == crc32c(fixture.bytes.data() + kPageBytes, 5000));
  }
}

TEST(several_threads_read_at_one_time) {
  for (const bool direct : {true, false}) {
    Fixture fixture(direct);
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    for (uint64_t slot = 0; slot < 4; ++slot)
      threads.emplace_back([&, slot] {
        for (int i = 0; i < 5; ++i) {
          std::memset(fixture.memory + slot * kBytes, 0, kBytes);
          Stretch stretch = fixture.whole(slot);
          if (fixture.reader->read({&stretch, 1}, slot == 3) || !fixture.right(slot) ||
              stretch.crc != crc32c(fixture.bytes.data(), kBytes))
            ++wrong;
        }
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
  }
}

TEST(short_reads_and_a_full_queue_are_gone_on_with) {
  for (const bool direct : {true, false})
    for (const char* seed : {"1", "2", "3", "4", "5"}) {
      Fixture fixture(direct, std::string("seed=") + seed + ",read_short=@2,read_full=@3,read_short=@5");
      Stretch stretch = fixture.whole();
      const auto failure = fixture.reader->read({&stretch, 1});
      if (failure) {  // a short read of nothing: as at a file's end, and named as such
        CHECK(failure->error == 0);
        CHECK(failure->offset < kBytes);
        continue;
      }
      CHECK(fixture.right());
      CHECK(stretch.crc == crc32c(fixture.bytes.data(), kBytes));
    }
}

TEST(a_failure_names_where_and_the_next_read_works) {
  for (const bool direct : {true, false}) {
    Fixture fixture(direct, "read_eio=@2");
    Stretch two[] = {fixture.whole(), fixture.whole(1)};
    const auto failure = fixture.reader->read(two);
    CHECK(failure.has_value());
    CHECK(failure->stretch == 0);
    CHECK(failure->offset == StretchReader::kPartBytes);
    CHECK(failure->error == EIO);
    std::memset(fixture.memory, 0, kBytes);  // nothing writes there any more
    for (uint64_t i = 0; i < kBytes; ++i) KV_INVARIANT(fixture.memory[i] == std::byte{0});
    CHECK(!fixture.reader->read(two));
    CHECK(fixture.right(1));
  }
}

TEST(other_bytes_have_another_checksum) {
  Fixture fixture(true, "read_flip=@2");
  Stretch stretch = fixture.whole();
  CHECK(!fixture.reader->read({&stretch, 1}));
  CHECK(stretch.crc != crc32c(fixture.bytes.data(), kBytes));
}

TEST(the_end_of_the_file_is_a_failure_unless_no_byte_behind_it_is_needed) {
  for (const bool direct : {true, false}) {
    Fixture fixture(direct);
    const uint64_t last = kBytes - 2 * kPageBytes;
    Stretch stretch{fixture.fd.get(), last, fixture.memory, 4 * kPageBytes, 2 * kPageBytes};
    CHECK(!fixture.reader->read({&stretch, 1}));
    CHECK(stretch.crc == crc32c(fixture.bytes.data() + last, 2 * kPageBytes));
    stretch.need += 1;
    const auto failure = fixture.reader->read({&stretch, 1});
    CHECK(failure.has_value());
    CHECK(failure->error == 0);
    CHECK(failure->offset == kBytes);
  }
}

TEST(close_ends_reads_that_run_and_all_after) {
  Fixture fixture(true);
  std::atomic<int> ended = 0;
  std::vector<std::thread> threads;
  for (uint64_t slot = 0; slot < 4; ++slot)
    threads.emplace_back([&, slot] {
      for (;;) {
        Stretch stretch = fixture.whole(slot);
        try {
          fixture.reader->read({&stretch, 1});
        } catch (const Error& error) {
          ended += error.code == Code::Closed;
          return;
        }
      }
    });
  fixture.reader->close();
  for (std::thread& thread : threads) thread.join();
  CHECK(ended == 4);
}

namespace {

// Counts pages that its transfers would wait for.
struct Pages final : Engine {
  std::unique_ptr<Engine> inner = std::make_unique<ThreadEngine>(3);
  std::atomic<uint64_t>& missing;

  explicit Pages(std::atomic<uint64_t>& count) : missing(count) {}
  bool submit(Transfer* transfer) override {
    std::vector<unsigned char> there(transfer->parts[0].iov_len / kPageBytes);
    KV_INVARIANT(::mincore(transfer->parts[0].iov_base, transfer->parts[0].iov_len, there.data()) == 0);
    for (const unsigned char page : there) missing += (page & 1) == 0;
    return inner->submit(transfer);
  }
  size_t completed(std::span<Transfer*> done) override { return inner->completed(done); }
  int event_fd() const override { return inner->event_fd(); }
  uint32_t depth() const override { return inner->depth(); }
  uint32_t in_flight() const override { return inner->in_flight(); }
  std::string name() const override { return inner->name(); }
};

}  // namespace

TEST(no_read_waits_for_pages_that_the_memory_does_not_have) {
  Fixture file(false);
  std::atomic<uint64_t> missing = 0;
  StretchReader reader(std::make_unique<Pages>(missing));
  Stretch stretch = file.whole();
  CHECK(!reader.read({&stretch, 1}));
  CHECK(file.right());
  CHECK(missing == 0);
}

namespace {

// Reads nothing, and says that all of it came when so many are under way.
struct AtOnce final : Engine {
  std::vector<Transfer*> taken;
  std::atomic<bool>& came;
  const uint32_t parts;
  Fd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};

  AtOnce(std::atomic<bool>& told, uint32_t count) : came(told), parts(count) {}
  bool submit(Transfer* transfer) override {
    transfer->result = static_cast<int64_t>(transfer->bytes());
    taken.push_back(transfer);
    const uint64_t wakeup = 1;
    if (taken.size() == parts) KV_INVARIANT(::write(event.get(), &wakeup, sizeof wakeup) == sizeof wakeup);
    return true;
  }
  size_t completed(std::span<Transfer*> done) override {
    if (taken.size() < parts) return 0;
    const size_t count = std::min(done.size(), taken.size());
    std::copy_n(taken.end() - static_cast<ptrdiff_t>(count), count, done.begin());
    taken.resize(taken.size() - count);
    came = true, came.notify_all();
    return count;
  }
  int event_fd() const override { return event.get(); }
  uint32_t depth() const override { return parts; }
  uint32_t in_flight() const override { return static_cast<uint32_t>(taken.size()); }
  std::string name() const override { return "at once"; }
};

}  // namespace

TEST(close_while_checksums_are_computed_gives_none_of_a_part_of_the_bytes) {
  constexpr uint64_t kParts = 24, kAll = kParts * StretchReader::kPartBytes;
  std::vector<std::byte> memory(kAll + kPageBytes, std::byte{3});
  const uint32_t whole = crc32c(memory.data(), kAll);
  for (int turn = 0; turn < 5; ++turn) {
    std::atomic<bool> came = false;
    StretchReader reader(std::make_unique<AtOnce>(came, kParts));
    std::thread closes([&] {
      came.wait(false);
      reader.close();
    });
    Stretch stretch{-1, 0, memory.data(), kAll, kAll};
    try {
      const auto failure = reader.read({&stretch, 1});
      CHECK(!failure);
      CHECK(stretch.crc == whole);
    } catch (const Error& error) {
      CHECK(error.code == Code::Closed);
    }
    closes.join();
  }
}
