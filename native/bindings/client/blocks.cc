// Blocks and BlockView: what get answers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "bindings/client/buffers.h"
#include "bindings/client/errors.h"
#include "bindings/client/store.h"
#include "bindings/without_gil.h"
#include "core/base/checksum.h"
#include "core/base/copy.h"
#include "core/base/error.h"
#include "core/format/meta.h"

namespace nb = nanobind;

namespace kv {
namespace {

// Keeps the Blocks it came from: a count under the GIL is cheaper than a shared pointer's, a hundred times a get.
struct BlockView {
  nb::object owner;
  const std::shared_ptr<BlockBatch>& batch;  // the owner's
  size_t index;

  BlockBatch::Item& item() const { return batch->item(index); }
  const Layout& layout() const { return *item().layout; }
  uint32_t tokens() const { return item().at.shape.tokens; }

  void need(long long layer) const {
    check_range("layer", layer, 0, layout().num_layers() - 1);
    if (item().at.control.state() == State::Sealed) return;
    const uint32_t ready = batch->layers_ready(index);
    if (ready <= layer && batch->lost(index)) raise("BlockLost", "the block's writer ended before it was whole");
    if (ready <= layer)
      raise("InvalidArgument", "layer " + std::to_string(layer) + " of a followed block with " + std::to_string(ready) +
                                   " layers; wait_layer waits for it");
  }
  Memory memory(uint64_t offset, uint64_t length) const {
    Memory out(batch, index, nullptr, length);  // held first: of a block in pieces the bytes are mapped for who holds it
    out.data = const_cast<std::byte*>(batch->bytes(index)) + offset;
    return out;
  }
  Memory layer(long long i) const {
    need(i);
    const auto at = static_cast<uint32_t>(i);
    return memory(layout().layer_offset(at, tokens()), layout().layer_bytes(at, tokens()));
  }
};

double timeout_of(const std::optional<double>& timeout_s, const BlockBatch& batch) {
  return timeout_s ? *timeout_s : batch.attachment().options().timeout_s;
}

// A view's buffer is the block itself: one object less for what every reader does.
int block_buffer(PyObject* self, Py_buffer* view, int flags) {
  const BlockView* block = nb::inst_ptr<BlockView>(self);
  const std::byte* bytes;
  try {
    if (block->item().at.control.state() != State::Sealed) block->need(block->layout().num_layers() - 1);
    try {
      block->batch->hold(block->index);
    } catch (const Error& error) {
      raise(error.code == Code::BlockLost ? "BlockLost" : "Closed", error.what());
    }
    try {
      bytes = block->batch->bytes(block->index);
    } catch (...) {
      block->batch->let_go(block->index);
      throw;
    }
  } catch (nb::python_error& error) {
    error.restore();
    return -1;
  } catch (const std::bad_alloc&) {  // of one in pieces, which is mapped or copied
    PyErr_NoMemory();
    return -1;
  }
  const auto length = static_cast<Py_ssize_t>(block->layout().layers_bytes(block->tokens()));
  if (PyBuffer_FillInfo(view, self, const_cast<std::byte*>(bytes), length, 1, flags) == 0) return 0;
  block->batch->let_go(block->index);
  return -1;
}

void release_buffer(PyObject* self, Py_buffer*) {
  const BlockView* block = nb::inst_ptr<BlockView>(self);
  block->batch->let_go(block->index);
}

PyType_Slot block_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(block_buffer)},
                             {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
                             {0, nullptr}};

nb::object block_at(nb::handle_t<Blocks> self, Py_ssize_t i) {
  const Blocks& blocks = *nb::inst_ptr<Blocks>(self);
  const auto size = static_cast<Py_ssize_t>(blocks.batch->size());
  const Py_ssize_t asked = i;
  if (i < 0) i += size;
  if (i < 0 || i >= size)
    throw nb::index_error(("index " + std::to_string(asked) + " of " + std::to_string(size) + " blocks").c_str());
  switch (blocks.batch->item(static_cast<size_t>(i)).state) {
    case ItemState::Miss: return nb::none();
    case ItemState::Exhausted: raise("PinsExhausted", blocks.batch->attachment().exhausted());
    case ItemState::Hit: break;
  }
  return nb::cast(BlockView{nb::borrow(self), blocks.batch, static_cast<size_t>(i)});
}

nb::object blocks_of(nb::handle_t<Blocks> self, Py_ssize_t start, Py_ssize_t step, Py_ssize_t count) {
  nb::object out = nb::steal(PyList_New(count));
  if (!out.is_valid()) throw nb::python_error();
  for (Py_ssize_t k = 0; k < count; ++k) PyList_SET_ITEM(out.ptr(), k, block_at(self, start + k * step).release().ptr());
  return out;
}

nb::object get_item(nb::handle_t<Blocks> self, nb::handle index) {
  if (!PySlice_Check(index.ptr())) {
    const Py_ssize_t i = PyNumber_AsSsize_t(index.ptr(), PyExc_IndexError);
    if (i == -1 && PyErr_Occurred()) throw nb::python_error();
    return block_at(self, i);
  }
  Py_ssize_t start, stop, step;
  if (PySlice_Unpack(index.ptr(), &start, &stop, &step) != 0) throw nb::python_error();
  const auto size = static_cast<Py_ssize_t>(nb::inst_ptr<Blocks>(self)->batch->size());
  const Py_ssize_t count = PySlice_AdjustIndices(size, &start, &stop, step);
  return blocks_of(self, start, step, count);
}

uint32_t layer_of(const BlockBatch::Item& item, long long layer) {
  check_range("layer", layer, 0, item.layout->num_layers() - 1);
  return static_cast<uint32_t>(layer);
}

void wait_all(const Blocks& blocks, long long number, std::optional<double> timeout_s) {
  BlockBatch& batch = *blocks.batch;
  uint32_t layer = 0;
  for (size_t i = 0; i < batch.size(); ++i)
    if (batch.item(i).state == ItemState::Hit) layer = layer_of(batch.item(i), number);
  wait_with_signals(timeout_of(timeout_s, batch), [&](const timespec& deadline) {
    for (size_t i = 0; i < batch.size(); ++i)
      if (batch.item(i).state == ItemState::Hit) batch.wait_layer(i, layer, deadline);
  });
}

// The layer of each block, None for a miss, once it is there in all.
nb::object layers_of(nb::handle_t<Blocks> self, long long number, std::optional<double> timeout_s) {
  const Blocks& blocks = *nb::inst_ptr<Blocks>(self);
  wait_all(blocks, number, timeout_s);
  nb::list out;
  for (size_t i = 0; i < blocks.batch->size(); ++i) {
    if (blocks.batch->item(i).state != ItemState::Hit) {
      out.append(nb::none());
      continue;
    }
    const BlockView block{nb::borrow(self), blocks.batch, i};
    out.append(as_array(block.layer(number), block.layout(), block.tokens()));
  }
  return out;
}

// A layer of each of several blocks, held, and where its first `length` bytes go.
struct RowOut {
  Memory held;
  uint8_t* to;
  uint64_t length;
  std::optional<uint32_t> checksum;  // of the whole layer, to be compared
};

RowOut row_out(nb::handle_t<Blocks> self, uint64_t index, long long number, bool verify) {
  const Blocks& blocks = *nb::inst_ptr<Blocks>(self);
  BlockBatch& batch = *blocks.batch;
  if (index >= batch.size() || batch.item(index).state != ItemState::Hit)
    raise("InvalidArgument", "block " + std::to_string(index) + " is not one that was found");
  Memory held = BlockView{nb::borrow(self), blocks.batch, index}.layer(number);
  const uint64_t length = held.length;
  return {std::move(held), nullptr, length, verify ? batch.checksum(index, static_cast<uint32_t>(number)) : std::nullopt};
}

// The places of those whose bytes are not what their checksum says. `cached`: who asked reads them next.
std::vector<size_t> copy_rows_out(const std::vector<RowOut>& rows, bool cached) {
  uint64_t total = 0;
  for (const RowOut& row : rows) total += row.length;
  std::vector<size_t> wrong;
  auto copy = [&] {
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto& [held, to, length, checksum] = rows[i];
      if (!checksum) {
        copy_stream(to, held.data, length);
        continue;
      }
      const uint32_t sum = cached ? copy_and_sum(to, held.data, length) : copy_crc32c(to, held.data, length);
      if (crc32c(held.data + length, held.length - length, sum) == *checksum) continue;
      wrong.push_back(i);
      if (!cached) std::memset(to, 0, length);  // nobody gets to see what is not right
    }
  };
  without_gil(total, copy);
  return wrong;
}

