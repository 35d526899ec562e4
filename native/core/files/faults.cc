#include "core/files/faults.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "core/base/error.h"
#include "core/format/block.h"

namespace kv {
namespace {

constexpr std::string_view kSteps[] = {"open", "create", "reuse", "publish", "remove", "aside", "read", "write", "done"};
constexpr std::string_view kFaults[] = {"", "eio", "enospc", "erofs", "enomem", "emfile", "short", "flip", "full", "kill"};
constexpr int kErrors[] = {0, EIO, ENOSPC, EROFS, ENOMEM, EMFILE};

template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

[[noreturn]] void refuse(const std::string& what) { throw Error(Code::InvalidArgument, "fault schedule: " + what); }

template <size_t N>
int place(const std::string_view (&names)[N], std::string_view name) {
  for (size_t i = 0; i < N; ++i)
    if (names[i] == name && !name.empty()) return static_cast<int>(i);
  return -1;
}

[[noreturn]] void end_process() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

}  // namespace

// ---------------------------------------------------------------- Files

class Faults::FaultyFiles final : public Files {
 public:
  FaultyFiles(Faults& faults, std::unique_ptr<Files> real) : faults_(faults), real_(std::move(real)) {}

  int open_read(const std::string& path, uint64_t* bytes) override {
    const int error = fails(Step::Open);
    return error != 0 ? error : real_->open_read(path, bytes);
  }
  int create_temp(uint64_t bytes, std::string* temp) override {
    const int error = fails(Step::Create);
    const int fd = error != 0 ? error : real_->create_temp(bytes, temp);
    if (fd >= 0) faults_.unsafe_.insert(*temp);
    return fd;
  }
  int take_over(const std::string& path, uint64_t bytes, std::string* temp) override {
    const int error = fails(Step::Reuse);
    const int fd = error != 0 ? error : real_->take_over(path, bytes, temp);
    if (fd >= 0) {
      faults_.unsafe_.erase(path);
      faults_.unsafe_.insert(*temp);
      faults_.taken_[*temp] = path;
    }
    return fd;
  }
  int publish(const std::string& temp, const std::string& path) override {
    int error = fails(Step::Publish);
    if (error == 0) error = real_->publish(temp, path);
    if (error == 0) {
      faults_.unsafe_.erase(temp);
      faults_.unsafe_.insert(path);
      faults_.taken_.erase(temp);
    }
    return error;
  }
  void make_directories(Fanout fanout) override { real_->make_directories(fanout); }
  int remove(const std::string& path) override {
    int error = fails(Step::Remove);
    if (error == 0) error = real_->remove(path);
    if (error == 0) faults_.unsafe_.erase(path);
    return error;
  }
  int aside(const std::string& path) override {
    int error = fails(Step::Aside);
    if (error == 0) error = real_->aside(path);
    if (error == 0) faults_.unsafe_.erase(path);
    return error;
  }
  void close(int fd) override { real_->close(fd); }
  uint32_t flushed_s() override { return real_->flushed_s(); }
  int keep_flushed(uint32_t second) override { return real_->keep_flushed(second); }
  int deleted(uint32_t most, std::vector<Key>* keys) override { return real_->deleted(most, keys); }
  int keep_deleted(std::span<const Key> keys) override { return real_->keep_deleted(keys); }
  uint32_t written_s(int fd, uint32_t after_s) override { return real_->written_s(fd, after_s); }
  Written written() override { return real_->written(); }
  int count_written(const Written& written) override { return real_->count_written(written); }
  int in_place() override { return real_->in_place(); }

 private:
  int fails(Step step) {
    const Fault fault = faults_.next(step);
    return -kErrors[static_cast<size_t>(fault)];
  }

  Faults& faults_;
  std::unique_ptr<Files> real_;
};

// ---------------------------------------------------------------- Engine

class Faults::FaultyEngine final : public Engine {
 public:
  FaultyEngine(Faults& faults, std::unique_ptr<Engine> real) : faults_(faults), real_(std::move(real)) {}

