// Mapped memory: RAII around mmap and descriptors, and the guard that turns a SIGBUS on memory another process has truncated
// into a flag. Owns addresses and descriptors; knows nothing of blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace kv {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// A shared mapping of a file. Throws Unavailable if the kernel refuses.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, size_t length, bool writable);
  Mapping(Mapping&& other) noexcept : base_(std::exchange(other.base_, nullptr)), length_(std::exchange(other.length_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping() { reset(); }
  void reset();

  std::byte* data() const { return base_; }
  size_t size() const { return length_; }
  explicit operator bool() const { return base_ != nullptr; }
  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

 private:
  std::byte* base_ = nullptr;
  size_t length_ = 0;
};

// While a guard lives, a SIGBUS inside [base, base + length) puts a zero page there, sets `hit` and lets the program go on.
// Clients hold writable descriptors of these files and can truncate them at any moment. At most kMaxGuards at a time; one
// that finds no room throws FailedPrecondition.
inline constexpr size_t kMaxGuards = 3 * 4096 + 512;  // of 4,096 sessions two, and one of as many that have ended; the pools'
class Guard {
 public:
  Guard() = default;
  Guard(const Mapping& mapping, std::atomic<bool>* hit);
  Guard(Guard&& other) noexcept : slot_(std::exchange(other.slot_, -1)) {}
  Guard& operator=(Guard&& other) noexcept {
    reset();
    slot_ = std::exchange(other.slot_, -1);
    return *this;
  }
  ~Guard() { reset(); }
  void reset();

 private:
  int slot_ = -1;
};

}  // namespace kv
