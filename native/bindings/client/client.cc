// Client and Lookup: the calls of every prompt.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>

#include "bindings/client/buffers.h"
#include "bindings/client/errors.h"
#include "bindings/client/store.h"
#include "bindings/without_gil.h"
#include "core/base/error.h"
#include "core/client/exchange.h"

namespace nb = nanobind;

namespace kv {

nb::object make_blocks(std::shared_ptr<BlockBatch> batch);    // blocks.cc
nb::object make_writer(std::shared_ptr<BlockWriter> grants);  // writer.cc
BlockWriter* grants_of(nb::handle writer);

namespace {

struct Lookup {
  std::vector<uint8_t> states;

  size_t leading(size_t from, Presence wanted) const {
    size_t at = from;
    while (at < states.size() && states[at] == static_cast<uint8_t>(wanted)) ++at;
    return at - from;
  }
  size_t resident() const { return leading(0, Presence::Resident); }
};

const char* class_name(Code code) {
  switch (code) {
    case Code::InvalidArgument: return "InvalidArgument";
    case Code::NoSpace: return "NoSpace";
    case Code::Detached: return "Detached";
    case Code::NotPermitted: return "NotPermitted";
    case Code::NotFound: return "NotPermitted";  // a namespace that is not there and one that is not ours look alike
    case Code::PinsExhausted: return "PinsExhausted";
    case Code::DeadlineExceeded: return "DeadlineExceeded";
    case Code::BlockLost: return "BlockLost";
    case Code::LayoutLost: return "LayoutLost";
    case Code::Closed: return "Closed";
    case Code::IncompatibleVersion: return "IncompatibleVersion";
    case Code::FailedPrecondition: return "InvalidArgument";
    case Code::Integrity: return "KVClientError";
    case Code::Fenced:
    case Code::Unavailable: break;
  }
  return "Unavailable";
}

Lookup lookup(Client& client, nb::handle source, bool peers) {
  const KeysArgument keys(source);
  Lookup out;
  if (client.door() == Client::Door::SharedMemory) {
    out.states = client.lookup(keys.keys());
    if (!peers || !client.peers_up() || !std::count(out.states.begin(), out.states.end(), 0)) return out;
  }
  const WithoutGil released;
  if (out.states.empty()) out.states = client.lookup(keys.keys());
  if (peers) client.look_elsewhere(keys.keys(), out.states);
  return out;
}

nb::object get(Client& client, nb::handle source, bool follow, double wait_s, bool verify) {
  const KeysArgument keys(source);
  if (client.door() == Client::Door::SharedMemory && wait_s <= 0 && !verify) return make_blocks(client.get(keys.keys(), follow));
  std::shared_ptr<BlockBatch> batch;
  {
    const WithoutGil released;
    batch = client.get(keys.keys(), follow);
  }
  if (wait_s > 0 && batch->hits() < batch->size()) {
    try {
      wait_with_signals(wait_s, [&](const timespec& deadline) {
        if (!client.await(*batch, keys.keys(), follow, deadline)) throw Error(Code::DeadlineExceeded, "");
      });
    } catch (const Error& error) {
      if (error.code != Code::DeadlineExceeded) throw;  // what did not come in time is a miss
    }
  }
  if (verify) {
    const WithoutGil released;
    client.verify(*batch, keys.keys());
  }
  return make_blocks(std::move(batch));
}

// How many of the keys are in memory or on their way there.
size_t prefetch(Client& client, nb::handle source, long long priority, const std::string& node) {
  const KeysArgument keys(source);
  check_range("priority", priority, 0, kMaxPriority);
  const WithoutGil released;
  size_t count = 0;
  for (const auto& promise : client.promote(keys.keys(), static_cast<uint32_t>(priority), 0, node))
    count += promise.presence != static_cast<uint32_t>(Presence::Missing);
  return count;
}

uint32_t push(Client& client, nb::handle source, const std::string& to) {
  const KeysArgument keys(source);
  const WithoutGil released;
  return client.push(keys.keys(), to);
}

nb::object create(Client& client, nb::handle source, long long layout_id, long long priority, uint32_t ttl_s,
                  const std::optional<std::vector<long long>>& token_counts, nb::handle sealing,
                  std::optional<uint64_t> attachment) {
  const KeysArgument keys(source);
  check_range("layout_id", layout_id, 0, UINT32_MAX);
  check_range("priority", priority, 0, kMaxPriority);
  if (token_counts && token_counts->size() != keys.keys().size())
    raise("InvalidArgument",
          std::to_string(token_counts->size()) + " token counts for " + std::to_string(keys.keys().size()) + " keys");
  Create request{.keys = keys.keys(),
                 .chain = keys.chain(),
                 .token_counts = {},
                 .layout = static_cast<uint32_t>(layout_id),
                 .priority = static_cast<uint32_t>(priority),
                 .ttl_s = ttl_s,
                 .attachment = attachment};
  std::vector<uint32_t> counts;
  if (token_counts) {
    for (const long long count : *token_counts) {
      check_range("token_counts", count, 1, kMaxTokens);
      counts.push_back(static_cast<uint32_t>(count));
    }
    request.token_counts = counts;
  }
  if (!sealing.is_none()) request.sealing = grants_of(sealing);
  std::shared_ptr<BlockWriter> grants;
  {
    const WithoutGil released;
    grants = client.create(request);
  }
  return make_writer(std::move(grants));
}

uint32_t over_keys(Client& client, nb::handle source, bool remove) {
  const KeysArgument keys(source);
  const WithoutGil released;
  return remove ? client.remove(keys.keys()) : client.touch(keys.keys());
}

std::string token(Client& client) {
  std::vector<uint8_t> bytes;
  {
    const WithoutGil released;
    bytes = client.token();
  }
  std::string text;
  for (const uint8_t byte : bytes) text += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
  return text;
}

nb::bytes salt(Client& client) {
  std::array<uint8_t, 32> bytes;
  {
    const WithoutGil released;  // a request under way may hold the lock
    bytes = client.salt();
  }
  const bool none = std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0; });
  return nb::bytes(bytes.data(), none ? 0 : bytes.size());
}

