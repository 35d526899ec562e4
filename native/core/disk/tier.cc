#include "core/disk/tier.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/disk/tier_steps.h"
#include "core/files/absent.h"

namespace kv {
namespace {

constexpr size_t kMaxQueue = 4096;  // loads that wait
constexpr uint32_t kBuffers = 8;    // of a directory: reads under way, or done and waiting for one before them
constexpr int kIdleMs = 1000;
constexpr uint64_t kLastRemovalsMs = 50;  // of the 200 that a daemon has to end

void watch(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  KV_INVARIANT(::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
}

}  // namespace

DiskTier::DiskTier(Store& store, Options options)
    : store_(store),
      fanout_(options.fanout),
      max_files_(options.max_files),
      daily_write_bytes_(options.daily_write_bytes),
      keep_corrupt_(options.keep_corrupt),
      huge_pool_(options.huge_pool),
      pool_(store.options().pool_fd, store.options().capacity_bytes, true),
      pool_guard_(pool_, &pool_hit_),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      listings_(options.directories.size()),
      begun_s_(static_cast<uint32_t>(::time(nullptr))),
      day_(begun_s_ / kDayS),
      index_(options.max_files),
      quota_bytes_(options.quota_bytes) {
  if (options.directories.empty() || options.directories.size() > 64)
    throw Error(Code::InvalidArgument,
                "a disk tier has 1 to 64 directories, " + std::to_string(options.directories.size()) + " were given");
  watch(epoll_.get(), wake_.get());
  volumes_.reserve(options.directories.size());
  for (Directory& directory : options.directories)
    volumes_.push_back({.at = {directory.path, std::make_unique<AbsentFiles>(), std::make_unique<AbsentEngine>()},
                        .staging = Staging(kBuffers)});
  for (uint8_t d = 0; d < volumes_.size(); ++d)
    if (options.directories[d].files) open(d, std::move(options.directories[d]));
  queues_.resize(volumes_.size());
}

DiskTier::~DiskTier() { stop(); }

void DiskTier::start() {
  attach();
  begin();
}

void DiskTier::attach() {
  owner_ = store_.open_owner();
  store_.attach_disk(wake_.get(), this);
}

// What a daemon had not removed when it ended, what was flushed, and how much was written today.
DiskTier::Arrival DiskTier::read_notes(uint8_t directory, Directory opened) const {
  std::vector<Key> deleted;
  const int error = opened.files->deleted(max_files_, &deleted);
  const uint32_t flushed_s = opened.files->flushed_s();
  const Written written = opened.files->written();
  return {directory, std::move(opened), std::move(deleted), error, flushed_s, written};
}

void DiskTier::open(uint8_t directory, Directory opened) {
  Arrival arrival = read_notes(directory, std::move(opened));
  std::lock_guard lock(mutex_);
  arrivals_.push_back(std::move(arrival));
  ::eventfd_write(wake_.get(), 1);
}

void DiskTier::take_arrivals() {
  std::vector<Arrival> arrived;
  {
    std::lock_guard lock(mutex_);
    arrived.swap(arrivals_);
  }
  std::vector<uint8_t> taken;
  for (Arrival& arrival : arrived) taken.push_back(arrival.directory), take(std::move(arrival));
  // What was deleted and flushed is told by all of them: before any of their files is found.
  for (const uint8_t d : taken) listings_[d].thread = std::thread([this, d] { scan(d); });
}

// The path stays: others read it meanwhile. What was deleted goes first, before anybody can find it.
void DiskTier::take(Arrival arrival) {
  const uint8_t d = arrival.directory;
  Volume& volume = volumes_[d];
  volume.at.files = std::move(arrival.opened.files), volume.at.engine = std::move(arrival.opened.engine);
  volume.at.problem = arrival.opened.problem;
  if (volumes_.size() > 1) {  // others to be held up
    auto timed = std::make_unique<TimedFiles>(std::move(volume.at.files), call_timeout_ms_);
    volume.timed = timed.get();
    volume.at.files = std::move(timed);
  }
  watch(epoll_.get(), volume.at.engine->event_fd());
  for (const Key& key : arrival.deleted) forget(key);
  kept_ = kept_ || !arrival.deleted.empty();
  flushed_s_ = std::max(flushed_s_.load(), arrival.flushed_s);
  if (arrival.written.day == day_.load()) written_today_ += volume.written_today = arrival.written.bytes;
  {
    std::lock_guard lock(mutex_);  // who adds up sees it open and unlisted
    open_.fetch_or(uint64_t{1} << d, std::memory_order_release);
  }
  if (arrival.error != 0) went_wrong(d, -arrival.error, false, "reading what was deleted");
  if (volume.at.problem) went_wrong(d, volume.at.problem, true, "making a file");
}

void DiskTier::begin() {
  take_deleted();  // before a listing finds it
  take_arrivals();
  thread_ = std::thread([this] { run(); });
  begun_.store(true);
}

void DiskTier::stop() {
  if (!owner_ || stop_.load()) return;
  {
    std::lock_guard lock(mutex_);
    stop_.store(true);
  }
  stopping_.notify_all();
  ::eventfd_write(wake_.get(), 1);
  if (thread_.joinable()) thread_.join();
  for (Listing& listing : listings_)
    if (listing.thread.joinable()) listing.thread.join();
  store_.detach_disk();
  store_.end_session(owner_);
  unmap_pool();
}

// ---------------------------------------------------------------- what the doors call

// Pending: it is being loaded. OnDisk: too many loads wait. Resident: look again.
Presence DiskTier::promote(const Key& key, uint32_t priority) {
  if (!begun_.load()) return Presence::Missing;  // it may never come
  std::lock_guard lock(mutex_);
  const FileIndex::Entry* entry = index_.find(key);
  const uint64_t bytes = entry ? entry->bytes() : 0;
  if (loading_.contains(key) && !cancelled_.contains(key)) return Presence::Pending;
  if (const auto queued = queued_.find(key); queued != queued_.end()) return raise(queued->second, priority);
  if (deleted(key, entry) || (!entry && (listed_ || !is_open(home(key))))) return Presence::Missing;
  if (loading_.contains(key)) return Presence::Missing;
  if (const auto vain = in_vain_.find(key); vain != in_vain_.end()) {
    if (monotonic_ms() < vain->second) return Presence::Missing;
    in_vain_.erase(vain);
  }
  const uint8_t directory = entry ? entry->directory : home(key);
  Queue& queue = queues_[directory];
  const Queue::key_type place(~priority, ++asked_);
  if (queue.size() >= kMaxQueue) {  // the least urgent gives way
    const auto last = std::prev(queue.end());
    if (last->first < place) return Presence::OnDisk;
    waiting_bytes_.fetch_sub(last->second.bytes, std::memory_order_relaxed);
    queued_.erase(last->second.key);
    queue.erase(last);
  }
  queue.emplace(place, Wanted{key, bytes});
  queued_.emplace(key, Queued{directory, place});
  waiting_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  if (queue.size() == 1) ::eventfd_write(wake_.get(), 1);
  return Presence::Pending;
}

// Wanted again, and sooner: a hint that somebody waits for now.
Presence DiskTier::raise(Queued& queued, uint32_t priority) {
  if (~priority < queued.place.first) {
    Queue& queue = queues_[queued.directory];
    auto node = queue.extract(queued.place);
    queued.place.first = node.key().first = ~priority;
    queue.insert(std::move(node));
  }
  return Presence::Pending;
}

bool DiskTier::deleted(const Key& key, const FileIndex::Entry* entry) const {
  return entry ? entry->doomed : doom_what_is_found_ || doomed_unknown_.contains(key);
}

// Of more keys than there may be files it is not remembered one by one that they were deleted, where that has to be because a
// directory has not been listed: nothing that is found there will be taken, as after a flush.
LowerTier::Below DiskTier::forget(const Key& key) {
  std::lock_guard lock(mutex_);
  if (loading_.contains(key) || writing_.contains(key)) cancelled_.insert(key);
  FileIndex::Entry* entry = index_.find(key);
  const bool known = entry && !entry->doomed;
  if (entry && entry->doomed) return Below::Nothing;
  if (!entry && misplaced_.contains(key))  // that file goes anyway
    return gone_later_.insert(key).second ? Below::Known : Below::Nothing;
  if (!entry && listed_) return Below::Nothing;
  if (!entry && doomed_unknown_.size() >= max_files_ && !doomed_unknown_.contains(key)) doom_what_is_found_ = true;
  if (!entry && (doom_what_is_found_ || !doomed_unknown_.insert(key).second)) return Below::Nothing;
  if (entry) entry->doomed = entry->listed = true;
  doomed_.push_back(key);
  ::eventfd_write(wake_.get(), 1);
  return known ? Below::Known : Below::Unsure;
}

void DiskTier::forget_all() {
  std::lock_guard lock(mutex_);
  for (const auto* keys : {&loading_, &writing_}) cancelled_.insert(keys->begin(), keys->end());
  index_.each([](FileIndex::Entry& entry) { entry.doomed = true; });
  sweep_ = true;
  doom_what_is_found_ = !listed_;
  ::eventfd_write(wake_.get(), 1);
}

void DiskTier::set_quota(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  quota_bytes_ = bytes;
  ::eventfd_write(wake_.get(), 1);
}

DiskTier::Stats DiskTier::stats() {
  std::lock_guard lock(mutex_);
  Stats s{};
  s.files = index_.size();
  s.bytes = index_.bytes() + reserved_bytes_;
  s.quota_bytes = quota_bytes_;
  for (const Queue& queue : queues_) s.loads_waiting += queue.size();
  s.loads_in_flight = loading_.size();
  s.writes_in_flight = writing_.size() + starting_.load();
  s.written_today_bytes = written_today_.load();
  s.listed = names_.load();
  s.indexing = !tried();
  s.load_bytes_per_s = bytes_per_s_.load();
#define X(name) s.name = name##_.load(std::memory_order_relaxed);
  KV_DISK_COUNTERS(X)
#undef X
  return s;
}

LowerTier::Figures DiskTier::figures() {
  const Stats s = stats();
  return {s.files, s.bytes, s.quota_bytes, s.loaded, s.written};
}

std::vector<DiskTier::Condition> DiskTier::conditions() {
  std::vector<Condition> out;
  std::lock_guard lock(mutex_);
  for (const auto& [of, condition] : conditions_) out.push_back(condition);
  add_hanging(out);
  return out;
}

double DiskTier::thread_cpu_s() const {
  clockid_t clock;
  timespec t{};
  if (begun_.load() && thread_.joinable() &&
      ::pthread_getcpuclockid(const_cast<std::thread&>(thread_).native_handle(), &clock) == 0)
    ::clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// ---------------------------------------------------------------- the thread

void DiskTier::run() {
  ::pthread_setname_np(::pthread_self(), "kv-disk");
  while (!stop_.load()) {
    wait(turn() ? 0 : until_rested_ms());
  }
  turned_ms_ = 0;
  // What is in flight ends: a load's memory and a write's block are held until then. What has not begun does not: a large block
  // on a slow disk would take seconds.
  cancel_waiting();
  while (!loads_.empty() || !writes_.empty()) {
    reap();
    cancel_waiting();
    if (!loads_.empty() || !writes_.empty()) wait(kIdleMs);
  }
  // What was deleted until now. What is not done in time the next daemon does.
  const uint64_t end_ms = monotonic_ms() + kLastRemovalsMs;
  for (bool more = true; more && monotonic_ms() < end_ms;) {
    remove_doomed(end_ms);
    std::lock_guard lock(mutex_);
    more = more_goes();
  }
  keep_doomed();
}

// One round of everything. True if there is more to do at once.
bool DiskTier::turn() {
  turned_ms_ = monotonic_ms();
  take_arrivals();
  remove_doomed();
  reap();
  submit_waiting();
  probe();
  for (uint8_t d = 0; d < volumes_.size(); ++d) start_loads(d);
  start_writes();
  tell_speed();
  const bool shrinking = shrink();
  std::lock_guard lock(mutex_);
  return shrinking || more_goes();
}

int DiskTier::until_rested_ms() {
  const uint64_t now = monotonic_ns();
  return now < rest_until_ns_ ? static_cast<int>((rest_until_ns_ - now) / 1'000'000) + 1 : kIdleMs;
}

void DiskTier::wait(int timeout_ms) {
  epoll_event events[8];
  const int count = ::epoll_wait(epoll_.get(), events, 8, timeout_ms);
  for (int i = 0; i < count; ++i) {
    eventfd_t ignored;
    if (events[i].data.fd == wake_.get()) ::eventfd_read(wake_.get(), &ignored);
  }
}

void DiskTier::reap() {
  for (Volume& volume : volumes_) {
    Transfer* done[kMaxDepth];
    const size_t count = volume.at.engine->completed(done);
    if (count) volume.answered_ms = monotonic_ms();
    for (size_t i = 0; i < count; ++i) {
      Step& step = *static_cast<Step*>(done[i]->user);
      step.load ? load_step_done(step) : write_step_done(step);
    }
  }
}

void DiskTier::submit(Step& step, uint8_t directory) {
  step.transfer.user = &step;
  Volume& volume = volumes_[directory];
  std::deque<Step*>& waiting = step.load ? volume.reads : volume.writes;
  if (!waiting.empty() || !try_submit(step, volume)) waiting.push_back(&step);
}

// False if there is no buffer for it, or no room in the queue. What waits is taken in the order it came: a piece that keeps its
// buffer for one before it in its file then never keeps it from that one.
bool DiskTier::try_submit(Step& step, Volume& volume) {
  if (stop_.load()) return false;  // it is cancelled
  if (step.load && !step.buffer) {
    if (!(step.buffer = volume.staging.take())) return false;
    step.transfer.parts[0].iov_base = step.buffer;
  }
  if (!volume.at.engine->in_flight()) volume.answered_ms = monotonic_ms();
  return volume.at.engine->submit(&step.transfer);
}

void DiskTier::submit_waiting() {
  for (Volume& volume : volumes_)
    for (auto* waiting : {&volume.reads, &volume.writes})
      while (!waiting->empty() && try_submit(*waiting->front(), volume)) waiting->pop_front();
}

// The steps that no engine has yet end as if they had failed, and with the last one under way their load or write.
void DiskTier::cancel_waiting() {
  for (Volume& volume : volumes_) {
    std::deque<Step*> reads, writes;
    reads.swap(volume.reads), writes.swap(volume.writes);
    for (Step* step : reads) step->transfer.result = -ECANCELED, load_step_done(*step);
    for (Step* step : writes) step->transfer.result = -ECANCELED, write_step_done(*step);
  }
}

// ---------------------------------------------------------------- speed

void DiskTier::tell_speed() {
  bytes_per_s_.store(speed_.tell(monotonic_ns(), !loads_.empty()), std::memory_order_relaxed);
  store_.tell_load_speed(bytes_per_s_.load(std::memory_order_relaxed), waiting_bytes_.load(std::memory_order_relaxed),
                         latency_us_.load(std::memory_order_relaxed));
}

}  // namespace kv
