// An array that grows and shrinks at its end and never moves: memory is set aside for the most it may have, comes with use and
// goes a piece at a time. A vector of a million entries that doubles copies them all, and meets all of its new pages, in one
// step.
//
// Owns its mapping. Not thread-safe. Invariant: what lies kPiece and more behind the last entry has no memory.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

#include "core/base/error.h"

namespace kv {

template <class T>
class SteadyArray {
 public:
  static_assert(std::is_trivially_copyable_v<T>);
  using value_type = T;

  // Begins on a page. Throws std::bad_alloc if not even addresses are to be had.
  explicit SteadyArray(size_t most) : bytes_((most * sizeof(T) + kPiece - 1) / kPiece * kPiece + kPiece) {
    void* const base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(base);
  }
  SteadyArray(SteadyArray&& other) noexcept
      : bytes_(std::exchange(other.bytes_, 0)),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        used_bytes_(std::exchange(other.used_bytes_, 0)) {}
  SteadyArray& operator=(SteadyArray&&) = delete;
  ~SteadyArray() {
    if (data_) ::munmap(data_, bytes_);
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t at) { return data_[at]; }
  const T& operator[](size_t at) const { return data_[at]; }
  T& back() { return data_[size_ - 1]; }
  T& front() { return data_[0]; }
  const T& front() const { return data_[0]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

  void push_back(T value) {
    if ((size_ + 1) * sizeof(T) > used_bytes_) {
      KV_INVARIANT(used_bytes_ + kPiece <= bytes_);
      used_bytes_ += kPiece;
    }
    data_[size_++] = value;
  }
  void pop_back() {
    --size_;
    if (used_bytes_ >= size_ * sizeof(T) + 2 * kPiece) give_back();
  }
  // To fewer.
  void shrink(size_t to) {
    size_ = to;
    while (used_bytes_ >= size_ * sizeof(T) + 2 * kPiece) give_back();
  }
  size_t used_bytes() const { return used_bytes_; }  // that may have memory
  static constexpr size_t kPiece = 128 << 10;

 private:
  void give_back() {
    used_bytes_ -= kPiece;
    ::madvise(reinterpret_cast<std::byte*>(data_) + used_bytes_, kPiece, MADV_DONTNEED);
  }

  size_t bytes_ = 0;
  T* data_ = nullptr;
  size_t size_ = 0, used_bytes_ = 0;
};

}  // namespace kv