  bool submit(Transfer* transfer) override {
    if (in_flight() == depth()) return false;
    const Fault fault = faults_.next(transfer->write ? Step::Write : Step::Read);
    if (fault == Fault::Full) {
      if (in_flight() > 0) return false;
      return fail(transfer, -EAGAIN);  // with nothing in flight nobody would try again
    }
    if (fault == Fault::None || fault == Fault::Flip) {
      if (!real_->submit(transfer)) return false;
      if (fault == Fault::Flip) flips_.insert(transfer);
      return true;
    }
    if (fault != Fault::Short) return fail(transfer, -kErrors[static_cast<size_t>(fault)]);
    auto part = std::make_unique<Transfer>(*transfer);
    part->user = transfer;
    shorten(*part);
    if (part->count == 0) return fail(transfer, 0);
    if (!real_->submit(part.get())) return false;
    parts_.push_back(std::move(part));
    return true;
  }

  size_t completed(std::span<Transfer*> done) override {
    size_t count = real_->completed(done);
    for (size_t i = 0; i < count; ++i) {
      const auto part = std::find_if(parts_.begin(), parts_.end(), [&](auto& each) { return each.get() == done[i]; });
      if (part != parts_.end()) {
        auto* transfer = static_cast<Transfer*>(done[i]->user);
        transfer->result = done[i]->result;
        done[i] = transfer;
        parts_.erase(part);
      }
      if (flips_.erase(done[i]) != 0) flip(*done[i]);
    }
    while (count < done.size() && !failed_.empty()) {
      done[count++] = failed_.back();
      failed_.pop_back();
    }
    if (!failed_.empty()) ring();
    for (size_t i = 0; i < count; ++i) faults_.next(Step::Done);
    return count;
  }

  int event_fd() const override { return real_->event_fd(); }
  uint32_t depth() const override { return real_->depth(); }
  uint32_t in_flight() const override { return real_->in_flight() + static_cast<uint32_t>(failed_.size()); }
  std::string name() const override { return real_->name() + " with faults"; }

 private:
  bool fail(Transfer* transfer, int64_t result) {
    transfer->result = result;
    failed_.push_back(transfer);
    ring();
    return true;
  }

  void ring() const {
    const uint64_t wakeup = 1;
    KV_INVARIANT(::write(event_fd(), &wakeup, sizeof wakeup) == sizeof wakeup);
  }

  // Leaves a beginning of it, in whole sectors; possibly nothing.
  void shorten(Transfer& transfer) {
    uint64_t left = faults_.random() % (transfer.bytes() / kLayerAlign + 1) * kLayerAlign;
    uint32_t count = 0;
    for (; count < transfer.count && left > 0; ++count) {
      transfer.parts[count].iov_len = std::min<uint64_t>(transfer.parts[count].iov_len, left);
      left -= transfer.parts[count].iov_len;
    }
    transfer.count = count;
  }

  // By a call that fails where the memory is gone.
  void flip(const Transfer& transfer) {
    if (transfer.result <= 0) return;
    uint64_t at = faults_.random() % static_cast<uint64_t>(transfer.result);
    const iovec& part = at < transfer.parts[0].iov_len ? transfer.parts[0] : transfer.parts[1];
    if (&part == &transfer.parts[1]) at -= transfer.parts[0].iov_len;
    uint8_t byte = 0;
    const iovec here{&byte, 1}, there{static_cast<std::byte*>(part.iov_base) + at, 1};
    if (::process_vm_readv(::getpid(), &here, 1, &there, 1, 0) != 1) return;
    byte ^= static_cast<uint8_t>(1u << faults_.random() % 8);
    if (::process_vm_writev(::getpid(), &here, 1, &there, 1, 0) != 1) return;
  }

