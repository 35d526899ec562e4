// What callers hand over, as plain arrays: token ids and extra ids from lists or buffers, bytes from anything that has
// them. Owns the conversion and its errors; never keeps a caller's memory beyond the object returned.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "core/format/block.h"

namespace kv {

// Integers of one sequence argument: a view of the caller's buffer where its type fits, a converted copy otherwise.
template <class T>
struct Integers {
  const T* data = nullptr;
  size_t size = 0;
  size_t columns = 1;  // of a two-dimensional buffer; size counts all elements
  std::vector<T> converted;
  nanobind::object owner;
};

// Takes a list or another sequence of ints, or a contiguous CPU buffer (NumPy, torch, ...) of 32- or 64-bit integers
// with one dimension, or two if `columns` > 1 and the second is `columns`. Raises InvalidArgument.
template <class T>
Integers<T> integers(nanobind::handle source, const char* name, size_t columns = 1);

extern template Integers<int32_t> integers(nanobind::handle, const char*, size_t);
extern template Integers<uint64_t> integers(nanobind::handle, const char*, size_t);

// The contiguous bytes of an object with the buffer protocol or, for torch tensors, DLPack.
class Bytes {
 public:
  Bytes(nanobind::handle source, const char* name, bool writable);  // raises InvalidArgument
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  Py_buffer view_{};
  nanobind::object owner_;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Memory of the caller's for each of several blocks. Raises InvalidArgument for another number of them.
class Buffers {
 public:
  Buffers(nanobind::sequence source, const char* name, bool writable, size_t count);
  const Bytes& operator[](size_t i) const { return buffers_[i]; }
  // The bytes of i that a layer of `length` fills: all. Raises InvalidArgument for more than the layer's and, if it must be
  // `whole`, for fewer.
  uint64_t fitting(size_t i, uint64_t length, bool whole) const;

 private:
  const char* const name_;
  std::deque<Bytes> buffers_;
};

// Blocks of a batch and where each has its row in memory of the caller's. Raises InvalidArgument for an odd number of either.
struct Places {
  Integers<uint64_t> indices, offsets;
  Places(nanobind::handle indices, nanobind::handle offsets);
  size_t size() const { return indices.size; }
  // The row of place i, inside of `bytes`. Raises InvalidArgument for one that is not.
  uint8_t* row(const Bytes& bytes, size_t i, uint64_t length) const;
};

// A 32-byte argument such as an identity. Raises InvalidArgument.
Key key_from(nanobind::handle source, const char* name);

inline nanobind::bytes to_bytes(const Key& key) { return nanobind::bytes(&key, sizeof key); }

}  // namespace kv
