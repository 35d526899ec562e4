// kvstored._core.DiskTier: the disk tier of one namespace. Every call releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/daemon/errors.h"
#include "bindings/daemon/latency.h"
#include "core/disk/tier.h"
#include "core/files/faults.h"

namespace nb = nanobind;

namespace {

using kv::DiskTier;
using kv::daemon::Latency;

constexpr uint32_t kDepth = 16;  // per directory: four blocks' pieces, so that the device never waits for this thread

// The engine that a directory got, and why.
struct ChosenEngine {
  std::string name, reason;
};

// A tier and what its engines are, for the log.
struct Tier {
  std::vector<std::unique_ptr<kv::Faults>> faults;  // of each directory; they outlive the tier
  std::vector<std::string> paths;
  std::string schedule;  // of faults
  std::unique_ptr<DiskTier> tier;
};

// On a thread of each directory's own.
ChosenEngine open_directory(Tier& self, uint8_t number) {
  const std::string& path = self.paths.at(number);
  kv::Choice choice = kv::choose_engine(path, kDepth);
  const ChosenEngine chosen{choice.engine->name(), choice.reason};
  DiskTier::Directory opened{path, std::make_unique<kv::RealFiles>(path, choice.direct), std::move(choice.engine),
                             choice.problem};
  if (!self.schedule.empty()) {
    auto& faults = self.faults.at(number) =
        std::make_unique<kv::Faults>(self.schedule, path, std::move(opened.files), std::move(opened.engine));
    opened.files = faults->take_files(), opened.engine = faults->take_engine();
  }
  self.tier->open(number, std::move(opened));
  return chosen;
}

nb::dict tier_stats(Tier& self) {
  const DiskTier::Stats s = [&] {
    nb::gil_scoped_release release;
    return self.tier->stats();
  }();
  nb::dict out;
#define X(name) out["disk_" #name] = s.name;
  // clang-format off
  X(files) X(bytes) X(quota_bytes) X(loads_waiting) X(loads_in_flight) X(writes_in_flight) X(written_today_bytes) X(listed)
  X(load_bytes_per_s) X(indexing)
  KV_DISK_COUNTERS(X);
  // clang-format on
#undef X
  out["disk_cpu_seconds"] = self.tier->thread_cpu_s();
  return out;
}

std::vector<Latency> tier_latencies(Tier& self) {
  return {{"", "load", self.tier->load_latency().read()}, {"", "write", self.tier->write_latency().read()}};
}

}  // namespace

void bind_tier(nb::module_& m) {
  m.def(
      "lock_directory",
      [](const std::string& path) {
        const int lock = kv::lock_directory(path);
        if (lock == -EWOULDBLOCK) throw kv::Error(kv::Code::Unavailable, path + ": another kvstored, or fsck, is at work there");
        if (lock < 0) throw kv::Error(kv::Code::Unavailable, kv::errno_text(path, -lock));
        return lock;
      },
      nb::arg("path"), nb::call_guard<nb::gil_scoped_release>(),
      "A descriptor that keeps others out of a directory of blocks while it is open.");
  nb::class_<ChosenEngine>(m, "ChosenEngine", "The engine that a directory got, and why.")
      .def_ro("name", &ChosenEngine::name)
      .def_ro("reason", &ChosenEngine::reason);
  nb::class_<DiskTier::Condition>(m, "DiskCondition", "Of a directory that is not well: full, read_only or failed.")
      .def_ro("path", &DiskTier::Condition::path)
      .def_ro("state", &DiskTier::Condition::state)
      .def_ro("text", &DiskTier::Condition::text);
  nb::class_<Tier>(m, "DiskTier", "The disk tier of one namespace. The store must outlive it; stop() before the store closes.")
      .def(
          "__init__",
          [](Tier* self, kv::Store& store, const std::vector<std::string>& directories, uint64_t quota_bytes, uint32_t max_files,
             uint32_t fanout_levels, uint32_t fanout_digits, uint64_t daily_write_bytes, bool keep_corrupt, bool huge_pool,
             const std::string& faults) {
            nb::gil_scoped_release release;
            auto made = std::make_unique<Tier>();
            DiskTier::Options options;
            made->paths = directories, made->schedule = faults, made->faults.resize(directories.size());
            for (const std::string& path : directories) options.directories.push_back({path, nullptr, nullptr});
            options.quota_bytes = quota_bytes, options.max_files = max_files;
            options.fanout = {fanout_levels, fanout_digits};
            options.daily_write_bytes = daily_write_bytes, options.keep_corrupt = keep_corrupt;
            options.huge_pool = huge_pool;
            made->tier = std::make_unique<DiskTier>(store, std::move(options));
            made->tier->attach();
            new (self) Tier(std::move(*made));
          },
          nb::keep_alive<1, 2>(), nb::arg("store"), nb::arg("directories"), nb::arg("quota_bytes"), nb::arg("max_files"),
          nb::arg("fanout_levels"), nb::arg("fanout_digits"), nb::arg("daily_write_bytes") = 0, nb::arg("keep_corrupt") = false,
          nb::arg("huge_pool") = false, nb::arg("faults") = "")
      .def("open", open_directory, nb::arg("number"), nb::call_guard<nb::gil_scoped_release>(),
           "A directory, once, also after begin(): I/O, for as long as it takes. The engine that it got.")
      .def("begin", [](Tier& self) { self.tier->begin(); })
      .def(
          "stop", [](Tier& self) { self.tier->stop(); }, nb::call_guard<nb::gil_scoped_release>())
      .def("set_quota", [](Tier& self, uint64_t bytes) { self.tier->set_quota(bytes); })
      .def("stats", tier_stats)
      .def("latencies", tier_latencies)
      .def("conditions", [](Tier& self) { return self.tier->conditions(); });
}