// One layer of several blocks into rows of the caller's memory, without an object for each.
std::vector<size_t> copy_layer(nb::handle_t<Blocks> self, long long number, nb::handle target, nb::handle indices,
                               nb::handle offsets, bool verify) {
  const Bytes bytes(target, "target", true);
  const Places places(indices, offsets);
  std::vector<RowOut> rows;
  rows.reserve(places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    RowOut& row = rows.emplace_back(row_out(self, places.indices.data[i], number, verify));
    row.to = places.row(bytes, i, row.length);
  }
  return copy_rows_out(rows, true);
}

// The same into memory of its own for each.
std::vector<size_t> copy_out(nb::handle_t<Blocks> self, long long number, nb::sequence targets, nb::handle indices, bool whole) {
  const Integers<uint64_t> which = integers<uint64_t>(indices, "indices");
  const Buffers buffers(targets, "targets", true, which.size);
  std::vector<RowOut> rows;
  rows.reserve(which.size);
  for (size_t i = 0; i < which.size; ++i) {
    RowOut& row = rows.emplace_back(row_out(self, which.data[i], number, true));
    row.to = buffers[i].data(), row.length = buffers.fitting(i, row.length, whole);
  }
  return copy_rows_out(rows, false);
}

void wait_one(const BlockView& block, long long number, std::optional<double> timeout_s) {
  const uint32_t layer = layer_of(block.item(), number);
  wait_with_signals(timeout_of(timeout_s, *block.batch),
                    [&](const timespec& deadline) { block.batch->wait_layer(block.index, layer, deadline); });
}

