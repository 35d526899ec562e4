// Chains, derived keys, answers that are foreseen, checksums and copies for Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bindings/client/buffers.h"
#include "bindings/client/errors.h"
#include "bindings/without_gil.h"
#include "core/base/checksum.h"
#include "core/base/copy.h"
#include "core/format/derived.h"
#include "core/format/keys.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {
namespace {

constexpr size_t kDigestWords = sizeof(Key) / sizeof(uint64_t);

// Tokens of each chunk, as a chain that is cut by content is given them.
std::vector<uint32_t> counts_of(nb::handle counts, size_t tokens, long long block_tokens) {
  const Integers<int32_t> checked = integers<int32_t>(counts, "counts");
  std::vector<uint32_t> out;
  size_t end = 0;
  for (const int32_t count : std::span(checked.data, checked.size)) {
    check_range("counts", count, 1, block_tokens);
    out.push_back(static_cast<uint32_t>(count));
    end += static_cast<size_t>(count);
  }
  if (end > tokens)
    raise("InvalidArgument", "counts add up to " + std::to_string(end) + " of " + std::to_string(tokens) + " tokens");
  return out;
}

void make_chain(Chain* self, nb::handle identity, nb::handle token_ids, long long block_tokens, nb::handle extra_ids,
                bool partial, nb::handle counts, long long start, nb::handle root, long long window) {
  const Key key = key_from(identity, "identity");
  check_range("block_tokens", block_tokens, 1, kMaxBlockTokens);
  const Integers<int32_t> tokens = integers<int32_t>(token_ids, "token_ids");
  check_range("len(token_ids)", tokens.size, 0, kMaxChainTokens);
  Integers<uint64_t> extra;
  uint32_t extra_words = 0;
  if (!extra_ids.is_none()) {
    extra = integers<uint64_t>(extra_ids, "extra_ids", kDigestWords);
    extra_words = static_cast<uint32_t>(extra.columns);
    if (extra.size != tokens.size * extra_words)
      raise("InvalidArgument", "extra_ids has " + std::to_string(extra.size / extra_words) + " entries for " +
                                   std::to_string(tokens.size) + " tokens");
  }
  check_range("start", start, 0, static_cast<long long>(kMaxChainTokens - tokens.size));
  check_range("window", window, 0, block_tokens);
  Cuts cuts{.counts = {}, .start = static_cast<size_t>(start), .root = nullptr, .window = static_cast<uint32_t>(window)};
  std::vector<uint32_t> cut;
  if (!counts.is_none()) {
    cut = counts_of(counts, tokens.size, block_tokens);
    cuts.counts = cut;
  }
  Key before{};
  if (!root.is_none()) before = key_from(root, "root"), cuts.root = &before;
  const size_t cut_all = counts.is_none() || !cut.empty() ? tokens.size : 0;
  new (self) Chain(key, tokens.data, cut_all, extra.data, extra_words, static_cast<uint32_t>(block_tokens), partial, cuts);
}

template <class Item>
nb::list list_of(size_t n, Item item) {
  nb::list out = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(n)));
  for (size_t i = 0; i < n; ++i) PyList_SET_ITEM(out.ptr(), i, nb::cast(item(i)).release().ptr());
  return out;
}

nb::object item(const Chain& self, nb::handle index) {
  if (PySlice_Check(index.ptr())) {
    Py_ssize_t start, stop, step;
    if (PySlice_Unpack(index.ptr(), &start, &stop, &step) != 0) throw nb::python_error();
    const Py_ssize_t count = PySlice_AdjustIndices(static_cast<Py_ssize_t>(self.size()), &start, &stop, step);
    if (step != 1) raise("InvalidArgument", "the step of a chain's slice is " + std::to_string(step) + "; it must be 1");
    return nb::cast(self.slice(start, count));
  }
  Py_ssize_t i = PyNumber_AsSsize_t(index.ptr(), PyExc_IndexError);
  if (i == -1 && PyErr_Occurred()) throw nb::python_error();
  if (i < 0) i += static_cast<Py_ssize_t>(self.size());
  if (i < 0 || i >= static_cast<Py_ssize_t>(self.size())) throw nb::index_error("chain index out of range");
  return to_bytes(self.keys()[i]);
}

using TokenView = nb::ndarray<nb::memview, const int32_t, nb::ndim<1>>;
using ExtraView = nb::ndarray<nb::memview, const uint64_t>;

ExtraView extra_view(const uint64_t* data, size_t tokens, size_t words, nb::handle owner) {
  const size_t shape[] = {tokens, words};
  return ExtraView(data, words == 1 ? 1 : 2, shape, owner);
}