// As JSON: Python code that ran under a call of ours could not be ended there at the end of the program.
std::string stats(Client& client) {
  const WithoutGil released;
  return client.stats();
}

std::string told(const Lookup& l) {
  const auto behind = [&](Presence kind) { return std::to_string(l.leading(l.resident(), kind)); };
  return "<Lookup of " + std::to_string(l.states.size()) + " blocks: " + std::to_string(l.resident()) + " resident, " +
         behind(Presence::Pending) + " pending, " + behind(Presence::OnDisk) + " on disk" +
         (l.leading(l.resident(), Presence::OnPeer) ? ", " + behind(Presence::OnPeer) + " on peers>" : ">");
}

void bind_lookup(nb::module_& m) {
  nb::class_<Lookup>(m, "Lookup", "How far a list of keys is present.")
      .def_prop_ro("resident", &Lookup::resident, "How many leading blocks are in memory.")
      .def_prop_ro(
          "pending", [](const Lookup& l) { return l.leading(l.resident(), Presence::Pending); },
          "How many right behind those are being written.")
      .def_prop_ro(
          "on_disk", [](const Lookup& l) { return l.leading(l.resident(), Presence::OnDisk); },
          "How many right behind those lie only on disk.")
      .def_prop_ro(
          "on_peers", [](const Lookup& l) { return l.leading(l.resident(), Presence::OnPeer); },
          "How many right behind those are known to lie on other hosts; of a look-up that asked for them.")
      .def_prop_ro(
          "states", [](const Lookup& l) { return nb::bytes(l.states.data(), l.states.size()); },
          "A byte per key: 0 missing, 1 pending, 2 resident, 3 on disk, 4 on another host.")
      .def("__repr__", told);
}

// A get in shared memory and the end of an object ask seldom, and so run with the GIL until they do.
void* let_gil_go() { return Py_IsInitialized() && PyGILState_Check() ? new WithoutGil : nullptr; }
void take_gil_back(void* released) { delete static_cast<WithoutGil*>(released); }
constexpr HeldLock kGil{let_gil_go, take_gil_back};

}  // namespace