void bind_view(nb::module_& m) {
  nb::class_<BlockView>(m, "BlockView", nb::type_slots(block_slots),
                        "One block, pinned. Views, arrays and tensors are zero-copy, read-only and own the pin.")
      .def_prop_ro(
          "view", [](nb::handle self) { return nb::steal(PyMemoryView_FromObject(self.ptr())); },
          "The layers as one read-only memoryview of bytes, each starting on a multiple of 512; checksums and meta area lie\n"
          "behind it. Raises InvalidArgument while a layer of a followed block is missing, Closed after the release.")
      .def_prop_ro(
          "meta",
          [](const BlockView& b) {
            b.need(b.layout().num_layers() - 1);
            return as_memoryview(b.memory(b.layout().meta_offset(b.tokens()), b.layout().meta_bytes(b.tokens())));
          },
          "The client's meta area: a read-only memoryview of meta_fixed + tokens * meta_per_token bytes.")
      .def(
          "holds",
          [](const BlockView& b, nb::handle token_ids) {
            b.need(b.layout().num_layers() - 1);
            const Bytes ids(token_ids, "token_ids", false);
            const Memory area = b.memory(b.layout().meta_offset(b.tokens()), b.layout().meta_bytes(b.tokens()));
            return meta_holds(area.data, area.length, b.tokens(), ids.data(), ids.size());
          },
          nb::arg("token_ids"),
          "Whether the meta area, as the library writes it, has these tokens: int32, of any shape, as bytes or another "
          "contiguous\n"
          "buffer. A key is a hash; this confirms a hit. Raises InvalidArgument while a layer is missing, Closed.")
      .def(
          "layer", [](const BlockView& b, long long i) { return as_array(b.layer(i), b.layout(), b.tokens()); }, nb::arg("layer"),
          "That layer as a read-only array [2, kv_heads, tokens, head_dim], bfloat16 of ml_dtypes. Under a codec, or where the\n"
          "layout gave the layer another width, the bytes of it. Raises InvalidArgument, Closed.")
      .def(
          "tensor", [](const BlockView& b, long long i) { return as_tensor(b.layer(i), b.layout(), b.tokens()); },
          nb::arg("layer"), "The torch view of it. Writing to it faults the process: the mapping is read-only.")
      .def("wait_layer", wait_one, nb::arg("layer"), nb::arg("timeout_s") = nb::none(),
           "Waits for that layer of this block, as Blocks.wait_layer does for all.")
      .def(
          "verify",
          [](const BlockView& b) {
            b.need(b.layout().num_layers() - 1);
            const Memory held = b.memory(0, 0);
            const WithoutGil released;
            return b.batch->verify(b.index);
          },
          "Whether the bytes have the checksums they were sealed with; true if there are none.")
      .def_prop_ro("tokens", &BlockView::tokens, "Tokens in this block.")
      .def_prop_ro(
          "key",
          [](const BlockView& b) {
            Key key;  // of the record, which the pin keeps
            const Memory held = b.memory(0, 0);
            for (size_t i = 0; i < 4; ++i)
              key.words[i] = b.batch->attachment().index.record(b.item().at.record).key[i].load(std::memory_order_relaxed);
            return to_bytes(key);
          },
          "Its 32 bytes. Raises Closed after the release.")
      .def_prop_ro(
          "layout_id", [](const BlockView& b) { return b.item().at.shape.layout; }, "The pool's id of its layout.")
      .def_prop_ro(
          "base_position", [](const BlockView& b) { return b.item().at.shape.base_position; },
          "Position of its first token in the prompt it was computed in.")
      .def_prop_ro(
          "layers_ready", [](const BlockView& b) { return b.batch->layers_ready(b.index); },
          "How many of its layers, from the first on, may be read.")
      .def_prop_ro(
          "sealed", [](const BlockView& b) { return b.batch->sealed(b.index); }, "Whether it is complete and immutable.")
      .def("__repr__", [](const BlockView& b) {
        return "<BlockView of " + std::to_string(b.tokens()) + " tokens, " + std::to_string(b.batch->layers_ready(b.index)) +
               " of " + std::to_string(b.layout().num_layers()) + " layers there>";
      });
}

}  // namespace