// The object whose life keeps an array's memory alive.
nb::capsule owning(uint64_t* array) {
  return nb::capsule(array, [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
}

nb::object extra_ids(nb::handle self) {
  const auto& chain = nb::cast<const Chain&>(self);
  if (chain.extra_words() == 0) return nb::none();
  return nb::cast(extra_view(chain.extra(0), chain.num_tokens(), chain.extra_words(), self));
}

ExtraView extra_ids_from_digests(nb::sequence digests) {
  const size_t count = nb::len(digests);
  check_range("len(digests)", count, 0, kMaxChainTokens);
  auto* words = new uint64_t[count * kDigestWords]();
  const nb::capsule owner = owning(words);
  for (size_t i = 0; i < count; ++i) {
    const nb::object digest = digests[i];
    if (digest.is_none()) continue;
    const Key key = key_from(digest, ("digests[" + std::to_string(i) + "]").c_str());
    std::memcpy(words + i * kDigestWords, &key, sizeof key);
  }
  return extra_view(words, count, kDigestWords, owner);
}

nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>> windows(nb::handle identity, nb::handle token_ids, long long block_tokens) {
  const Key key = key_from(identity, "identity");
  check_range("block_tokens", block_tokens, 1, kMaxBlockTokens);
  const Integers<int32_t> tokens = integers<int32_t>(token_ids, "token_ids");
  const size_t window = block_tokens, count = tokens.size < window ? 0 : tokens.size - window + 1;
  auto* out = new uint64_t[count];
  const nb::capsule owner = owning(out);
  window_fingerprints(fingerprint_base(key), tokens.data, tokens.size, window, out);
  return {out, {count}, owner};
}

uint32_t checksum(nb::handle data, uint32_t value) {
  const Bytes bytes(data, "data", false);
  return without_gil(bytes.size(), [&] { return crc32c(bytes.data(), bytes.size(), value); });
}

nb::object copy_into(nb::handle destination, nb::handle source, bool with_checksum) {
  const Bytes to(destination, "dst", true), from(source, "src", false);
  if (to.size() != from.size())
    raise("InvalidArgument",
          "dst has " + std::to_string(to.size()) + " bytes and src " + std::to_string(from.size()) + "; they must be equal");
  if (to.data() < from.data() + from.size() && from.data() < to.data() + to.size())
    raise("InvalidArgument", "dst and src overlap");
  if (with_checksum) return nb::int_(without_gil(to.size(), [&] { return copy_crc32c(to.data(), from.data(), to.size()); }));
  without_gil(to.size(), [&] { copy_stream(to.data(), from.data(), to.size()); });
  return nb::none();
}

// Calls put(i, key) for each name of a list or tuple of bytes, or of bytes that are names of 32 in one piece.
template <class Put>
nb::object each(const DerivedKeys& self, nb::handle names, Put put) {
  if (PyBytes_Check(names.ptr())) {
    const char* data = PyBytes_AS_STRING(names.ptr());
    const Py_ssize_t size = PyBytes_GET_SIZE(names.ptr()), width = sizeof(Key);
    if (size % width)
      raise("InvalidArgument", "names in one piece have " + std::to_string(size) + " bytes, not a multiple of 32");
    nb::object out = put.make(size / width);
    for (Py_ssize_t i = 0; i < size / width; ++i) put(i, self.of(data + i * width, width));
    return out;
  }
  const nb::object items = nb::steal(PySequence_Fast(names.ptr(), "names must be a sequence of bytes"));
  if (!items.is_valid()) throw nb::python_error();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
  nb::object out = put.make(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name = PySequence_Fast_GET_ITEM(items.ptr(), i);  // nothing here runs Python code
    if (!PyBytes_Check(name)) raise("InvalidArgument", "names[" + std::to_string(i) + "] is not bytes");
    put(i, self.of(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)));
  }
  return out;
}

struct Packed {
  char* data = nullptr;
  nb::object make(Py_ssize_t count) {
    nb::object out = nb::steal(PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(sizeof(Key))));
    if (!out.is_valid()) throw nb::python_error();
    data = PyBytes_AS_STRING(out.ptr());
    return out;
  }
  void operator()(Py_ssize_t i, const Key& key) const { std::memcpy(data + i * sizeof(Key), &key, sizeof key); }
};

struct Listed {
  nb::list list;
  nb::object make(Py_ssize_t) { return list; }
  void operator()(Py_ssize_t, const Key& key) { list.append(to_bytes(key)); }
};

