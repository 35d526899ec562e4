// Writer and GrantedBlock: what create answers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "bindings/client/buffers.h"
#include "bindings/client/errors.h"
#include "bindings/client/store.h"
#include "bindings/without_gil.h"
#include "core/base/error.h"

namespace nb = nanobind;

namespace kv {

struct Writer {
  std::shared_ptr<BlockWriter> grants;
};

namespace {

struct GrantedBlock {
  std::shared_ptr<BlockWriter> grants;
  size_t index;

  BlockWriter::Item& item() const {
    BlockWriter::Item& it = grants->item(index);
    if (!it.open || grants->closed()) raise("Closed", "this block was sealed or aborted, or its client closed");
    return it;
  }
  uint32_t tokens() const { return grants->item(index).wanted.tokens; }
  const Layout& layout() const { return grants->layout(); }
  Memory layers() const {
    item();
    return {grants, grants->bytes(index), layout().layers_bytes(tokens())};
  }
  Memory meta() const {
    item();
    return {grants, grants->meta(index), layout().meta_bytes(tokens())};
  }
  Memory layer(long long number) const {
    const uint32_t i = checked(number);
    item();
    return {grants, grants->layer(index, i), layout().layer_bytes(i, tokens())};
  }
  uint32_t checked(long long layer) const {
    check_range("layer", layer, 0, layout().num_layers() - 1);
    return static_cast<uint32_t>(layer);
  }
};

// Who ends blocks holds copies off while the daemon is asked, for which nobody waits with the GIL.
BlockWriter::Copying copying_of(BlockWriter& grants) {
  if (std::optional now = grants.try_copying()) return *std::move(now);
  const WithoutGil released;
  return grants.copying();
}

void copy_layers(const GrantedBlock& block, uint32_t first, uint32_t count, nb::handle source) {
  block.item();
  const Bytes bytes(source, "source", false);
  uint64_t want = 0;
  for (uint32_t i = first; i < first + count; ++i) want += block.layout().layer_bytes(i, block.tokens());
  if (bytes.size() != want)
    raise("InvalidArgument",
          "the source has " + std::to_string(bytes.size()) + " bytes, the layers have " + std::to_string(want));
  std::optional copying = copying_of(*block.grants);
  block.item();
  for (uint32_t i = first; i < first + count; ++i) block.grants->layer(block.index, i);  // under the GIL
  auto copy = [&] {
    const auto until_here = *std::exchange(copying, std::nullopt);  // not until the GIL is back
    const uint8_t* from = bytes.data();
    for (uint32_t i = first; i < first + count; ++i) {
      block.grants->copy_layer(block.index, i, from);
      from += block.layout().layer_bytes(i, block.tokens());
    }
  };
  without_gil(want, copy);
}

const char* word(Grant status) {
  switch (status) {
    case Grant::Granted: return "granted";
    case Grant::Exists: return "exists";
    case Grant::Pending: return "pending";
    case Grant::NoSpace: return "no_space";
  }
  return "?";
}

std::vector<size_t> all_of(const Writer& writer, Grant status) {
  std::vector<size_t> out;
  for (size_t i = 0; i < writer.grants->size(); ++i)
    if (writer.grants->item(i).status == status) out.push_back(i);
  return out;
}

size_t checked_index(const Writer& writer, Py_ssize_t i) {
  const auto size = static_cast<Py_ssize_t>(writer.grants->size());
  const Py_ssize_t asked = i;
  if (i < 0) i += size;
  if (i < 0 || i >= size)
    throw nb::index_error(("index " + std::to_string(asked) + " of " + std::to_string(size) + " keys").c_str());
  const Grant status = writer.grants->item(static_cast<size_t>(i)).status;
  if (status == Grant::NoSpace)
    raise("NoSpace",
          "no unpinned run of memory is long enough for block " + std::to_string(i) + " of " +
              std::to_string(writer.grants->layout().extent_bytes(writer.grants->item(static_cast<size_t>(i)).wanted.tokens)) +
              " bytes");
  if (status != Grant::Granted)
    raise("InvalidArgument", "key " + std::to_string(i) + " was not granted to this writer: " + word(status));
  return static_cast<size_t>(i);
}

struct RowIn {
  size_t index;
  const uint8_t* from;
  uint64_t length;
};

// Of that layer of an open block, all.
RowIn row_in(const Writer& writer, uint64_t place, long long number) {
  const auto index = static_cast<Py_ssize_t>(std::min<uint64_t>(place, PTRDIFF_MAX));
  const GrantedBlock block{writer.grants, checked_index(writer, index)};
  block.item();
  return {block.index, nullptr, block.layout().layer_bytes(block.checked(number), block.tokens())};
}

void copy_rows_in(const Writer& writer, long long number, const std::vector<RowIn>& rows) {
  const auto layer = static_cast<uint32_t>(number);
  std::optional copying = copying_of(*writer.grants);
  for (const RowIn& row : rows) GrantedBlock{writer.grants, row.index}.item();
  uint64_t total = 0;
  for (const RowIn& row : rows) writer.grants->layer(row.index, layer), total += row.length;  // under the GIL
  auto copy = [&] {
    const auto until_here = *std::exchange(copying, std::nullopt);  // not until the GIL is back
    for (const RowIn& row : rows) writer.grants->copy_layer(row.index, layer, row.from, row.length);
  };
  without_gil(total, copy);
}

// One layer of several blocks out of rows of the caller's memory.
void write_layer(const Writer& writer, long long number, nb::handle source, nb::handle indices, nb::handle offsets) {
  const Bytes bytes(source, "source", false);
  const Places places(indices, offsets);
  std::vector<RowIn> rows;
  rows.reserve(places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    RowIn& row = rows.emplace_back(row_in(writer, places.indices.data[i], number));
    row.from = places.row(bytes, i, row.length);
  }
  copy_rows_in(writer, number, rows);
}

// The same out of memory of its own for each.
void copy_in(const Writer& writer, long long number, nb::sequence sources, nb::handle indices, bool whole) {
  const Integers<uint64_t> which = integers<uint64_t>(indices, "indices");
  const Buffers buffers(sources, "sources", false, which.size);
  std::vector<RowIn> rows;
  rows.reserve(which.size);
  for (size_t i = 0; i < which.size; ++i) {
    RowIn& row = rows.emplace_back(row_in(writer, which.data[i], number));
    row.from = buffers[i].data(), row.length = buffers.fitting(i, row.length, whole);
  }
  copy_rows_in(writer, number, rows);
}

std::vector<size_t> chosen(const Writer& writer, std::optional<Py_ssize_t> index) {
  return index ? std::vector<size_t>{checked_index(writer, *index)} : all_of(writer, Grant::Granted);
}

void leave(const Writer& writer, nb::handle type, nb::handle, nb::handle) {
  const std::vector<size_t> open = writer.grants->open_items();
  const WithoutGil released;
  if (!type.is_none()) return writer.grants->abort(open);
  try {
    writer.grants->seal(open);
  } catch (const Error& error) {
    if (error.code == Code::InvalidArgument) writer.grants->abort(open);  // an exception that leaves the context, as any other
    throw;
  }
}

bool wait_pending(const Writer& writer, std::optional<double> timeout_s) {
  try {
    wait_with_signals(timeout_s.value_or(writer.grants->timeout_s()), [&](const timespec& deadline) {
      if (!writer.grants->wait_pending(deadline)) throw Error(Code::DeadlineExceeded, "blocks are still pending");
    });
  } catch (const Error& error) {
    if (error.code != Code::DeadlineExceeded || all_of(writer, Grant::Pending).empty()) throw;
    return false;
  }
  return true;
}

void bind_granted(nb::module_& m) {
  nb::class_<GrantedBlock>(m, "GrantedBlock", "A block being written. Its views are writable until it is sealed or aborted.")
      .def_prop_ro(
          "view", [](const GrantedBlock& b) { return as_memoryview(b.layers()); },
          "The layers as one writable memoryview of bytes, each starting on a multiple of 512. Raises Closed, as all here,\n"
          "once the block was sealed or aborted.")
      .def_prop_ro(
          "meta", [](const GrantedBlock& b) { return as_memoryview(b.meta()); },
          "The client's meta area, writable: meta_fixed + tokens * meta_per_token bytes. A chain has filled it already.")
      .def(
          "layer", [](const GrantedBlock& b, long long i) { return as_array(b.layer(i), b.layout(), b.tokens()); },
          nb::arg("layer"),
          "That layer as a writable array [2, kv_heads, tokens, head_dim], bfloat16 of ml_dtypes, to which a torch tensor can "
          "be\n"
          "assigned too; bytes under a codec.")
      .def(
          "tensor", [](const GrantedBlock& b, long long i) { return as_tensor(b.layer(i), b.layout(), b.tokens()); },
          nb::arg("layer"), "The torch view of it.")
      .def(
          "copy_layer", [](const GrantedBlock& b, long long i, nb::handle source) { copy_layers(b, b.checked(i), 1, source); },
          nb::arg("layer"), nb::arg("source").none(),
          "Copies one layer in, past the caches, with its checksum on the way: from a contiguous buffer or CPU tensor of just\n"
          "its bytes. Raises InvalidArgument, Closed.")
      .def(
          "copy_from", [](const GrantedBlock& b, nb::handle source) { copy_layers(b, 0, b.layout().num_layers(), source); },
          nb::arg("source").none(),
          "Copies all layers in, from bytes that follow each other without padding. Raises InvalidArgument, Closed.")
      .def(
          "mark_layer",
          [](const GrantedBlock& b, long long i) {
            b.item();
            b.grants->mark_layer(b.index, b.checked(i), copying_of(*b.grants));
          },
          nb::arg("layer"),
          "Publishes that layer to followers; layers are published in order, each once. Raises InvalidArgument, also for one\n"
          "whose memory was never asked for.")
      .def_prop_ro(
          "key", [](const GrantedBlock& b) { return to_bytes(b.grants->item(b.index).wanted.key); }, "Its 32 bytes.")
      .def_prop_ro("tokens", &GrantedBlock::tokens, "Tokens it will hold.")
      .def("__repr__", [](const GrantedBlock& b) { return "<GrantedBlock for " + std::to_string(b.tokens()) + " tokens>"; });
}

}  // namespace

nb::object make_writer(std::shared_ptr<BlockWriter> grants) { return nb::cast(Writer{std::move(grants)}); }
BlockWriter* grants_of(nb::handle writer) {
  if (!nb::isinstance<Writer>(writer))
    raise("InvalidArgument", "sealing is of type " + std::string(Py_TYPE(writer.ptr())->tp_name) + "; it must be a Writer");
  return nb::cast<Writer&>(writer).grants.get();
}

void bind_writer(nb::module_& m) {
  nb::class_<Writer>(
      m, "Writer",
      "What create answers. Leaving the context seals what was granted, or aborts it on an exception: also on the\n"
      "InvalidArgument of a block with layers nobody asked for, which would show another prompt's bytes.")
      .def("__len__", [](const Writer& w) { return w.grants->size(); })
      .def(
          "__getitem__", [](const Writer& w, Py_ssize_t i) { return GrantedBlock{w.grants, checked_index(w, i)}; },
          "The granted block of that key. Raises NoSpace, InvalidArgument if the key was not granted, IndexError.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", leave, nb::arg("type").none(), nb::arg("value").none(), nb::arg("traceback").none())
      .def_prop_ro(
          "results",
          [](const Writer& w) {
            nb::list out;
            for (size_t i = 0; i < w.grants->size(); ++i) out.append(nb::str(word(w.grants->item(i).status)));
            return out;
          },
          "A word per key: \"granted\", \"exists\", \"pending\" (another writes it) or \"no_space\".")
      .def_prop_ro(
          "granted",
          [](const Writer& w) {
            nb::list out;
            for (size_t i : all_of(w, Grant::Granted)) out.append(i);
            return out;
          },
          "The indices of the keys that are this writer's to fill.")
      .def("copy_layer", write_layer, nb::arg("layer"), nb::arg("source").none(), nb::arg("indices"), nb::arg("offsets"),
           "Copies that layer of the granted blocks at `indices` out of `source`, a contiguous buffer or CPU tensor, each from\n"
           "its offset in bytes, with its checksum on the way. Raises InvalidArgument, Closed, IndexError, NoSpace.")
      .def("copy_in", copy_in, nb::arg("layer"), nb::arg("sources"), nb::arg("indices"), nb::arg("whole") = true,
           "Copies that layer of the granted blocks at `indices` out of `sources`, a contiguous buffer or CPU tensor for each,\n"
           "with its checksum on the way. A source has just the layer's bytes; without whole it may have fewer, behind which\n"
           "follow zeros. Raises InvalidArgument, Closed, IndexError, NoSpace.")
      .def(
          "seal",
          [](const Writer& w, std::optional<Py_ssize_t> i, bool zero_rest) {
            const std::vector<size_t> which = chosen(w, i);
            const WithoutGil released;
            w.grants->seal(which, zero_rest);
          },
          nb::arg("index") = nb::none(), nb::arg("zero_rest") = false,
          "Publishes one granted block, or all. Layers whose memory was never asked for become zeros with zero_rest; without\n"
          "it such a block is refused, and nothing is sealed. Raises InvalidArgument then, BlockLost if some were aborted or\n"
          "lost their session.")
      .def(
          "abort",
          [](const Writer& w, std::optional<Py_ssize_t> i) {
            const std::vector<size_t> which = chosen(w, i);
            const WithoutGil released;
            w.grants->abort(which);
          },
          nb::arg("index") = nb::none(),
          "Gives up one granted block, or all: promises that copies into it have finished. Idempotent.")
      .def("wait_pending", wait_pending, nb::arg("timeout_s") = nb::none(),
           "Waits, for timeout_s seconds at most (the client's by default), for the blocks others write: each becomes\n"
           "\"exists\" or \"granted\". False if not all did in time.")
      .def("__repr__", [](const Writer& w) {
        return "<Writer: " + std::to_string(all_of(w, Grant::Granted).size()) + " of " + std::to_string(w.grants->size()) +
               " granted>";
      });
  bind_granted(m);
}

}  // namespace kv