nb::object make_blocks(std::shared_ptr<BlockBatch> batch) {
  batch->attachment().watch(batch);
  return nb::cast(Blocks{std::move(batch)});
}

void bind_blocks(nb::module_& m) {
  nb::class_<Blocks>(m, "Blocks", "What get answers: per key a BlockView, or None for a miss. Leaving the context releases all.")
      .def("__len__", [](const Blocks& b) { return b.batch->size(); })
      .def("__getitem__", get_item)
      .def("__iter__",
           [](nb::handle_t<Blocks> self) {
             const auto size = static_cast<Py_ssize_t>(nb::inst_ptr<Blocks>(self)->batch->size());
             return nb::iter(blocks_of(self, 0, 1, size));
           })
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def(
          "__exit__", [](const Blocks& b, nb::handle, nb::handle, nb::handle) { b.batch->close(); }, nb::arg("type").none(),
          nb::arg("value").none(), nb::arg("traceback").none())
      .def(
          "release", [](const Blocks& b) { b.batch->close(); }, "Gives back what no export holds. Idempotent.")
      .def("wait_layer", wait_all, nb::arg("layer"), nb::arg("timeout_s") = nb::none(),
           "Waits, for timeout_s seconds at most (the client's by default), for that layer of all blocks that were found.\n"
           "Raises BlockLost when a writer gave its block up, DeadlineExceeded, InvalidArgument.")
      .def("layers", layers_of, nb::arg("layer"), nb::arg("timeout_s") = nb::none(),
           "Waits as wait_layer does; then that layer of every block, as BlockView.layer gives it, in the order of the keys,\n"
           "None for a miss.")
      .def("copy_layer", copy_layer, nb::arg("layer"), nb::arg("target").none(), nb::arg("indices"), nb::arg("offsets"),
           nb::arg("verify") = false,
           "Copies that layer of the blocks at `indices` into `target`, a contiguous writable buffer or CPU tensor, each to its\n"
           "offset in bytes. With verify, the places in `indices` of the blocks whose bytes differ from their checksum are\n"
           "returned. Raises InvalidArgument for a block that was not found and for a row outside, Closed.")
      .def("copy_out", copy_out, nb::arg("layer"), nb::arg("targets"), nb::arg("indices"), nb::arg("whole") = true,
           "Copies that layer of the blocks at `indices` into `targets`, a contiguous writable buffer or CPU tensor for each,\n"
           "past the caches, and returns the places in `indices` of those whose bytes differ from their checksum: their targets\n"
           "are zeros. A target has just the layer's bytes; without whole it may have fewer, and gets the first. Raises\n"
           "InvalidArgument for a block that was not found and for a target of another size, Closed.")
      .def_prop_ro(
          "hits", [](const Blocks& b) { return b.batch->hits(); }, "How many of the keys were found.")
      .def("__repr__", [](const Blocks& b) {
        return "<Blocks: " + std::to_string(b.batch->hits()) + " of " + std::to_string(b.batch->size()) + " found>";
      });
  bind_view(m);
}

}  // namespace kv