void bind_derived(nb::module_& m) {
  nb::class_<DerivedKeys>(m, "DerivedKeys",
                          "Keys of blocks that an engine names by a hash of its own, beneath an identity of 32 bytes:\n"
                          "SHA-256(identity | 32 zero bytes | name). Immutable.")
      .def(
          "__init__", [](DerivedKeys* self, nb::handle identity) { new (self) DerivedKeys(key_from(identity, "identity")); },
          "identity"_a.none())
      .def(
          "packed", [](const DerivedKeys& self, nb::handle names) { return each(self, names, Packed{}); }, "names"_a,
          "The keys of the names in one piece, 32 bytes each. Names: a sequence of bytes, or names of 32 bytes in one piece.")
      .def(
          "listed", [](const DerivedKeys& self, nb::handle names) { return each(self, names, Listed{}); }, "names"_a,
          "The keys of the names, 32 bytes each.");
}

void bind_chain(nb::module_& m) {
  nb::class_<Chain>(m, "Chain",
                    "The keys, fingerprints and tokens of a prompt's chunks. Immutable; a slice shares its memory.\n"
                    "Tokens behind the last full chunk are left out unless partial is true.")
      .def("__init__", make_chain, "identity"_a.none(), "token_ids"_a.none(), "block_tokens"_a = 128, "extra_ids"_a = nb::none(),
           "partial"_a = false, "counts"_a = nb::none(), "start"_a = 0, "root"_a = nb::none(), "window"_a = 0)
      .def("__len__", &Chain::size)
      .def("__getitem__", item, "index"_a, "A prefix key, or for a slice of step 1 a chain.")
      .def("__eq__", [](const Chain& a, nb::handle b) { return nb::isinstance<Chain>(b) && a == nb::cast<const Chain&>(b); })
      .def("__hash__",
           [](const Chain& c) {
             const uint64_t words = c.empty() ? c.identity().words[0] : c.keys()[c.size() - 1].words[0];
             return static_cast<Py_hash_t>((words ^ c.start_token(0)) >> 1);
           })
      .def("__repr__",
           [](const Chain& c) {
             return nb::str("Chain of {} chunks, {} tokens from {}").attr("format")(c.size(), c.num_tokens(), c.start_token(0));
           })
      .def_prop_ro(
          "keys", [](const Chain& c) { return list_of(c.size(), [&](size_t i) { return to_bytes(c.keys()[i]); }); },
          "Per chunk its prefix key, 32 bytes: of the chunk and of all before it.")
      .def_prop_ro(
          "content_keys",
          [](const Chain& c) { return list_of(c.size(), [k = c.content_keys()](size_t i) { return to_bytes(k[i]); }); },
          "Per chunk its content key, 32 bytes: of its own tokens, wherever they stand.")
      .def_prop_ro(
          "parent_keys", [](const Chain& c) { return list_of(c.size(), [&](size_t i) { return to_bytes(c.parent_key(i)); }); },
          "Per chunk the prefix key before it; 32 zero bytes for a prompt's first chunk.")
      .def_prop_ro(
          "fingerprints", [](const Chain& c) { return list_of(c.size(), [f = c.fingerprints()](size_t i) { return f[i]; }); },
          "Per chunk the rolling hash of its tokens, below 2^61 - 1: what a search by content looks for.")
      .def_prop_ro(
          "packed_keys", [](const Chain& c) { return nb::bytes(c.keys(), c.size() * sizeof(Key)); },
          "The keys in one piece, 32 bytes each.")
      .def_prop_ro(
          "identity", [](const Chain& c) { return to_bytes(c.identity()); }, "The reuse identity the keys begin with.")
      .def_prop_ro("block_tokens", &Chain::block_tokens, "Tokens of a full chunk.")
      .def_prop_ro(
          "token_counts", [](const Chain& c) { return list_of(c.size(), [&](size_t i) { return c.token_count(i); }); },
          "Tokens of each chunk.")
      .def_prop_ro("num_tokens", &Chain::num_tokens, "Tokens of all chunks together.")
      .def_prop_ro(
          "start_token", [](const Chain& c) { return c.start_token(0); }, "Position of the first token in the prompt.")
      .def_prop_ro(
          "start_tokens", [](const Chain& c) { return list_of(c.size(), [&](size_t i) { return c.start_token(i); }); },
          "Per chunk the position of its first token.")
      .def_prop_ro(
          "token_ids",
          [](nb::handle self) {
            const auto& c = nb::cast<const Chain&>(self);
            return TokenView(c.tokens(0), {c.num_tokens()}, self);
          },
          "The tokens as a read-only memoryview of int32.")
      .def_prop_ro("extra_ids", extra_ids, "The extra ids as a read-only memoryview of uint64, [n] or [n, 4], or None.");
}

