#include "core/format/session_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "core/base/error.h"

namespace kv {

Id random_id() {
  Id id;
  KV_INVARIANT(::getrandom(id.data(), id.size(), 0) == static_cast<ssize_t>(id.size()));
  return id;
}

std::string hex(const Id& id) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string out;
  for (uint8_t byte : id) out += {digits[byte >> 4], digits[byte & 15]};
  return out;
}

SessionFile SessionFile::create(const std::string& directory, const std::string& prefix, const Id& pool_id, uint32_t session,
                                uint32_t max_pins, SessionHolder holder, PinAllowance allowance, uint32_t protocol) {
  SessionFile file;
  char number[48];
  std::snprintf(number, sizeof number, "%08x.%x%c.%lx.", session, holder.uid, holder.read_only ? 'r' : 'w', allowance.pack());
  file.path_ = directory + "/" + prefix + ".s." + number + hex(random_id());
  file.locked_ = Fd(::open(file.path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.locked_) throw Error(Code::Unavailable, errno_text("creating session file " + file.path_));
  const uint64_t bytes = session_file_bytes(max_pins);
  try {
    const uint64_t taken = session_file_bytes(std::min(allowance.slots, max_pins));
    int error = ::ftruncate(file.locked_.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    if (!error) error = ::posix_fallocate(file.locked_.get(), 0, static_cast<off_t>(taken));
    if (error)
      throw Error(Code::NoSpace, errno_text("session file of " + std::to_string(taken) + " bytes in " + directory, error));
    if (::flock(file.locked_.get(), LOCK_EX | LOCK_NB) != 0) throw Error(Code::Unavailable, errno_text("locking " + file.path_));
    file.own_ = Fd(::open(file.path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!file.own_) throw Error(Code::Unavailable, errno_text("opening " + file.path_));
    file.mapping_ = Mapping(file.own_.get(), bytes, true);
  } catch (...) {
    ::unlink(file.path_.c_str());
    throw;
  }
  file.token_ = random_id();
  file.max_pins_ = max_pins;
  auto* page = file.mapping_.at<SessionPage>(0);
  page->version = kOldestFormat;
  page->protocol = protocol;
  page->max_pins = max_pins;
  page->session = session;
  page->rounds.store(PinRounds{1, 1}.pack(), std::memory_order_relaxed);
  std::copy(pool_id.begin(), pool_id.end(), page->pool_id);
  std::copy(file.token_.begin(), file.token_.end(), page->token);
  std::memcpy(page->magic, kSessionMagic, sizeof page->magic);  // last: a page without it was never finished
  return file;
}

SessionFile SessionFile::open(const std::string& path, const Id& pool_id) {
  SessionFile file;
  file.path_ = path;
  file.own_ = Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file.own_)
    throw Error(errno == ELOOP || errno == EACCES ? Code::InvalidArgument : Code::Unavailable, errno_text("opening " + path));
  struct stat st;
  if (::fstat(file.own_.get(), &st) != 0 || !S_ISREG(st.st_mode) || st.st_uid != ::geteuid() || (st.st_mode & 07777) != 0600 ||
      st.st_size < static_cast<off_t>(session_file_bytes(1)))
    throw Error(Code::InvalidArgument, path + " is not a session file of this user with mode 0600");
  // Where fs.protected_hardlinks is 0, anybody can link it. Which name bears its session's number cannot be told, and its pins
  // count all the same: nothing is taken over rather than too much given away.
  if (st.st_nlink > 1) throw Error(Code::Unavailable, path + " has " + std::to_string(st.st_nlink) + " links");
  file.mapping_ = Mapping(file.own_.get(), std::min<size_t>(static_cast<size_t>(st.st_size), session_file_bytes(kMaxPins)), true);
  // By a call, not through the mapping: its client may cut the file at this moment.
  SessionPage page;
  if (::pread(file.own_.get(), static_cast<void*>(&page), sizeof page, 0) != sizeof page)
    throw Error(Code::InvalidArgument, path + " was cut short");
  // The file's size bounds the pins, and where its client has stretched it, the limit of all; the word in the page is not
  // believed.
  file.max_pins_ = static_cast<uint32_t>(std::min<uint64_t>((static_cast<uint64_t>(st.st_size) - kPinsOffset) / 8, kMaxPins));
  std::copy(std::begin(page.token), std::end(page.token), file.token_.begin());
  if (std::memcmp(page.magic, kSessionMagic, sizeof page.magic) != 0 || page.version != kOldestFormat ||
      !std::equal(pool_id.begin(), pool_id.end(), page.pool_id))
    throw Error(Code::InvalidArgument, path + " is not a session of this pool");
  return file;
}

uint32_t SessionFile::number_in(const std::string& name) {
  char* end = nullptr;
  const unsigned long number = std::strtoul(name.c_str(), &end, 16);
  return end == name.c_str() + 8 && *end == '.' ? static_cast<uint32_t>(number) : ~0u;
}

bool SessionFile::reserve(uint32_t slots) {
  return ::posix_fallocate(own_.get(), 0, static_cast<off_t>(session_file_bytes(std::min(slots, max_pins_)))) == 0;
}

std::optional<SessionHolder> SessionFile::holder_in(const std::string& name) {
  const size_t begin = name.find('.') + 1, end = name.find('.', begin);
  if (begin == 0 || end == std::string::npos || end < begin + 2) return std::nullopt;
  const char mode = name[end - 1];
  char* digits = nullptr;
  const unsigned long uid = std::strtoul(name.c_str() + begin, &digits, 16);
  if (digits != name.c_str() + end - 1 || (mode != 'r' && mode != 'w') || uid > UINT32_MAX) return std::nullopt;
  return SessionHolder{static_cast<uint32_t>(uid), mode == 'r'};
}

// The part before the last, which is the random one.
std::optional<PinAllowance> SessionFile::named_allowance() const {
  const size_t end = path_.rfind('.'), begin = path_.rfind('.', end - 1) + 1;
  char* digits = nullptr;
  const unsigned long word = std::strtoul(path_.c_str() + begin, &digits, 16);
  if (begin == end || digits != path_.c_str() + end) return std::nullopt;
  return PinAllowance::unpack(word);
}

bool SessionFile::name_allowance(PinAllowance allowance) {
  const size_t end = path_.rfind('.');
  const size_t begin = named_allowance() ? path_.rfind('.', end - 1) : end;
  char word[24];
  std::snprintf(word, sizeof word, ".%lx.", allowance.pack());
  // A new random part: whoever foresaw the name could have made a file there, which a directory like /tmp lets nobody replace.
  std::string path = path_.substr(0, begin) + word + hex(random_id());
  if (::rename(path_.c_str(), path.c_str()) != 0) return false;
  path_ = std::move(path);
  return true;
}

uint32_t SessionFile::pins_end(uint32_t slots) const {
  const auto* pins = mapping_.at<const std::atomic<uint64_t>>(kPinsOffset);
  uint32_t end = std::min(slots, max_pins_);
  while (end > 0 && pins[end - 1].load(std::memory_order_acquire) == 0) --end;
  return end;
}

bool SessionFile::lock_free() { return ::flock(own_.get(), LOCK_EX | LOCK_NB) == 0; }

void SessionFile::unlink() { ::unlink(path_.c_str()); }

PinBoard::PinBoard(Mapping page) : mapping_(std::move(page)) {}

PinAllowance PinBoard::allowance() const {
  const uint64_t word = page().allowance.load(std::memory_order_relaxed);
  return word ? PinAllowance::unpack(word) : PinAllowance{~0u, PinAllowance::kAnyPages};
}

size_t PinBoard::taken() {
  std::lock_guard lock(mutex_);
  return fresh_ - free_.size();
}

uint32_t PinBoard::free_slot(uint32_t allowed) {
  if (!free_.empty() && free_.back() >= allowed)
    std::sort(free_.begin(), free_.end(), std::greater<>());  // lower ones lie deeper
  if (free_.empty() || free_.back() >= allowed) return fresh_ < std::min<size_t>(allowed, slots()) ? fresh_++ : kNoSlot;
  const uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

size_t PinBoard::take(std::span<const uint64_t> wanted, uint32_t* slots, std::span<const uint32_t> pages) {
  std::lock_guard lock(mutex_);
  const PinAllowance allowed = allowance();
  auto& high = mapping_.at<SessionPage>(0)->pins_high;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!pages.empty() && pages[i] > allowed.pages) return i;
    const uint32_t slot = free_slot(allowed.slots);
    if (slot == kNoSlot) return i;
    if (slot >= high.load(std::memory_order_relaxed)) high.store(slot + 1, std::memory_order_release);
    KV_INVARIANT(pins()[slot].load(std::memory_order_relaxed) == 0);
    pins()[slot].store(wanted[i], std::memory_order_release);  // of words not taken only this process writes, under the mutex
    slots[i] = slot;
  }
  return wanted.size();
}

void PinBoard::clear(std::span<const uint32_t> slots) {
  for (uint32_t slot : slots) pins()[slot].store(0, std::memory_order_release);
  mapping_.at<SessionPage>(0)->released.fetch_add(slots.size(), std::memory_order_release);
  std::lock_guard lock(mutex_);
  free_.insert(free_.end(), slots.rbegin(), slots.rend());
}

void PinBoard::touched(std::span<const uint32_t> records) {
  auto* page = mapping_.at<SessionPage>(0);
  const uint64_t at = page->ring_head.fetch_add(records.size(), std::memory_order_relaxed);
  for (size_t i = 0; i < records.size(); ++i) page->ring[(at + i) % kTouchRing].store(records[i], std::memory_order_release);
}

void PinBoard::count(uint64_t hits, uint64_t misses) {
  auto* page = mapping_.at<SessionPage>(0);
  if (hits) page->hits.fetch_add(hits, std::memory_order_relaxed);
  if (misses) page->misses.fetch_add(misses, std::memory_order_relaxed);
}

}  // namespace kv
