#include "core/shared/shared_reader.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/base/error.h"
#include "core/base/polling.h"

namespace kv {
namespace {

constexpr size_t kReaders = 2;
constexpr size_t kMaxNodes = 64;
constexpr size_t kMaxFlights = 4096;
constexpr size_t kMaxInVain = 4096;
constexpr uint64_t kInVainMs = 1000;  // longer than the peers, who are asked next, need for their answer
constexpr uint64_t kListMs = 2000;    // before the directory is listed again
constexpr size_t kMaxName = 63;

// All of it, or why not: 0 where the file ends before.
ssize_t read_all(int fd, std::byte* to, uint64_t bytes, uint64_t offset) {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t got = ::pread(fd, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? -errno : 0;
    done += static_cast<uint64_t>(got);
  }
  return static_cast<ssize_t>(bytes);
}

bool is_ours(const std::string& path) {
  struct stat about;
  return ::lstat(path.c_str(), &about) == 0 && S_ISDIR(about.st_mode) && about.st_uid == ::geteuid() && !(about.st_mode & 022);
}

}  // namespace

SharedReader::SharedReader(Store& store, Options options, Fetcher* next)
    : store_(store), options_(std::move(options)), next_(next), window_(store, true) {}

void SharedReader::start() {
  owner_ = store_.open_owner();
  for (size_t i = 0; i < kReaders; ++i) threads_.emplace_back([this] { run(); });
  store_.attach_peers(this);
  store_.tell_peers(1);
}

void SharedReader::stop() {
  if (!owner_ || stop_.exchange(true)) return;
  store_.attach_peers(next_);
  store_.tell_peers(-1);
  {
    std::lock_guard lock(mutex_);
    work_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  store_.end_session(owner_);
}

namespace {
Wanting both(const Wanting& a, const Wanting& b) {
  const uint64_t first = a.first | b.first;
  return a.who == b.who ? Wanting{a.who, std::max(a.until_ms, b.until_ms), first} : Wanting{.first = first};
}
}  // namespace

Presence SharedReader::fetch(const Key& key, uint32_t priority, Wanting wanting) {
  {
    std::lock_guard lock(mutex_);
    if (const auto flight = flights_.find(key); flight != flights_.end()) {
      flight->second = both(flight->second, wanting);
      return Presence::Pending;
    }
    bool look = !stop_ && flights_.size() < kMaxFlights && (!nodes_->empty() || monotonic_ms() - listed_ms_ >= kListMs);
    if (const auto vain = in_vain_.find(key); look && vain != in_vain_.end()) {
      look = monotonic_ms() >= vain->second;
      if (look) in_vain_.erase(vain);
    }
    if (look) {
      flights_.emplace(key, wanting);
      queue_.push_back({key, priority});
      work_.notify_one();
      return Presence::Pending;
    }
  }
  return next_ ? next_->fetch(key, priority, wanting) : Presence::Missing;
}

void SharedReader::also_wanted(const Key& key, Wanting wanting) {
  {
    std::lock_guard lock(mutex_);
    if (const auto flight = flights_.find(key); flight != flights_.end()) flight->second = both(flight->second, wanting);
  }
  if (next_) next_->also_wanted(key, wanting);
}

// A look at a directory is short: only what the next brings is let go of.
void SharedReader::let_go_of_all(Waiter waiter) {
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, wanting] : flights_)
      if (wanting.who == waiter) wanting.until_ms = 0;
  }
  if (next_) next_->let_go_of_all(waiter);
}

SharedReader::Stats SharedReader::stats() {
  std::lock_guard lock(mutex_);
  Stats out{};
  out.nodes = nodes_->size(), out.waiting = flights_.size();
#define X(name) out.name = name##_.load();
  KV_SHARED_COUNTERS(X)
#undef X
  return out;
}

// ---------------------------------------------------------------- a reader's thread

void SharedReader::run() {
  ::pthread_setname_np(::pthread_self(), "kv-shared");
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    const Wanted wanted = queue_.front();
    queue_.pop_front();
    lock.unlock();
    const Outcome outcome = look(wanted.key);
    count(outcome);
    const bool here = outcome == Outcome::Loaded || outcome == Outcome::Needless;
    lock.lock();
    if (!here && next_ && !stop_) {  // before who waits asks again
      next_->fetch(wanted.key, wanted.priority, flights_.at(wanted.key));
      next_->go();
    }
    flights_.erase(wanted.key);
    if (!here) {
      if (in_vain_.size() >= kMaxInVain) in_vain_.clear();
      in_vain_[wanted.key] = monotonic_ms() + kInVainMs;
    }
    lock.unlock();
    store_.load_ended();
    lock.lock();
  }
}

void SharedReader::count(Outcome outcome) {
  switch (outcome) {
    case Outcome::Loaded: loaded_ += 1; break;
    case Outcome::Missing: missing_ += 1; break;
    case Outcome::Gone: gone_ += 1; break;
    case Outcome::Corrupt: corrupt_ += 1; break;
    case Outcome::NoSpace: no_space_ += 1; break;
    case Outcome::Failed: failed_ += 1; break;
    case Outcome::Needless: break;
  }
}

// Who keeps blocks here, looked up anew now and then, by one thread while the other waits.
std::shared_ptr<const SharedReader::Nodes> SharedReader::nodes() {
  std::lock_guard one_at_a_time(listing_);
  {
    std::lock_guard lock(mutex_);
    if (listed_ms_ && monotonic_ms() - listed_ms_ < kListMs) return nodes_;
  }
  auto found = list();
  std::lock_guard lock(mutex_);
  listed_ms_ = monotonic_ms();
  return nodes_ = std::move(found);
}

