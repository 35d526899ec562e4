// kvstored._core.PeerServer and PeerTier: blocks that go to other hosts, and come from there. Every call that waits releases the
// GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/daemon/errors.h"
#include "core/base/error.h"
#include "core/format/layout.h"
#include "core/peer/server.h"
#include "core/peer/tier.h"
#include "core/shared/shared_reader.h"

namespace nb = nanobind;

namespace {

kv::peer::Secret secret(nb::bytes salt) {
  kv::peer::Secret out;
  if (salt.size() != out.size()) throw kv::Error(kv::Code::InvalidArgument, "a shared namespace needs a salt");
  std::memcpy(out.data(), salt.c_str(), out.size());
  return out;
}

nb::list peer_stats(kv::peer::Tier& tier) {
  std::vector<kv::peer::Tier::PeerStats> found;
  {
    nb::gil_scoped_release release;
    found = tier.stats();
  }
  nb::list out;
  for (const auto& peer : found) {
    nb::dict about;
    about["node"] = peer.node, about["address"] = peer.address, about["state"] = peer.state, about["why"] = peer.why;
#define X(name) about[#name] = peer.name;
    // clang-format off
    X(queued) X(in_flight) X(bytes_in_flight) X(rtt_us) X(bytes_per_s) X(connects) X(streams) X(held) X(complete) X(lent)
    KV_PEER_COUNTERS(X)
    // clang-format on
#undef X
        out.append(about);
  }
  return out;
}

nb::dict server_stats(kv::peer::Server& server) {
  const kv::peer::Server::Stats s = server.stats();
  nb::dict out;
#define X(name) out[#name] = s.name;
  X(connections) X(accepted) X(refused) X(served_blocks) X(served_bytes) X(turned_away);
#undef X
  return out;
}

nb::dict shared_stats(kv::SharedReader& reader) {
  const kv::SharedReader::Stats s = reader.stats();
  nb::dict out;
#define X(name) out["shared_" #name] = s.name;
  // clang-format off
  X(nodes) X(waiting)
  KV_SHARED_COUNTERS(X)
  // clang-format on
#undef X
      return out;
}

struct Places {
  uint64_t extent_bytes, checksums_offset, meta_offset, meta_bytes;
  std::vector<std::tuple<uint64_t, uint64_t>> layers;
};

Places places_of(nb::bytes blob, uint32_t tokens) {
  const kv::Layout layout = kv::Layout::parse({static_cast<const uint8_t*>(blob.data()), blob.size()});
  if (tokens == 0 || tokens > layout.block_tokens)
    throw kv::Error(kv::Code::InvalidArgument,
                    "a block of " + std::to_string(tokens) + " tokens, the limit is " + std::to_string(layout.block_tokens));
  Places out{
      layout.extent_bytes(tokens), layout.checksums_offset(tokens), layout.meta_offset(tokens), layout.meta_bytes(tokens), {}};
  for (uint32_t layer = 0; layer < layout.num_layers(); ++layer)
    out.layers.emplace_back(layout.layer_offset(layer, tokens), layout.layer_bytes(layer, tokens));
  return out;
}

void bind_places(nb::module_& m) {
  nb::class_<Places>(m, "Places", "Where in its extent the parts of a block of so many tokens lie, in bytes.")
      .def_ro("extent_bytes", &Places::extent_bytes)
      .def_ro("checksums_offset", &Places::checksums_offset)
      .def_ro("meta_offset", &Places::meta_offset)
      .def_ro("meta_bytes", &Places::meta_bytes)
      .def_ro("layers", &Places::layers, "(offset, bytes) of each");
  m.def("places", places_of, nb::arg("layout"), nb::arg("tokens"), "Raises InvalidArgument for what is no layout.");
}

void bind_shared(nb::module_& m) {
  nb::class_<kv::SharedReader>(m, "SharedReader", "What other daemons keep in a shared directory, below one namespace.")
      .def(
          "__init__",
          [](kv::SharedReader* self, kv::Store& store, std::string directory, std::string node, std::string space,
             uint32_t fanout_levels, uint32_t fanout_digits, kv::peer::Tier* next) {
            new (self) kv::SharedReader(
                store, {std::move(directory), std::move(node), std::move(space), {fanout_levels, fanout_digits}}, next);
          },
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 8>(), nb::arg("store"), nb::arg("directory"), nb::arg("node"),
          nb::arg("space"), nb::arg("fanout_levels"), nb::arg("fanout_digits"), nb::arg("next").none() = nb::none(),
          "`next` is asked for what nobody keeps there. stop() before it, and before the store closes.")
      .def("start", &kv::SharedReader::start, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &kv::SharedReader::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("stats", shared_stats);
}

}  // namespace

void bind_peers(nb::module_& m) {
  using kv::peer::Server;
  using kv::peer::Tier;
  using kv::peer::TlsIdentity;
  nb::class_<TlsIdentity>(m, "PeerTls", "Who this daemon is to its peers by certificate, and whose word it takes: paths of PEM.")
      .def(
          "__init__",
          [](TlsIdentity* self, std::string certificate, std::string key, std::string authority) {
            new (self) TlsIdentity(kv::peer::TlsFiles{std::move(certificate), std::move(key), std::move(authority)});
          },
          nb::arg("certificate"), nb::arg("key"), nb::arg("authority"))
      .def(
          "read_again",
          [](TlsIdentity& self, std::string certificate, std::string key, std::string authority) {
            self.read_again({std::move(certificate), std::move(key), std::move(authority)});
          },
          nb::arg("certificate"), nb::arg("key"), nb::arg("authority"), "If this raises, what was read before stays.")
      .def("doubt", &TlsIdentity::doubt, nb::arg("node"), "Why peers refuse it as this node's now; \"\": not for name or time.");
  nb::class_<Server>(m, "PeerServer", "The port that other daemons read blocks from. stop() before the stores close.")
      .def(
          "__init__",
          [](Server* self, const std::string& node, const std::string& address, uint16_t port, std::vector<std::string> peers,
             uint32_t network, uint32_t mask, std::shared_ptr<TlsIdentity> tls) {
            new (self) Server({node, address, port, std::move(peers), network, mask, std::move(tls)});
          },
          nb::arg("node"), nb::arg("address"), nb::arg("port"), nb::arg("peers"), nb::arg("network") = 0, nb::arg("mask") = 0,
          nb::arg("tls").none() = nb::none())
      .def(
          "share", [](Server& self, kv::Store& store, nb::bytes salt) { self.share(store, secret(salt)); },
          nb::keep_alive<1, 2>(), nb::arg("store"), nb::arg("salt"), "A namespace that peers with this salt may read.")
      .def("start", &Server::start, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &Server::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("welcome", &Server::welcome, nb::call_guard<nb::gil_scoped_release>(), nb::arg("nodes"),
           "These may read too, and nobody else that was welcomed before.")
      .def("renew", &Server::renew, nb::call_guard<nb::gil_scoped_release>(), "Ends what was made with earlier certificates.")
      .def_prop_ro("port", &Server::port)
      .def("stats", server_stats);
  nb::class_<Tier::Address>(m, "PeerAddress",
                            "Where a peer is: a numeric host. tells: of what it has; who does not is asked. places:\n"
                            "the fabric's process beside this daemon, which puts blocks into its pool itself.")
      .def(
          "__init__",
          [](Tier::Address* self, std::string node, std::string host, uint16_t port, bool tells, bool places) {
            new (self) Tier::Address{std::move(node), std::move(host), port, tells, places};
          },
          nb::arg("node"), nb::arg("host"), nb::arg("port"), nb::arg("tells") = true, nb::arg("places") = false);
  nb::class_<Tier>(m, "PeerTier", "Other hosts' daemons below one namespace. stop() before the store closes.")
      .def(
          "__init__",
          [](Tier* self, kv::Store& store, const std::string& node, nb::bytes salt, const std::vector<Tier::Address>& peers,
             std::shared_ptr<TlsIdentity> tls,
             bool takes) { new (self) Tier(store, node, secret(salt), peers, std::move(tls), takes); },
          nb::keep_alive<1, 2>(), nb::arg("store"), nb::arg("node"), nb::arg("salt"), nb::arg("peers"),
          nb::arg("tls").none() = nb::none(), nb::arg("takes") = false, "takes: what a peer pushes is fetched.")
      .def("start", &Tier::start, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &Tier::stop, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "join",
          [](Tier& self, std::string node, std::string host, uint16_t port) {
            const nb::gil_scoped_release release;
            return self.join({std::move(node), std::move(host), port});
          },
          nb::arg("node"), nb::arg("host"), nb::arg("port"), "A peer more. False: there are as many as there may be.")
      .def("leave", &Tier::leave, nb::call_guard<nb::gil_scoped_release>(), nb::arg("node"))
      .def("placer_ended", &Tier::placer_ended, nb::call_guard<nb::gil_scoped_release>(),
           "The process that places blocks itself has ended: what it was lent is over.")
      .def("stats", peer_stats);
  bind_places(m);
  bind_shared(m);
}
