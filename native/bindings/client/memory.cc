// Memory of the pool as memoryviews, NumPy arrays and tensors that own what keeps it valid; and the arguments all calls share.
#include <functional>

#include <time.h>

#include <cmath>
#include <cstring>

#include "bindings/client/buffers.h"
#include "bindings/client/errors.h"
#include "bindings/client/store.h"
#include "bindings/without_gil.h"
#include "core/base/error.h"

namespace nb = nanobind;

namespace kv {
namespace {

constexpr double kSignalSlice_s = 0.1;

double now_s() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

int memory_buffer(PyObject* self, Py_buffer* view, int flags) {
  Memory* memory = nb::inst_ptr<Memory>(self);
  return PyBuffer_FillInfo(view, self, memory->data, static_cast<Py_ssize_t>(memory->length), memory->batch ? 1 : 0, flags);
}

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(memory_buffer)}, {0, nullptr}};

struct Shape4 {
  size_t dims[4];
  size_t count;
};

// Of a layer; layers of unequal width, and those under a codec, are bytes.
Shape4 shape_of(const Layout& layout, uint64_t length, uint32_t tokens) {
  const uint64_t elements = uint64_t{layout.kv_per_layer} * layout.num_kv_heads * tokens * layout.head_dim;
  if (layout.codec != 0 || elements * dtype_bytes(layout.dtype) != length) return {{length, 0, 0, 0}, 1};
  return {{layout.kv_per_layer, layout.num_kv_heads, tokens, layout.head_dim}, 4};
}

// NumPy's array type and its types of elements, looked up once.
struct Numpy {
  nb::object array = nb::module_::import_("numpy").attr("ndarray");
  nb::object float32 = type("float32"), float16 = type("float16"), int8 = type("int8"), uint8 = type("uint8");
  // Of bfloat16: the element's type, and that of the arrays to write to. Looked up apart: they import one more library.
  nb::object bfloat16, layer;

  static nb::object type(const char* name) { return nb::module_::import_("numpy").attr("dtype")(name); }
  PyObject* element(const Layout& layout, size_t dimensions) const {
    if (dimensions == 1) return uint8.ptr();
    switch (layout.dtype) {
      case Dtype::Float32: return float32.ptr();
      case Dtype::Float16: return float16.ptr();
      case Dtype::Bfloat16: return bfloat16.ptr();
      case Dtype::Int8: return int8.ptr();
      case Dtype::Uint8: break;
    }
    return uint8.ptr();
  }
};

const Numpy& numpy() {
  static const Numpy* known = nullptr;  // no guarded static: an import lets other threads run
  if (!known) known = new Numpy;
  return *known;
}

const Numpy& numpy_with_bfloat16() {
  static const Numpy* known = nullptr;
  if (!known) {
    const nb::module_ python = nb::module_::import_("kvclient.blocks.bfloat16");
    auto* more = new Numpy(numpy());
    more->bfloat16 = python.attr("ELEMENT"), more->layer = python.attr("Layer");
    known = more;
  }
  return *known;
}

