#include "bindings/client/buffers.h"

#include <nanobind/ndarray.h>

#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "bindings/client/errors.h"

namespace nb = nanobind;

namespace kv {
namespace {

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

// Ours follows. Any other error came out of the caller's own code and is passed on.
void clear_type_error() {
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
  PyErr_Clear();
}

template <class T>
[[noreturn]] void out_of_range(const char* name, size_t i, const std::string& value) {
  raise("InvalidArgument", std::string(name) + "[" + std::to_string(i) + "] is " + value + ", outside " +
                               std::to_string(std::numeric_limits<T>::min()) + " to " +
                               std::to_string(std::numeric_limits<T>::max()));
}

template <class T, class From>
void convert(const From* from, size_t n, const char* name, std::vector<T>& out) {
  out.resize(n);
  bool fits = true;
  for (size_t i = 0; i < n; ++i) {
    out[i] = static_cast<T>(from[i]);
    fits &= std::in_range<T>(from[i]);
  }
  for (size_t i = 0; !fits && i < n; ++i)
    if (!std::in_range<T>(from[i])) out_of_range<T>(name, i, std::to_string(from[i]));
}

template <class T>
void take_array(const Array& array, const char* name, Integers<T>& out) {
  out.size = array.size();
  auto take = [&]<class From>() {
    if (array.dtype() != nb::dtype<From>()) return false;
    const auto* from = static_cast<const From*>(array.data());
    if constexpr (std::is_same_v<From, T>) {
      out.data = from;
    } else {
      convert(from, out.size, name, out.converted);
      out.data = out.converted.data();
    }
    return true;
  };
  if (!take.template operator()<int32_t>() && !take.template operator()<int64_t>() && !take.template operator()<uint32_t>() &&
      !take.template operator()<uint64_t>())
    raise("InvalidArgument", std::string(name) + " must hold 32- or 64-bit integers");
}

// The value of an ordinary int of at most 30 bits, which token ids are, without a call.
inline bool small_int(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  auto* number = reinterpret_cast<PyLongObject*>(object);
#if PY_VERSION_HEX >= 0x030C0000
  if (!PyUnstable_Long_IsCompact(number)) return false;
  value = PyUnstable_Long_CompactValue(number);
#else
  const Py_ssize_t digits = Py_SIZE(number);  // negative for a negative number
  if (digits < -1 || digits > 1) return false;
  value = digits == 0 ? 0 : digits * static_cast<int64_t>(number->ob_digit[0]);
#endif
  return true;
}

// Any int of a sequence. T is int32_t or uint64_t.
template <class T>
T take_int(nb::handle item, const char* name, size_t i) {
  const nb::object index = nb::steal(PyNumber_Index(item.ptr()));  // an int is its own index
  if (!index.is_valid()) {
    clear_type_error();
    raise("InvalidArgument", std::string(name) + "[" + std::to_string(i) + "] is of type " + class_of(item) + ", not an int");
  }
  if constexpr (std::is_same_v<T, int32_t>) {
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(index.ptr(), &overflow);
    if (overflow == 0 && std::in_range<T>(value)) return static_cast<T>(value);
  } else {
    const unsigned long long value = PyLong_AsUnsignedLongLong(index.ptr());
    if (value != ~0ull || !PyErr_Occurred()) return value;
    PyErr_Clear();
  }
  out_of_range<T>(name, i, nb::str(index).c_str());
}

}  // namespace

template <class T>
Integers<T> integers(nb::handle source, const char* name, size_t columns) {
  Integers<T> out;
  if (!PyList_Check(source.ptr()) && !PyTuple_Check(source.ptr())) {
    Array array;
    if (nb::try_cast(source, array)) {
      if (array.ndim() == 2 && columns > 1 && array.shape(1) == columns)
        out.columns = columns;
      else if (array.ndim() != 1)
        raise("InvalidArgument", std::string(name) + " has " + std::to_string(array.ndim()) + " dimensions, not one");
      take_array(array, name, out);
      out.owner = nb::borrow(source);
      return out;
    }
    if (nb::hasattr(source, "__dlpack__"))
      raise("InvalidArgument", std::string(name) + " must lie in CPU memory in native byte order");
  }
  const nb::object items = nb::steal(PySequence_Fast(source.ptr(), ""));
  if (!items.is_valid()) {
    clear_type_error();
    raise("InvalidArgument", std::string(name) + " must be a sequence or a buffer of ints, not " + class_of(source));
  }
  out.converted.resize(PySequence_Fast_GET_SIZE(items.ptr()));
  for (size_t i = 0; i < out.converted.size(); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), i);
    int64_t value;
    if (small_int(item, value) && std::in_range<T>(value)) {
      out.converted[i] = static_cast<T>(value);
      continue;
    }
    out.converted[i] = take_int<T>(nb::borrow(item), name, i);  // may run Python code, which may change the list
    if (static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())) != out.converted.size())
      raise("InvalidArgument", std::string(name) + " changed its length while it was read");
  }
  out.data = out.converted.data();
  out.size = out.converted.size();
  return out;
}

