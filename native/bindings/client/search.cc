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
  for (const Placed& f : found) out.append(nb::make_tuple(f.start, to_bytes(f.block.key)));
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
  nb::borrow<nb::class_<Client>>(m.attr("Client"))
      .def("find", find, nb::arg("identity").none(), nb::arg("token_ids").none(), nb::arg("block_tokens") = 128,
           nb::arg("on_disk") = false,
           "Sealed blocks whose fingerprint a window of the tokens has: (start, key) each, by start. Candidates: their\n"
           "tokens are to be compared. on_disk: also blocks that lie only there.")
      .def("children", children_of, nb::arg("key").none(), nb::arg("on_disk") = false,
           "Keys of sealed blocks that may continue this one.");
}

}  // namespace kv
