// Goal: a block that comes from disk in several pieces is the block that was written, whatever lies on a piece's boundary - a
// layer, padding, what is behind the layers - however many come at once; and a changed byte in any piece is a miss.
//
// Method: layouts made for the boundaries of Staging::kPieceBytes, counted from the end of the file; the extent's bytes before
// and after, over a pool of zeros. Proven by removal (in a copy of the tree): take_layers() copies no padding, or begins a
// checksum anew with each piece: each fails here.
#include <fstream>

#include "check.h"
#include "disk_fixture.h"
#include "tier_fixture.h"

namespace kv {
namespace {

namespace fs = std::filesystem;
using test::eventually;
using test::key;
using test::kMiB;
using test::mixed;

struct Shape {
  std::vector<uint32_t> layers;  // their bytes
  uint32_t meta;
};

// A block of which the length, with the page of its checksums, is no multiple of a piece; one of many layers; one that is exactly
// two pieces; what is behind the layers longer than a piece; a layer over three pieces; less than a piece.
const std::vector<Shape> kShapes = {
    {{700'001, 3, 700'001, 900'000}, 100},
    {std::vector<uint32_t>(40, 131'072), 0},
    {{2 * 1'048'576 - 4096}, 0},
    {{600'000, 600'000}, 1'048'576},
    {{3 * 1'048'576 + 1}, 513},
    {{500'000, 300'000}, 64},
};

// Passes everything on, and lets a client cut the pool as a piece behind the first is about to be read, or was.
enum class Cut { Never, BeforeReading, AfterReading };
class CuttingEngine final : public Engine {
 public:
  CuttingEngine(std::unique_ptr<Engine> engine, int pool, const std::atomic<Cut>& when)
      : engine_(std::move(engine)), pool_(pool), when_(when) {}
  bool submit(Transfer* transfer) override {
    cut(*transfer, Cut::BeforeReading);
    return engine_->submit(transfer);
  }
  size_t completed(std::span<Transfer*> done) override {
    const size_t count = engine_->completed(done);
    for (Transfer* transfer : done.first(count)) cut(*transfer, Cut::AfterReading);
    return count;
  }
  int event_fd() const override { return engine_->event_fd(); }
  uint32_t depth() const override { return engine_->depth(); }
  uint32_t in_flight() const override { return engine_->in_flight(); }
  std::string name() const override { return "cutting"; }

 private:
  void cut(const Transfer& transfer, Cut when) {
    if (!transfer.write && transfer.offset != 0 && when_.load() == when) KV_INVARIANT(::ftruncate(pool_, 64 << 10) == 0);
  }
  const std::unique_ptr<Engine> engine_;
  const int pool_;
  const std::atomic<Cut>& when_;
};

class Rig {
 public:
  static constexpr uint64_t kPoolBytes = 32 * kMiB;  // each test's is filled, and written over, some dozen times
  explicit Rig(const Shape& shape, bool huge_pool = false) : segments_(kPoolBytes, 256) {
    segments_.disk = true;
    store = segments_.open(false);
    layout_id_ = store->register_layout(blob_of(shape));
    filler_ = store->register_layout(test::layout_blob(1, 1 << 20, 1));
    owner_ = store->open_owner();
    KV_INVARIANT(eventually([&] { return store->header().frontier.load() == segments_.capacity; }));
    DiskTier::Options options;
    Choice choice = choose_engine(directory_.path, 16);
    options.directories.push_back({directory_.path, std::make_unique<RealFiles>(directory_.path, choice.direct),
                                   std::make_unique<CuttingEngine>(std::move(choice.engine), segments_.pool.get(), cut)});
    options.quota_bytes = 1 << 30;
    options.huge_pool = huge_pool;
    options.fanout = test::kFewDirectories;
    tier = std::make_unique<DiskTier>(*store, std::move(options));
    tier->start();
    KV_INVARIANT(eventually([&] { return !tier->stats().indexing; }));
  }
  ~Rig() {
    tier.reset();
    store.reset();
  }
  static std::vector<uint8_t> blob_of(const Shape& shape) {
    const auto layers = static_cast<uint32_t>(shape.layers.size());
    std::vector<uint32_t> words{layers, 2, 1, 1, 0, 1, 0, shape.meta, 0};
    words.insert(words.end(), shape.layers.begin(), shape.layers.end());
    std::vector<uint8_t> blob(4 + 4 * words.size());
    std::memcpy(blob.data(), "KVL1", 4);
    std::memcpy(blob.data() + 4, words.data(), 4 * words.size());
    return blob;
  }

  // Fills the whole extent, padding too.
  std::vector<uint8_t> put_on_disk(uint64_t number) {
    const CreateItem item{.key = key(number), .fingerprint = number, .tokens = 1, .base_position = 0, .parent = 0};
    const Granted granted = store->create({owner_, layout_id_, kDefaultPriority, 0, {&item, 1}})[0];
    KV_INVARIANT(granted.status == Grant::Granted);
    std::vector<uint8_t> bytes(granted.extent.length);
    for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
      const uint64_t word = mixed(number * 1'000'003 + i);
      std::memcpy(bytes.data() + i, &word, 8);
    }
    KV_INVARIANT(::pwrite(segments_.pool.get(), bytes.data(), bytes.size(), static_cast<off_t>(granted.extent.offset)) ==
                 static_cast<ssize_t>(bytes.size()));
    const Seal seal{granted.handle, false};
    CHECK(store->seal(owner_, {&seal, 1})[0] == Done::Ok && test::touch(*store, key(number)));
    CHECK(eventually([&] { return (store->lookup(key(number)).snapshot.control.flags() & kFlagOnDisk) != 0; }));
    return bytes;
  }
  void evict() {
    for (uint64_t i = 0; i < kFillers; ++i) {
      const CreateItem item{.key = key(next_ += 1), .fingerprint = 0, .tokens = 1, .base_position = 0, .parent = 0};
      const Granted granted = store->create({owner_, filler_, 90, 0, {&item, 1}})[0];
      const Seal seal{granted.handle, false};
      if (granted.status == Grant::Granted) store->seal(owner_, {&seal, 1});
    }
    for (uint64_t i = next_ - kFillers; i < next_; ++i) store->remove(key(i + 1));
    static const std::vector<uint8_t> zeros(kPoolBytes);
    KV_INVARIANT(::pwrite(segments_.pool.get(), zeros.data(), zeros.size(), 0) == static_cast<ssize_t>(zeros.size()));
  }
  static constexpr uint64_t kFillers = kPoolBytes / kMiB + 12;  // of a MiB: more than fit
  void load(std::span<const uint64_t> numbers) {
    for (uint64_t number : numbers) tier->promote(key(number), 35);
    CHECK(eventually([&] {
      const auto now = tier->stats();
      return now.loads_in_flight + now.loads_waiting == 0;
    }));
  }
  Presence presence(uint64_t number) { return store->lookup(key(number)).presence; }
  // What the pool holds of it, with the checksums as they were before: those a load leaves are the header's.
  std::vector<uint8_t> bytes_of(uint64_t number, const std::vector<uint8_t>& before) {
    const Extent extent = store->lookup(key(number)).snapshot.extent;
    std::vector<uint8_t> bytes(extent.length);
    KV_INVARIANT(::pread(segments_.pool.get(), bytes.data(), bytes.size(), static_cast<off_t>(extent.offset)) ==
                 static_cast<ssize_t>(bytes.size()));
    const uint64_t sums = layout().checksums_offset(1);
    std::copy_n(before.begin() + static_cast<ptrdiff_t>(sums), 4 * layout().num_layers(),
                bytes.begin() + static_cast<ptrdiff_t>(sums));
    return bytes;
  }
  const Layout& layout() {
    layout_ = store->layout(layout_id_)->layout;
    return layout_;
  }
  void flip(uint64_t number, uint64_t at) {
    const fs::path path = fs::path(directory_.path) / path_of(key(number), test::kFewDirectories);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(kBlockFileHeaderBytes + at));
    const char old = static_cast<char>(file.get());
    file.seekp(static_cast<std::streamoff>(kBlockFileHeaderBytes + at));
    file.put(static_cast<char>(old ^ 1));
  }

  std::atomic<Cut> cut{Cut::Never};
  std::unique_ptr<Store> store;
  std::unique_ptr<DiskTier> tier;

 private:
  test::Segments segments_;
  test::Directory directory_;
  Layout layout_;
  uint32_t layout_id_ = 0, filler_ = 0, owner_ = 0;
  uint64_t next_ = 1'000'000;
};

// More at once than there are buffers.
void every_byte_comes_back(bool huge_pool) {
  for (const Shape& shape : kShapes) {
    Rig rig(shape, huge_pool);
    std::vector<uint64_t> numbers{1, 2, 3, 4, 5, 6};
    std::vector<std::vector<uint8_t>> before;
    for (uint64_t number : numbers) before.push_back(rig.put_on_disk(number));
    rig.evict();
    for (uint64_t number : numbers) CHECK_EQ(rig.presence(number), Presence::OnDisk);
    rig.load(numbers);
    for (uint64_t number : numbers) {
      CHECK_EQ(rig.presence(number), Presence::Resident);
      CHECK(rig.bytes_of(number, before[number - 1]) == before[number - 1]);
    }
    CHECK_EQ(rig.tier->stats().loaded, numbers.size());
    rig.store->check_integrity();
  }
}

TEST(every_byte_comes_back_through_buffers) { every_byte_comes_back(false); }
TEST(every_byte_comes_back_in_place) { every_byte_comes_back(true); }

void a_changed_byte_is_a_miss(bool huge_pool) {
  for (const Shape& shape : kShapes) {
    Rig rig(shape, huge_pool);
    const Layout& layout = rig.layout();
    const uint64_t size = layout.extent_bytes(1);
    std::vector<uint64_t> places{layout.layers_bytes(1), size - 1};
    for (uint32_t layer = 0; layer < layout.num_layers(); layer += 7)
      places.insert(places.end(),
                    {layout.layer_offset(layer, 1), layout.layer_offset(layer, 1) + layout.layer_bytes(layer, 1) - 1});
    for (uint64_t end = size; end > Staging::kPieceBytes; end -= Staging::kPieceBytes)  // in a layer here, and behind the layers
      if (const uint64_t at = end - Staging::kPieceBytes; shape.layers.size() == 1 || at >= layout.layers_bytes(1))
        places.insert(places.end(), {at - 1, at});
    for (size_t first = 0; first < places.size(); first += 5) {
      std::vector<uint64_t> numbers;
      for (size_t i = first; i < std::min(first + 5, places.size()); ++i) numbers.push_back(i + 1);
      for (uint64_t number : numbers) rig.put_on_disk(number);
      rig.evict();
      for (uint64_t number : numbers) rig.flip(number, places[number - 1]);
      rig.load(numbers);
      for (uint64_t number : numbers) CHECK_EQ(rig.presence(number), Presence::Missing);
    }
    CHECK_EQ(rig.tier->stats().corrupt, places.size());
    CHECK_EQ(rig.tier->stats().loaded, 0u);
    rig.store->check_integrity();
  }
}

TEST(a_changed_byte_in_any_piece_is_a_miss) { a_changed_byte_is_a_miss(false); }
TEST(a_changed_byte_in_any_piece_read_in_place_is_a_miss) { a_changed_byte_is_a_miss(true); }

// A client cuts the pool: the kernel finds no memory to read into, or what was read is gone before it was looked at.
TEST(a_pool_cut_under_a_load_in_place_costs_no_file_and_blames_no_directory) {
  for (const Cut when : {Cut::BeforeReading, Cut::AfterReading})
    for (const Shape& shape : {kShapes[0], kShapes[3], kShapes[4]}) {
      Rig rig(shape, true);
      std::vector<uint64_t> numbers{1, 2, 3, 4, 5, 6};
      for (uint64_t number : numbers) rig.put_on_disk(number);
      rig.evict();
      rig.cut = when;
      rig.load(numbers);
      const DiskTier::Stats stats = rig.tier->stats();
      CHECK_EQ(stats.loaded, 0u);
      CHECK_EQ(stats.corrupt, 0u);
      CHECK_EQ(stats.files, numbers.size());
      CHECK(rig.tier->conditions().empty());
    }
}

// Of the pool, in this process's page tables.
uint64_t mapped_bytes() {
  std::ifstream maps("/proc/self/smaps");
  uint64_t sum = 0;
  bool of_pool = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(" kB") == std::string::npos) of_pool = line.find("memfd:pool") != std::string::npos;
    if (of_pool && line.starts_with("Rss:")) sum += std::stoull(line.substr(4)) << 10;
  }
  return sum;
}

// Page tables are what makes a process take long to end. Proven by removal: fault_in() of the whole pool, no unmap_pool().
TEST(the_page_tables_hold_what_was_moved_and_nothing_after_the_end) {
  Rig rig(kShapes.back());
  CHECK(eventually([&] { return rig.store->stats().faulted_bytes == rig.store->options().capacity_bytes; }));
  std::vector<uint64_t> numbers{1, 2, 3, 4, 5, 6, 7, 8};
  for (uint64_t number : numbers) rig.put_on_disk(number);
  CHECK(mapped_bytes() >= 8 * 800'000);  // it can be seen
  rig.evict();
  rig.load(numbers);
  CHECK_EQ(rig.tier->stats().loaded, numbers.size());
  CHECK(mapped_bytes() <= Rig::kPoolBytes / 2);
  rig.tier->stop();
  CHECK(mapped_bytes() <= kMiB);
}

}  // namespace
}  // namespace kv
