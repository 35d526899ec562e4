// Long reads of files, several parts at one time, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <vector>

#include "bindings/client/buffers.h"
#include "bindings/client/errors.h"
#include "bindings/without_gil.h"
#include "core/base/error.h"
#include "core/files/faults.h"
#include "core/weights/stretch_reader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {
namespace {

// With the faults that its reads meet, for tests.
struct Reader {
  std::unique_ptr<Faults> faults;
  std::unique_ptr<StretchReader> reads;
};

std::unique_ptr<Engine> engine_of(bool direct, uint32_t depth) {
  if (direct) {
    try {
      return std::make_unique<AioEngine>(depth);
    } catch (const Error&) {  // the host has no queue left: threads read as well
    }
  }
  return std::make_unique<ThreadEngine>(depth);
}

void make(Reader* self, bool direct, long long depth, const std::string& faults) {
  check_range("depth", depth, 1, kMaxDepth);
  try {
    std::unique_ptr<Engine> engine = engine_of(direct, static_cast<uint32_t>(depth));
    auto reader = std::make_unique<Reader>();
    if (!faults.empty()) {
      reader->faults = std::make_unique<Faults>(faults, "", nullptr, std::move(engine));
      engine = reader->faults->take_engine();
    }
    reader->reads = std::make_unique<StretchReader>(std::move(engine));
    new (self) Reader(std::move(*reader));
  } catch (const Error& error) {
    raise(error.code == Code::InvalidArgument ? "InvalidArgument" : "Unavailable", error.what());
  }
}

nb::object read(Reader& self, nb::sequence stretches, nb::handle memory, bool urgent) {
  const Bytes bytes(memory, "memory", true);
  std::vector<Stretch> asked;
  uint64_t at = 0;
  for (nb::handle each : stretches) {
    Stretch& stretch = asked.emplace_back(nb::cast<const Stretch&>(each));
    if (stretch.length > bytes.size() - at || stretch.need > stretch.length)
      raise("InvalidArgument", "a stretch of " + std::to_string(stretch.length) + " bytes, " + std::to_string(stretch.need) +
                                   " needed, in " + std::to_string(bytes.size() - at) + " of memory");
    stretch.memory = reinterpret_cast<std::byte*>(bytes.data()) + at;
    at += stretch.length;
  }
  std::optional<StretchFailure> failure;
  bool closed = false;
  {
    const WithoutGil released;
    try {
      failure = self.reads->read(asked, urgent);
    } catch (const Error&) {
      closed = true;
    }
  }
  if (closed) raise("Closed", "the reader was closed");
  if (failure) return nb::cast(*failure);
  nb::list sums;
  for (const Stretch& stretch : asked) sums.append(stretch.crc);
  return sums;
}

void close(Reader& self) {
  const WithoutGil released;
  self.reads->close();
}

}  // namespace

void bind_stretches(nb::module_& m) {
  nb::class_<Stretch>(m, "Stretch", "Bytes of a file to be read, of which the first `needed` must be there.")
      .def(
          "__init__",
          [](Stretch* self, int descriptor, uint64_t offset, uint64_t length, uint64_t needed) {
            new (self) Stretch{.fd = descriptor, .offset = offset, .length = length, .need = needed};
          },
          "descriptor"_a, "offset"_a, "length"_a, "needed"_a);
  nb::class_<StretchFailure>(m, "StretchFailure", "Which stretch could not be read, by its number, and where in the file.")
      .def_ro("stretch", &StretchFailure::stretch)
      .def_ro("offset", &StretchFailure::offset)
      .def_ro("error", &StretchFailure::error, "errno; 0: the file ends there.");
  nb::class_<Reader>(m, "StretchReader", "Reads long stretches of files, several parts of each at one time.")
      .def("__init__", make, "direct"_a, "depth"_a = 8, "faults"_a = "",
           "direct: its descriptors have O_DIRECT. depth: parts of 4 MiB under way. faults: a schedule, for tests.")
      .def("read", read, "stretches"_a, "memory"_a, "urgent"_a = false,
           "The stretches, one behind the other, into memory. The CRC32C of the bytes that must be there, of each; or a\n"
           "StretchFailure. urgent: before what was asked for and is not under way. Several threads may read. Raises Closed.")
      .def("close", close, "Ends reads that run, with Closed.")
      .def_prop_ro("engine", [](const Reader& self) { return self.reads->engine(); }, "aio or threads.");
}

}  // namespace kv
