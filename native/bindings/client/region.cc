// Region: a client's own memory in the pool, and the blocks sealed where they lie in it.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/client/buffers.h"
#include "bindings/client/errors.h"
#include "bindings/client/store.h"
#include "bindings/without_gil.h"
#include "core/client/region.h"

namespace nb = nanobind;

namespace kv {
namespace {

struct Held {
  std::shared_ptr<Region> region;
};

// `pieces`: of each block none, or offset and length of one after the other.
std::vector<std::string> seal(const Held& held, uint32_t layout, nb::handle keys, nb::handle offsets,
                              const std::vector<uint32_t>& tokens, const std::vector<std::vector<uint64_t>>& pieces,
                              uint32_t priority, uint32_t ttl_s) {
  const KeysArgument names(keys);
  const Integers<uint64_t> places = integers<uint64_t>(offsets, "offsets");
  const size_t count = names.keys().size();
  if (places.size != count || tokens.size() != count || pieces.size() != count)
    raise("InvalidArgument", std::to_string(places.size) + " offsets and " + std::to_string(tokens.size()) +
                                 " token counts for " + std::to_string(count) + " keys");
  std::vector<Region::Wanted> wanted;
  for (size_t i = 0; i < count; ++i) {
    wanted.push_back({names.keys()[i], places.data[i], tokens[i]});
    for (size_t at = 0; at + 1 < pieces[i].size(); at += 2) wanted[i].pieces.push_back({pieces[i][at], pieces[i][at + 1]});
  }
  std::vector<Region::Sealing> said;
  {
    const WithoutGil released;
    said = held.region->seal(layout, wanted, priority, ttl_s);
  }
  static const char* const kWords[] = {"sealed", "exists", "pending", "no_space", "lost"};
  std::vector<std::string> out;
  for (const Region::Sealing word : said) out.push_back(kWords[static_cast<size_t>(word)]);
  return out;
}

// `places`: [blocks, layers, buffers, 2] as uint64. Of each block a word and why.
std::vector<std::pair<std::string, std::string>> load(const Held& held, const Blocks& blocks, long long first, nb::handle places,
                                                      size_t layers, size_t buffers) {
  const Integers<uint64_t> numbers = integers<uint64_t>(places, "buffers");
  const size_t count = blocks.batch->size();
  if (first < 0 || first > UINT32_MAX || numbers.size != count * layers * buffers * 2)
    raise("InvalidArgument", std::to_string(numbers.size) + " numbers for " + std::to_string(count) + " blocks");
  std::vector<Region::Answer> answers;
  {
    const WithoutGil released;
    std::vector<Region::Buffers> each(count, Region::Buffers(layers, std::vector<Extent>(buffers)));
    const uint64_t* next = numbers.data;
    for (Region::Buffers& block : each)
      for (std::vector<Extent>& layer : block)
        for (Extent& at : layer) at = {next[0], next[1]}, next += 2;
    answers = held.region->load(*blocks.batch, static_cast<uint32_t>(first), each);
  }
  static const char* const kWords[] = {"loaded", "missing", "pending", "corrupt", "lost", "refused"};
  std::vector<std::pair<std::string, std::string>> out;
  for (Region::Answer& answer : answers) out.emplace_back(kWords[static_cast<size_t>(answer.word)], std::move(answer.why));
  return out;
}

std::vector<std::string> give_back(const Held& held, nb::handle keys) {
  const KeysArgument names(keys);
  std::vector<Back> answers;
  {
    const WithoutGil released;
    answers = held.region->give_back(names.keys());
  }
  static const char* const kWords[] = {"taken", "held", "gone"};
  std::vector<std::string> out;
  for (const Back back : answers) out.push_back(kWords[static_cast<size_t>(back)]);
  return out;
}

}  // namespace

void bind_region(nb::module_& m) {
  nb::class_<Held>(m, "Region", "Memory of the pool that an allocator of the caller's own divides.")
      .def(
          "__init__",
          [](Held* self, Client& client, uint64_t length) {
            const WithoutGil released;
            new (self) Held{std::make_shared<Region>(client, length)};
          },
          nb::arg("client"), nb::arg("length"))
      .def_prop_ro(
          "view", [](const Held& h) { return as_memoryview({h.region, h.region->data(), h.region->length()}); },
          "Its bytes, writable. They stay mapped as long as the view lives.")
      .def_prop_ro("attachment", [](const Held& h) { return h.region->attachment(); })
      .def("seal", seal, nb::arg("layout_id"), nb::arg("keys").none(), nb::arg("offsets"), nb::arg("token_counts"),
           nb::arg("pieces"), nb::arg("priority"), nb::arg("ttl_s"),
           "Seals blocks where they lie, at an offset or in pieces; a word per key: \"sealed\", \"exists\", \"pending\", "
           "\"no_space\": not here, or "
           "\"lost\".")
      .def("load", load, nb::arg("blocks"), nb::arg("layer_index"), nb::arg("places"), nb::arg("layers"), nb::arg("buffers"),
           "Copies layers of the blocks out to [blocks, layers, buffers, 2] places; of each block a word and why.")
      .def("give_back", give_back, nb::arg("keys").none(), "A word per key: \"taken\", \"held\" or \"gone\".")
      .def(
          "is_sealed", [](const Held& h, uint64_t offset, uint64_t length) { return h.region->is_sealed(offset, length); },
          nb::arg("offset"), nb::arg("length"))
      .def("close", [](const Held& h) { h.region->close(); }, nb::call_guard<WithoutGil>());
}

}  // namespace kv