std::shared_ptr<const SharedReader::Nodes> SharedReader::list() const {
  auto found = std::make_shared<Nodes>();
  DIR* directory = ::opendir(options_.directory.c_str());
  if (!directory) return found;
  while (const dirent* entry = ::readdir(directory)) {
    const std::string name = entry->d_name;
    if (name[0] == '.' || name.size() > kMaxName || name == options_.node || found->size() >= kMaxNodes) continue;
    const std::string above = options_.directory + "/" + name, path = above + "/" + options_.space;
    if (!is_ours(above) || !is_ours(path)) continue;
    try {
      auto files = std::make_unique<RealFiles>(path, false, false);
      const uint32_t flushed_s = files->flushed_s();
      found->push_back({name, std::move(files), flushed_s});
    } catch (const Error&) {
      // Gone since it was listed.
    }
  }
  ::closedir(directory);
  return found;
}

// In one directory after another, in the key's own order, so that a block that all want is not read from one server by all.
SharedReader::Outcome SharedReader::look(const Key& key) {
  const auto nodes = this->nodes();
  std::vector<std::pair<uint64_t, const Node*>> order;
  for (const Node& node : *nodes)
    order.emplace_back((key.words[1] ^ std::hash<std::string>{}(node.name)) * 0x9e3779b97f4a7c15ull, &node);
  std::sort(order.begin(), order.end());
  const std::string path = path_of(key, options_.fanout);
  Outcome worst = Outcome::Missing;
  for (const auto& [rank, node] : order) {
    uint64_t bytes = 0;
    const Fd file(node->files->open_read(path, &bytes));
    if (!file) continue;
    if (node->flushed_s && node->files->written_s(file.get(), 0) <= node->flushed_s) continue;
    const Outcome outcome = load(key, file.get(), bytes);
    if (outcome == Outcome::Loaded || outcome == Outcome::Needless || outcome == Outcome::NoSpace) return outcome;
    if (outcome != Outcome::Missing) worst = outcome;
  }
  return worst;
}

SharedReader::Outcome SharedReader::load(const Key& key, int fd, uint64_t file_bytes) {
  alignas(8) std::byte page[kBlockFileHeaderBytes];
  if (file_bytes <= kBlockFileHeaderBytes) return Outcome::Corrupt;
  if (read_all(fd, page, sizeof page, 0) != sizeof page) return Outcome::Gone;
  const Decoded decoded = decode(std::span<const std::byte, kBlockFileHeaderBytes>(page), file_bytes);
  if (!decoded || !(decoded.header->key == key)) return Outcome::Corrupt;
  const FileHeader& header = *decoded.header;
  const auto known = store_.find_layout(header.layout);
  if (!known) return Outcome::Missing;  // of a model that nobody registered here
  if (!mismatch(header, key, known->layout, known->digest, Key{}).empty()) return Outcome::Corrupt;
  const auto now_s = static_cast<uint32_t>(::time(nullptr));
  if (header.expiry_s && header.expiry_s <= now_s) return Outcome::Missing;
  const uint32_t ttl_s = header.expiry_s ? header.expiry_s - now_s : 0;
  const CreateItem item{header.key, header.fingerprint, header.tokens, header.base_position, header.parent};
  Granted granted;
  try {
    granted = store_.create({owner_, known->id, std::min(header.priority, kMaxPriority), ttl_s, {&item, 1}})[0];
  } catch (const Error&) {  // fenced, or draining
    return Outcome::Failed;
  }
  if (granted.status != Grant::Granted) return granted.status == Grant::NoSpace ? Outcome::NoSpace : Outcome::Needless;
  Outcome outcome = Outcome::Failed;
  try {
    outcome = read_block(fd, header, known->layout, granted);
    if (outcome == Outcome::Loaded) {
      const Seal seal{granted.handle, true};
      store_.keep_loaded({&seal, 1});
      if (store_.seal(owner_, {&seal, 1})[0] == Done::Ok) return load_bytes_ += header.data_bytes, outcome;
      outcome = Outcome::Failed;  // it was taken from under us
    }
  } catch (const Error&) {
    outcome = Outcome::Failed;
  }
  try {
    store_.abort(owner_, granted.handle);
    store_.settle();
  } catch (const Error&) {
    // Fenced: nobody reads it.
  }
  return outcome;
}

// What is behind the layers first, for who follows the block wants its token ids before its first layer.
SharedReader::Outcome SharedReader::read_block(int fd, const FileHeader& header, const Layout& layout, const Granted& granted) {
  std::byte* block = window_.at(granted.extent.offset);
  const auto took = [&](uint64_t from, uint64_t until) {
    return read_all(fd, block + from, until - from, kBlockFileHeaderBytes + from) == static_cast<ssize_t>(until - from);
  };
  const uint64_t tail = layout.layers_bytes(header.tokens);
  if (!took(tail, header.data_bytes)) return Outcome::Gone;
  if (!tail_matches(header, block + tail)) return Outcome::Corrupt;
  for (uint32_t layer = 0; layer < layout.num_layers(); ++layer) {
    const uint64_t at = layout.layer_offset(layer, header.tokens);
    if (stop_ || !took(at, layout.layer_offset(layer + 1, header.tokens))) return Outcome::Gone;
    if (!layer_matches(header, layer, block + at)) return Outcome::Corrupt;
    if (layer + 1 == layout.num_layers()) break;  // the seal tells of the last
    store_.mark_layer(granted.handle, layer + 1);
    if (layer == 0) store_.load_ended();  // who waits for the block can follow it
  }
  std::memcpy(block + layout.checksums_offset(header.tokens), header.layer_checksums, 4 * layout.num_layers());
  return window_.truncated() ? Outcome::Failed : Outcome::Loaded;
}

}  // namespace kv
