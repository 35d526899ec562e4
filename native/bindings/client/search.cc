// The client's search by content, for Python.
#include <nanobind/nanobind.h>

#include "bindings/client/buffers.h"
#include "bindings/client/errors.h"
#include "bindings/client/store.h"
#include "bindings/without_gil.h"
#include "core/client/search.h"

namespace nb = nanobind;

namespace kv {
namespace {

constexpr size_t kReleaseTokens = 1 << 14;  // from here on other threads run meanwhile

// What find() answers: a named tuple, so that who unpacks it goes on doing so.
PyTypeObject* found_block;

PyTypeObject* make_found_block() {
  static PyStructSequence_Field fields[] = {
      {"start", "The token of the prompt that it begins at."}, {"key", "Its 32 bytes."}, {nullptr, nullptr}};
  static PyStructSequence_Desc about = {"kvclient._core.FoundBlock", "A block found by its tokens.", fields, 2};
  PyTypeObject* made = PyStructSequence_NewType(&about);
  if (made == nullptr) throw nb::python_error();
  return made;
}

nb::object found_at(size_t start, const Key& key) {
  nb::object out = nb::steal(PyStructSequence_New(found_block));
  if (!out.is_valid()) throw nb::python_error();
  PyStructSequence_SetItem(out.ptr(), 0, nb::int_(start).release().ptr());
  PyStructSequence_SetItem(out.ptr(), 1, to_bytes(key).release().ptr());
  return out;
}

nb::list find(Client& client, nb::handle identity, nb::handle token_ids, uint32_t block_tokens, bool on_disk) {
  const Key key = key_from(identity, "identity");
  if (block_tokens == 0 || block_tokens > kMaxBlockTokens)
    raise("InvalidArgument",
          "block_tokens is " + std::to_string(block_tokens) + "; allowed are 1 to " + std::to_string(kMaxBlockTokens));
  const Integers<int32_t> tokens = integers<int32_t>(token_ids, "token_ids");
  const std::shared_ptr<Attachment> at = client.usable();
  std::vector<Placed> found;
  auto run = [&] { found = search(at->index, fingerprint_base(key), {tokens.data, tokens.size}, block_tokens, on_disk); };
  if (tokens.size < kReleaseTokens) {
    run();
  } else {
    const WithoutGil released;
    run();
  }
  nb::list out;
  for (const Placed& f : found) out.append(found_at(f.start, f.block.key));
  return out;
}

nb::list children_of(Client& client, nb::handle key, bool on_disk) {
  const std::shared_ptr<Attachment> at = client.usable();
  nb::list out;
  for (const Sighting& s : children(at->index, key_from(key, "key"), on_disk)) out.append(to_bytes(s.key));
  return out;
}

}  // namespace

void bind_search(nb::module_& m) {
  found_block = make_found_block();
  m.attr("FoundBlock") = nb::handle(reinterpret_cast<PyObject*>(found_block));
  nb::borrow<nb::class_<Client>>(m.attr("Client"))
      .def("find", find, nb::arg("identity").none(), nb::arg("token_ids").none(), nb::arg("block_tokens") = 128,
           nb::arg("on_disk") = false,
           "Sealed blocks whose fingerprint a window of the tokens has: FoundBlocks, by start. Candidates: their\n"
           "tokens are to be compared. on_disk: also blocks that lie only there.")
      .def("children", children_of, nb::arg("key").none(), nb::arg("on_disk") = false,
           "Keys of sealed blocks that may continue this one.");
}

}  // namespace kv