// One answer for the keys that an engine asks for next, which asks for one a call. What is not just the next key, by the
// same asker, is the other function's.
struct Foreseen {
  nb::object otherwise, context, answer;
  nb::list keys;
  Py_ssize_t start = 0, next = 0, stop = 0;

  void begin(nb::list of, Py_ssize_t first, Py_ssize_t end, nb::object asker, nb::object what) {
    if (first < 0 || end <= first || end > static_cast<Py_ssize_t>(of.size()))
      raise("InvalidArgument", "keys " + std::to_string(first) + " to " + std::to_string(end) + " of " +
                                   std::to_string(of.size()) + "; there must be one at least");
    keys = std::move(of), context = std::move(asker), answer = std::move(what);
    start = first, next = first + 1, stop = end;
  }

  Py_ssize_t end() {
    const Py_ssize_t asked = next - start;
    start = next = stop = 0;
    context.reset();
    return asked;
  }
};

// As a method of nanobind's, in a third of its time.
PyObject* ask(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Foreseen& mine = *nb::inst_ptr<Foreseen>(self);
  if (count == 2 && names == nullptr && mine.next < mine.stop && args[1] == mine.context.ptr() &&
      mine.next < PyList_GET_SIZE(mine.keys.ptr()) && args[0] == PyList_GET_ITEM(mine.keys.ptr(), mine.next)) {
    ++mine.next;
    return nb::borrow(mine.answer).release().ptr();
  }
  return PyObject_Vectorcall(mine.otherwise.ptr(), args, static_cast<size_t>(count), names);
}

PyMethodDef kAsk = {"ask", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(ask)), METH_FASTCALL | METH_KEYWORDS,
                    "ask(key, context): the answer for the next key; else what the other function says."};

// The other function is mostly a method of who has this.
int visit_all(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const Foreseen& mine = *nb::inst_ptr<Foreseen>(self);
  for (PyObject* each : {mine.otherwise.ptr(), mine.context.ptr(), mine.answer.ptr(), mine.keys.ptr()}) Py_VISIT(each);
  return 0;
}

int clear_all(PyObject* self) {
  Foreseen& mine = *nb::inst_ptr<Foreseen>(self);
  mine.end();
  mine.otherwise = nb::none();
  return 0;
}

PyType_Slot foreseen_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(visit_all)}, {Py_tp_clear, reinterpret_cast<void*>(clear_all)}, {0, nullptr}};

void bind_foreseen(nb::module_& m) {
  nb::class_<Foreseen>(m, "Foreseen", nb::type_slots(foreseen_slots),
                       "One answer for the keys that are asked for next, each by ask(key, context). What is not just the next\n"
                       "key, the same object, for the same context, is what otherwise(key, context) says. Not thread-safe.")
      .def(
          "__init__", [](Foreseen* self, nb::object otherwise) { new (self) Foreseen{.otherwise = std::move(otherwise)}; },
          "otherwise"_a)
      .def("begin", &Foreseen::begin, "keys"_a, "start"_a, "stop"_a, "context"_a, "answer"_a,
           "keys[start] was asked for, and those up to `stop` follow. Raises InvalidArgument for a stretch of none.")
      .def("end", &Foreseen::end, "How many were asked for, of all since begin(). From now on nothing is foreseen.")
      .def_prop_ro(
          "ask", [](nb::handle self) { return nb::steal(PyCFunction_New(&kAsk, self.ptr())); }, "A function of (key, context).");
}

}  // namespace
}  // namespace kv

void bind_keys(nb::module_& m) {
  using namespace kv;
  bind_chain(m);
  bind_derived(m);
  bind_foreseen(m);
  m.def(
      "root_key", [](nb::handle identity) { return to_bytes(root_key(key_from(identity, "identity"))); }, "identity"_a.none(),
      "What the first chunk's prefix key continues. Never a block's key.");
  m.def("extra_ids_from_digests", extra_ids_from_digests, "digests"_a,
        "Extra ids, four words a token, from one 32-byte digest or None per token.");
  m.def("window_fingerprints", windows, "identity"_a.none(), "token_ids"_a.none(), "block_tokens"_a = 128,
        "The fingerprint of every window of block_tokens ids, as a NumPy array.");
  m.def("crc32c", checksum, "data"_a.none(), "value"_a = 0, "CRC32C of data; value is that of the bytes before it.");
  m.def("copy_into", copy_into, "dst"_a.none(), "src"_a.none(), "checksum"_a = true,
        "Copies src into dst, past the caches, and returns the CRC32C of the bytes (None without checksum).\n"
        "Fastest where dst starts on a multiple of 64 bytes, as every layer of a block does.");
}