template Integers<int32_t> integers(nb::handle, const char*, size_t);
template Integers<uint64_t> integers(nb::handle, const char*, size_t);

Bytes::Bytes(nb::handle source, const char* name, bool writable) {
  if (PyObject_CheckBuffer(source.ptr())) {
    if (PyObject_GetBuffer(source.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0) {
      data_ = static_cast<uint8_t*>(view_.buf);
      size_ = view_.len;
      return;
    }
    PyErr_Clear();
  } else if (nb::ndarray<nb::c_contig, nb::device::cpu> array; nb::try_cast(source, array, false)) {
    data_ = static_cast<uint8_t*>(array.data());
    size_ = array.nbytes();
    owner_ = nb::borrow(source);
    return;
  }
  raise("InvalidArgument", std::string(name) + " of type " + class_of(source) + " is not a contiguous " +
                               (writable ? "writable " : "") + "buffer in CPU memory");
}

Buffers::Buffers(nb::sequence source, const char* name, bool writable, size_t count) : name_(name) {
  for (nb::handle each : source) buffers_.emplace_back(each, name, writable);
  if (buffers_.size() != count)
    raise("InvalidArgument", std::to_string(count) + " indices and " + std::to_string(buffers_.size()) + " " + name);
}

uint64_t Buffers::fitting(size_t i, uint64_t length, bool whole) const {
  const uint64_t size = buffers_[i].size();
  if (size > length || (whole && size < length))
    raise("InvalidArgument", std::string(name_) + "[" + std::to_string(i) + "] has " + std::to_string(size) +
                                 " bytes, the layer has " + std::to_string(length));
  return size;
}

Places::Places(nb::handle given_indices, nb::handle given_offsets)
    : indices(integers<uint64_t>(given_indices, "indices")), offsets(integers<uint64_t>(given_offsets, "offsets")) {
  if (indices.size != offsets.size)
    raise("InvalidArgument", std::to_string(indices.size) + " indices and " + std::to_string(offsets.size) + " offsets");
}

uint8_t* Places::row(const Bytes& bytes, size_t i, uint64_t length) const {
  const uint64_t offset = offsets.data[i];
  if (offset > bytes.size() || length > bytes.size() - offset)
    raise("InvalidArgument", "a row of " + std::to_string(length) + " bytes at " + std::to_string(offset) + " in memory of " +
                                 std::to_string(bytes.size()));
  return bytes.data() + offset;
}

Key key_from(nb::handle source, const char* name) {
  const Bytes bytes(source, name, false);
  if (bytes.size() != sizeof(Key))
    raise("InvalidArgument", std::string(name) + " has " + std::to_string(bytes.size()) + " bytes; it must have 32");
  Key key;
  std::memcpy(&key, bytes.data(), sizeof key);
  return key;
}

}  // namespace kv
