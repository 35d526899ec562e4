// kvstored._core.fsck: the check of a directory of blocks, for the command line; reports through two callables. _core.scan: the
// listing alone, to be measured.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings/daemon/errors.h"
#include "core/files/fsck.h"
#include "core/files/scan.h"

namespace nb = nanobind;

namespace {

std::string text(std::string_view view) { return std::string(view); }

nb::dict as_dict(const kv::FsckReport& report) {
  nb::dict out, found;
  out["files"] = report.files, out["bytes"] = report.bytes, out["read_bytes"] = report.read_bytes, out["aside"] = report.aside;
  out["repaired"] = report.repaired, out["failed"] = report.failed, out["errors"] = report.errors, out["wrong"] = report.wrong();
  for (size_t i = 0; i < kv::kFindings; ++i) found[text(kv::name(static_cast<kv::Finding>(i))).c_str()] = report.found[i];
  out["found"] = found;
  nb::dict identities;
  for (const auto& [name, blocks] : report.identities) identities[name.c_str()] = blocks;
  out["identities"] = identities;
  return out;
}

nb::dict fsck(const std::string& directory, bool repair, bool keep_corrupt, bool layers, nb::object finding,
              nb::object progress) {
  kv::FsckVisitor visitor;
  visitor.finding = [&](kv::Finding kind, const std::string& path, const std::string& why, kv::Action action) {
    nb::gil_scoped_acquire acquire;
    // A file's name may be any bytes.
    const nb::object name = nb::steal(PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
    finding(text(kv::name(kind)), name, why, text(kv::name(action)));
  };
  visitor.progress = [&](const kv::FsckReport& so_far) {
    nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    progress(so_far.files, so_far.bytes);
  };
  kv::FsckReport report;
  {
    nb::gil_scoped_release release;
    report = kv::fsck(directory, {repair, keep_corrupt, layers}, visitor);
  }
  return as_dict(report);
}

kv::Scanned scan(const std::string& directory) { return kv::scan(directory, std::nullopt, {}); }

}  // namespace

void bind_disk(nb::module_& m) {
  m.def("fsck", fsck, nb::arg("directory"), nb::kw_only(), nb::arg("repair"), nb::arg("keep_corrupt"), nb::arg("layers"),
        nb::arg("finding"), nb::arg("progress"));
  nb::class_<kv::Scanned>(m, "Scanned", "What lies in a directory of blocks.")
      .def_ro("files", &kv::Scanned::files)
      .def_ro("bytes", &kv::Scanned::bytes)
      .def_ro("strays", &kv::Scanned::strays);
  m.def("scan", scan, nb::arg("directory"), nb::call_guard<nb::gil_scoped_release>());
}