nb::dlpack::dtype element(const Layout& layout, size_t dimensions) {
  if (dimensions == 1) return nb::dtype<uint8_t>();
  switch (layout.dtype) {
    case Dtype::Float32: return nb::dtype<float>();
    case Dtype::Float16: return {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    case Dtype::Bfloat16: return {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
    case Dtype::Int8: return nb::dtype<int8_t>();
    case Dtype::Uint8: break;
  }
  return nb::dtype<uint8_t>();
}

std::string described(PyObject* item) {
  if (!PyBytes_Check(item)) return "of type " + class_of(item);
  return std::to_string(PyBytes_GET_SIZE(item)) + " bytes";
}

}  // namespace

KeysArgument::KeysArgument(nb::handle source) {
  if (nb::inst_check(source) && nb::isinstance<Chain>(source)) {
    chain_ = nb::inst_ptr<Chain>(source);
    keys_ = {chain_->keys(), chain_->size()};
    return;
  }
  if (PyBytes_Check(source.ptr()) && PyBytes_GET_SIZE(source.ptr()) % static_cast<Py_ssize_t>(kKeyBytes) == 0 &&
      reinterpret_cast<uintptr_t>(PyBytes_AS_STRING(source.ptr())) % alignof(Key) == 0) {
    keys_ = {reinterpret_cast<const Key*>(PyBytes_AS_STRING(source.ptr())),
             static_cast<size_t>(PyBytes_GET_SIZE(source.ptr())) / kKeyBytes};
    return;
  }
  if (PyList_Check(source.ptr()) || PyTuple_Check(source.ptr())) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(source.ptr());
    PyObject** items = PySequence_Fast_ITEMS(source.ptr());
    converted_.resize(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!PyBytes_Check(items[i]) || PyBytes_GET_SIZE(items[i]) != static_cast<Py_ssize_t>(kKeyBytes))
        raise("InvalidArgument", "a key is 32 bytes; key " + std::to_string(i) + " is " + described(items[i]));
      std::memcpy(&converted_[static_cast<size_t>(i)], PyBytes_AS_STRING(items[i]), kKeyBytes);
    }
  } else {
    if (!PyObject_CheckBuffer(source.ptr()))
      raise("InvalidArgument", "keys are a chain, a list of 32-byte keys or a packed buffer; got " + class_of(source));
    const Bytes bytes(source, "keys", false);
    if (bytes.size() % kKeyBytes)
      raise("InvalidArgument", "packed keys have " + std::to_string(bytes.size()) + " bytes; it must be a multiple of 32");
    converted_.resize(bytes.size() / kKeyBytes);
    if (bytes.size()) std::memcpy(converted_.data(), bytes.data(), bytes.size());
  }
  keys_ = converted_;
}

void wait_with_signals(double timeout_s, const std::function<void(const timespec&)>& wait) {
  if (std::isnan(timeout_s)) raise("InvalidArgument", "timeout_s is nan");  // no wait of it would ever end
  const double end = now_s() + timeout_s;
  for (;;) {
    const double left = end - now_s();
    try {
      const WithoutGil released;
      return wait(deadline_in(std::min(left, kSignalSlice_s)));
    } catch (const Error& error) {
      if (error.code != Code::DeadlineExceeded || left <= kSignalSlice_s) throw;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

Memory::Memory(std::shared_ptr<BlockBatch> from, size_t block, const std::byte* at, uint64_t bytes)
    : batch(std::move(from)), index(block), data(const_cast<std::byte*>(at)), length(bytes) {
  batch->hold(index);
}

Memory::Memory(Memory&& other) noexcept
    : batch(std::move(other.batch)),
      index(other.index),
      grants(std::move(other.grants)),
      data(other.data),
      length(other.length) {}

Memory::~Memory() {
  if (batch) batch->let_go(index);
}

nb::object as_memoryview(Memory&& memory) {
  nb::object owner = nb::cast(std::move(memory));
  return nb::steal(PyMemoryView_FromObject(owner.ptr()));
}

nb::object as_array(Memory&& memory, const Layout& layout, uint32_t tokens) {
  const Shape4 shape = shape_of(layout, memory.length, tokens);
  const bool bfloat16 = layout.dtype == Dtype::Bfloat16 && shape.count > 1;
  const Numpy& known = bfloat16 ? numpy_with_bfloat16() : numpy();
  const nb::object& kind = bfloat16 && !memory.batch ? known.layer : known.array;
  const nb::object dims = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(shape.count)));
  for (size_t i = 0; i < shape.count; ++i)
    PyTuple_SET_ITEM(dims.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromSize_t(shape.dims[i]));
  const nb::object owner = nb::cast(std::move(memory));  // the array is read-only if its buffer is
  PyObject* const arguments[] = {dims.ptr(), known.element(layout, shape.count), owner.ptr()};
  PyObject* array = PyObject_Vectorcall(kind.ptr(), arguments, 3, nullptr);
  if (!array) throw nb::python_error();
  return nb::steal(array);
}

// torch knows no read-only tensors: what protects a reader's block is that its mapping cannot be written.
nb::object as_tensor(Memory&& memory, const Layout& layout, uint32_t tokens) {
  const Shape4 shape = shape_of(layout, memory.length, tokens);
  void* data = memory.data;
  const nb::object owner = nb::cast(std::move(memory));
  return nb::cast(nb::ndarray<nb::pytorch>(data, shape.count, shape.dims, owner, nullptr, element(layout, shape.count)));
}

void bind_memory(nb::module_& m) {
  nb::class_<Memory>(m, "Memory", nb::type_slots(memory_slots),
                     "A stretch of the pool; owns what keeps it valid. Use memoryview() on it.");
}

}  // namespace kv