void bind_client(nb::module_& m) {
  held_lock.store(&kGil, std::memory_order_release);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      nb::object type = nb::module_::import_("kvclient.errors").attr(class_name(error.code));
      PyErr_SetString(type.ptr(), error.what());
    }
  });

  bind_lookup(m);

  nb::class_<Client>(m, "Client", "A session with the store: reads in shared memory, one message for the rest. Thread-safe.")
      .def(
          "__init__",
          [](Client* self, std::string socket_path, std::string name, bool read_only, uint32_t max_pins, double timeout_s,
             const std::string& door, bool engine, uint32_t pin_deadline_ms, uint64_t pin_bytes) {
            const PinTerms terms{engine ? PinOwner::Engine : PinOwner::Client, pin_deadline_ms, pin_bytes};
            const WithoutGil released;
            new (self) Client({std::move(socket_path), std::move(name), read_only, max_pins, timeout_s, terms},
                              door == "socket" ? Client::Door::Socket : Client::Door::SharedMemory);
          },
          nb::arg("socket_path"), nb::arg("namespace"), nb::arg("read_only") = false, nb::arg("max_pins") = 65536,
          nb::arg("timeout_s") = 5.0, nb::arg("door") = "shm", nb::arg("engine") = false, nb::arg("pin_deadline_ms") = 0,
          nb::arg("pin_bytes") = 0)
      .def("reattach", &Client::reattach, nb::call_guard<WithoutGil>())
      .def("close", &Client::close, nb::call_guard<WithoutGil>())
      .def("renew_lock", &Client::renew_lock)
      .def("lookup", lookup, nb::arg("keys").none(), nb::arg("peers") = false)
      .def("get", get, nb::arg("keys").none(), nb::arg("follow") = false, nb::arg("wait_s") = 0.0, nb::arg("verify") = false)
      .def("push", push, nb::arg("keys").none(), nb::arg("to"))
      .def("prefetch", prefetch, nb::arg("keys").none(), nb::arg("priority") = kDefaultPriority, nb::arg("node") = "")
      .def("load_estimate_s", &Client::load_estimate_s, nb::arg("length_bytes"))
      .def("peer_estimate_s", &Client::peer_estimate_s, nb::arg("length_bytes"))
      .def("peers_up", &Client::peers_up)
      .def("create", create, nb::arg("keys").none(), nb::arg("layout_id"), nb::arg("priority") = kDefaultPriority,
           nb::arg("ttl_s") = 0, nb::arg("token_counts") = nb::none(), nb::arg("sealing") = nb::none(),
           nb::arg("attachment") = nb::none())
      .def(
          "delete", [](Client& c, nb::handle keys) { return over_keys(c, keys, true); }, nb::arg("keys").none())
      .def(
          "touch", [](Client& c, nb::handle keys) { return over_keys(c, keys, false); }, nb::arg("keys").none())
      .def(
          "register_layout",
          [](Client& c, nb::handle blob) {
            const Bytes bytes(blob, "blob", false);
            const WithoutGil released;
            return c.register_layout({bytes.data(), bytes.size()});
          },
          nb::arg("blob"))
      .def(
          "give_to_device", [](Client& c, bool writes) { return c.usable()->give_to_device(writes); }, nb::arg("writes"),
          nb::call_guard<WithoutGil>())
      .def("stats", stats)
      .def("grpc_token", token)
      .def_prop_ro("salt", salt)
      .def_prop_ro("attached", &Client::attached)
      .def_prop_ro("readable", &Client::answers)
      .def_prop_ro("awaited", &Client::awaited)
      .def_prop_ro("attachment", [](Client& c) { return c.attachment()->number(); })
      .def_prop_ro("session", [](Client& c) { return c.attachment()->session(); })
      .def_prop_ro("epoch", [](Client& c) { return c.attachment()->epoch(); })
      .def_prop_ro("populated_bytes", [](Client& c) { return c.attachment()->tables->bytes(); })
      .def_prop_ro("namespace", [](Client& c) { return c.attachment()->options().name; });
}

}  // namespace kv