  Faults& faults_;
  std::unique_ptr<Engine> real_;
  std::vector<Transfer*> failed_;
  std::vector<std::unique_ptr<Transfer>> parts_;
  std::set<Transfer*> flips_;
};

// ---------------------------------------------------------------- the schedule

Faults::Faults(const std::string& schedule, const std::string& directory, std::unique_ptr<Files> files,
               std::unique_ptr<Engine> engine)
    : directory_(directory),
      files_(std::make_unique<FaultyFiles>(*this, std::move(files))),
      engine_(std::make_unique<FaultyEngine>(*this, std::move(engine))) {
  parse(schedule);
}

Faults::~Faults() = default;
Files& Faults::files() { return *files_; }
Engine& Faults::engine() { return *engine_; }
std::unique_ptr<Files> Faults::take_files() { return std::move(files_); }
std::unique_ptr<Engine> Faults::take_engine() { return std::move(engine_); }

void Faults::parse(const std::string& schedule) {
  for (size_t at = 0; at < schedule.size();) {
    const size_t end = std::min(schedule.find(',', at), schedule.size());
    const std::string item = schedule.substr(at, end - at);
    at = end + 1;
    const size_t equals = item.find('=');
    if (equals == item.npos) refuse("no value in \"" + item + "\"");
    const std::string name = item.substr(0, equals), value = item.substr(equals + 1);
    if (name != "seed" && name != "power_loss_after") {
      rules_.push_back(rule_of(name, value));
      continue;
    }
    const std::optional<uint64_t> parsed = number<uint64_t>(value);
    if (!parsed) refuse("no number in \"" + item + "\"");
    (name == "seed" ? state_ : power_loss_after_) = *parsed;
  }
}

Faults::Rule Faults::rule_of(const std::string& name, const std::string& value) {
  const size_t cut = name.find('_');
  const int step = place(kSteps, name.substr(0, cut));
  const int fault = cut == name.npos ? -1 : place(kFaults, name.substr(cut + 1));
  if (step < 0 || fault < 0) refuse("unknown step or fault \"" + name + "\"");
  Rule rule{static_cast<Step>(step), static_cast<Fault>(fault)};
  const bool moves = rule.step == Step::Read || rule.step == Step::Write;
  if (((rule.fault == Fault::Short || rule.fault == Fault::Full) && !moves) ||
      (rule.fault == Fault::Flip && rule.step != Step::Read) || (rule.step == Step::Done && rule.fault != Fault::Kill))
    refuse("\"" + name + "\" cannot happen");
  if (value.starts_with('@')) {
    const bool onwards = value.ends_with('+');
    const std::optional<uint64_t> which = number<uint64_t>(value.substr(1, value.size() - 1 - onwards));
    if (!which || *which == 0) refuse("no count in \"" + name + "=" + value + "\"");
    rule.first = *which;
    rule.last = onwards ? ~0ull : *which;
  } else {
    const std::optional<double> probability = number<double>(value);
    if (!probability || !(*probability >= 0 && *probability <= 1)) refuse("no probability in \"" + name + "=" + value + "\"");
    rule.probability = *probability;
  }
  return rule;
}

uint64_t Faults::random() {  // splitmix64
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

Faults::Fault Faults::next(Step step) {
  if (power_loss_after_ != 0 && ++steps_ > power_loss_after_) lose_power();
  const uint64_t call = ++calls_[static_cast<size_t>(step)];
  for (const Rule& rule : rules_) {
    if (rule.step != step) continue;
    const bool now = rule.first != 0 ? call >= rule.first && call <= rule.last
                                     : static_cast<double>(random() >> 11) * 0x1p-53 < rule.probability;
    if (!now) continue;
    if (rule.fault == Fault::Kill) end_process();
    ++injected_;
    return rule.fault;
  }
  return Fault::None;
}

// ---------------------------------------------------------------- power loss

void Faults::lose_power() {
  for (const auto& [temp, path] : taken_) {  // the name may not have reached the disk, what was written over may
    if (random() % 2 == 0 || unsafe_.erase(temp) == 0) continue;
    if (::rename((directory_ + "/" + temp).c_str(), (directory_ + "/" + path).c_str()) == 0) unsafe_.insert(path);
  }
  for (const std::string& path : unsafe_) damage(directory_ + "/" + path);
  end_process();
}

// What the disk may hold of a file that was never flushed: all, nothing, a name without data, a beginning, or pieces.
void Faults::damage(const std::string& path) {
  const uint64_t kind = random() % 5;
  if (kind == 0) return;
  if (kind == 1) {
    ::unlink(path.c_str());
    return;
  }
  const Fd fd(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  struct stat about;
  if (!fd || ::fstat(fd.get(), &about) != 0) return;
  const auto sectors = static_cast<uint64_t>(about.st_size) / kLayerAlign;
  if (kind == 2) {
    KV_INVARIANT(::ftruncate(fd.get(), 0) == 0);
    if (random() % 2 == 0) KV_INVARIANT(::ftruncate(fd.get(), about.st_size) == 0);  // zeros
  } else if (kind == 3) {
    KV_INVARIANT(::ftruncate(fd.get(), static_cast<off_t>(random() % (sectors * kLayerAlign + 1))) == 0);
  } else {
    const std::array<char, kLayerAlign> zeros{};
    for (uint64_t holes = 1 + random() % 8; holes > 0 && sectors > 0; --holes) {
      const auto at = static_cast<off_t>(random() % sectors * kLayerAlign);
      if (::pwrite(fd.get(), zeros.data(), zeros.size(), at) < 0) return;
    }
  }
}

}  // namespace kv
