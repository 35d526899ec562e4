// kvstored._core: the native half of the daemon.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <cstring>

#include "bindings/daemon/errors.h"
#include "bindings/daemon/latency.h"
#include "core/base/checksum.h"
#include "core/session/session_server.h"

namespace nb = nanobind;

void bind_disk(nb::module_& m);   // disk.cc
void bind_store(nb::module_& m);  // store.cc
void bind_tier(nb::module_& m);   // tier.cc
void bind_peers(nb::module_& m);  // peers.cc

namespace {

using kv::daemon::Latency;

nb::list sessions(kv::SessionServer& server) {
  nb::list out;
  for (const auto& [name, s] : server.sessions()) {
    nb::dict row;
    row["session"] = s.session, row["pid"] = s.pid, row["uid"] = s.uid, row["namespace"] = name, row["pins"] = s.pins;
    row["unsealed"] = s.unsealed, row["attached"] = s.attached, row["attached_s"] = s.attached_s, row["resumed"] = s.resumed;
    row["pinned_bytes"] = s.pinned_bytes, row["owner"] = s.terms.owner == kv::PinOwner::Engine ? "engine" : "client";
    row["pin_deadline_ms"] = s.terms.deadline_ms, row["pin_limit_bytes"] = s.terms.bytes, row["device"] = s.device;
    out.append(row);
  }
  return out;
}

std::vector<Latency> server_latencies(kv::SessionServer& server) {
  std::vector<Latency> out;
  for (const auto& read : server.latencies()) out.emplace_back(read.name, read.operation, read.counts);
  return out;
}

using Ids = std::vector<uint32_t>;

void make_tenant(kv::Tenant* self, Ids reader_users, Ids reader_groups, Ids writer_users, Ids writer_groups,
                 const nb::bytes& salt) {
  kv::Tenant made{{std::move(reader_users), std::move(reader_groups)}, {std::move(writer_users), std::move(writer_groups)}, {}};
  if (salt.size() != 0 && salt.size() != made.salt.size())
    throw kv::Error(kv::Code::InvalidArgument, "a salt has 32 bytes, or none");
  std::memcpy(made.salt.data(), salt.data(), salt.size());
  new (self) kv::Tenant(std::move(made));
}

nb::bytes salt_of(const kv::Tenant& tenant) {
  const bool none = tenant.salt == decltype(tenant.salt){};
  return nb::bytes(tenant.salt.data(), none ? 0 : tenant.salt.size());
}

void bind_tenant(nb::module_& m) {
  using kv::Tenant;
  nb::class_<Tenant>(m, "Tenant", "Who may read and write a namespace, by ids of this host, and its salt, or b\"\".")
      .def("__init__", make_tenant, nb::kw_only(), nb::arg("reader_users"), nb::arg("reader_groups"), nb::arg("writer_users"),
           nb::arg("writer_groups"), nb::arg("salt"))
      .def_prop_ro("reader_users", [](const Tenant& t) { return t.readers.users; })
      .def_prop_ro("reader_groups", [](const Tenant& t) { return t.readers.groups; })
      .def_prop_ro("writer_users", [](const Tenant& t) { return t.writers.users; })
      .def_prop_ro("writer_groups", [](const Tenant& t) { return t.writers.groups; })
      .def_prop_ro("salt", salt_of);
}

// Of the living session that has this token, or None.
std::optional<kv::Tokens::Grant> token(const kv::SessionServer& server, const nb::bytes& shown) {
  return server.token({static_cast<const uint8_t*>(shown.data()), shown.size()});
}

// The user id of a socket's peer, if that is on a list of any namespace, the daemon's own user or root; otherwise None.
nb::object peer(int socket, const std::vector<kv::Tenant>& tenants) {
  const auto who = kv::credentials_of(socket);
  if (!who) return nb::none();
  for (const kv::Tenant& tenant : tenants)
    if (kv::right_of(*who, tenant, ::geteuid()) != kv::Right::None) return nb::int_(who->uid);
  return nb::none();
}

// One row of the table of a block's life, by names.
struct NamedTransition {
  std::string before, event, after;
};

std::vector<NamedTransition> transitions() {
  std::vector<NamedTransition> out;
  for (const kv::Transition& t : kv::kTransitions)
    out.push_back({std::string(kv::name(t.from)), std::string(kv::name(t.event)), std::string(kv::name(t.to))});
  return out;
}

}  // namespace

NB_MODULE(_core, m) {
  nanobind::set_leak_warnings(false);  // objects alive at exit are the user's business
  m.doc() = "The native half of kvstored: the store and the session server.";
  translate_errors();
  nb::class_<Latency>(m, "Latency", "How long an operation took: counts per bucket, and their sum in seconds.")
      .def_ro("namespace", &Latency::space)
      .def_ro("operation", &Latency::operation)
      .def_ro("counts", &Latency::counts)
      .def_ro("sum_s", &Latency::sum_s);
  nb::class_<kv::Tokens::Grant>(m, "TokenGrant", "What the session that has a token may do.")
      .def_ro("namespace", &kv::Tokens::Grant::name)
      .def_ro("read_only", &kv::Tokens::Grant::read_only)
      .def_ro("uid", &kv::Tokens::Grant::uid);
  bind_tenant(m);
  bind_store(m);
  bind_tier(m);
  bind_peers(m);
  bind_disk(m);
  m.attr("FIRST_LAYOUTS") = kv::kFirstLayouts;  // of a table made before 2026-11-25
  nb::class_<NamedTransition>(m, "Transition", "A block in the state `before` is in `after` when the event has happened.")
      .def_ro("before", &NamedTransition::before)
      .def_ro("event", &NamedTransition::event)
      .def_ro("after", &NamedTransition::after);
  m.def("transitions", transitions, "The table of a block's life, for the documents.");
  m.def("crc32c", [](nb::bytes data) { return kv::crc32c(data.c_str(), data.size()); }, nb::arg("data"), "CRC32C of the bytes.");
  m.def("peer", peer, nb::arg("socket"), nb::arg("tenants"));
  nb::class_<kv::SessionServer>(m, "SessionServer", "The session socket, served by a thread of its own without the GIL.")
      .def(
          "__init__",
          [](kv::SessionServer* self, std::string path, nb::list stores, uint32_t max_sessions, uint32_t max_pins,
             std::vector<kv::Tenant> tenants) {
            std::vector<kv::Store*> pointers;
            for (nb::handle store : stores) pointers.push_back(nb::cast<kv::Store*>(store));
            new (self) kv::SessionServer({std::move(path), max_sessions, max_pins, std::move(tenants)}, std::move(pointers));
          },
          nb::keep_alive<1, 3>(), nb::arg("socket_path"), nb::arg("stores"), nb::arg("max_sessions") = 1024,
          nb::arg("max_pins") = 65536, nb::arg("tenants") = nb::list())
      .def("start", &kv::SessionServer::start)
      .def("stop", &kv::SessionServer::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("sessions", sessions)
      .def("latencies", server_latencies)
      .def("token", token, nb::arg("shown"))
      .def(
          "set_tenants",
          [](kv::SessionServer& server, std::vector<kv::Tenant> tenants) { server.set_tenants(std::move(tenants)); },
          nb::arg("tenants"))
      .def_prop_ro("refused", &kv::SessionServer::refused)
      .def_prop_ro("thread_cpu_s", &kv::SessionServer::thread_cpu_s);
}
