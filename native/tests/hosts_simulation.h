// Hosts that look for blocks at each other, as events in time: the real directory, choice and admission
// (core/placement/policy.h), no socket, no thread, no clock. Each host knows up to 64 others. A host sends layer by layer, all
// its transfers in turns, at the speed of its link; who receives a block can send on what has arrived of it. What nobody has is
// computed.
//
// Invariant: the same options give the same run.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <unordered_map>

#include "core/placement/policy.h"
#include "core/store/journal.h"

namespace kv::test {

struct Scene {
  uint32_t hosts = 10;
  uint32_t blocks = 8;       // of a prompt
  double seconds = 4;        // in which prompts arrive
  double prompts_per_s = 2;  // at each host, one in four of a few that hosts share, the others of its own
  bool hot = true;           // a prompt that one host has is wanted by all at second 1
  double churn_per_s = 0;    // of all hosts: one goes, and comes back empty after a second
  double slow_links = 0;     // part of the hosts whose link is a tenth
  bool admission = true;     // false: who is asked sends, as before there was a limit
  uint64_t seed = 1;
};

struct Outcome {
  uint64_t lookups = 0, of_nobody = 0;           // of blocks that were not here; that no peer had
  uint64_t asks = 0, blind_asks = 0, words = 0;  // messages: of the first kind, of those about the second; marks told
  uint64_t fetched = 0, computed = 0, lost = 0;
  uint64_t hot_computed = 0;                // blocks of the hot prompt, beside the first
  uint32_t most_copies_at_once = 0;         // of one block by one host
  uint32_t worst_queue = 0;                 // transfers under way at one host
  double hot_copies = 0, hot_spread_s = 0;  // hosts that have the hot prompt; until the last of those that wanted it has it
  double hot_alone_s = 0;                   // what one transfer of it takes
  double asks_per_lookup() const { return lookups ? static_cast<double>(asks) / static_cast<double>(lookups) : 0; }
};

class Simulation {
 public:
  explicit Simulation(const Scene& scene) : scene_(scene), random_(scene.seed), hosts_(scene.hosts) {}
  Outcome run();

 private:
  static constexpr uint32_t kLayers = 8, kSharedPrompts = 20, kDegree = 64;
  static constexpr double kBlockBytes = 16 << 20, kBytesPerS = 1.25e9, kHopS = 200e-6, kWordS = 5e-3, kComputeS = 0.5;
  struct Copy {
    uint32_t layers = 0;  // here
    uint32_t from = ~0u;  // who sends it; ~0: it was computed here
  };
  struct Send {
    uint64_t block;
    uint32_t to, layer = 0, life = 0;
  };
  struct Host {
    std::vector<uint32_t> peers;
    std::unordered_map<uint32_t, size_t> number;  // of a peer, by host
    std::unique_ptr<peer::Directory> directory = std::make_unique<peer::Directory>();
    std::unique_ptr<peer::Admission> admission = std::make_unique<peer::Admission>();
    peer::Directory::Mask usable = 0;
    std::vector<uint32_t> in_flight = std::vector<uint32_t>(peer::kMaxPeers);
    std::unordered_map<uint64_t, Copy> blocks;
    std::unordered_map<uint64_t, peer::Route> wanted;
    std::unordered_map<uint64_t, uint32_t> sending;  // copies of a block under way
    std::vector<Send> sends;
    size_t turn = 0;
    bool up = true, link_busy = false;
    uint32_t life = 0;
    double bytes_per_s = kBytesPerS;
  };

  static Key key_of(uint64_t block) {
    Key key{};
    uint64_t word = block;
    for (auto& part : key.words) part = (word = (word ^ word >> 29) * 0xbf58476d1ce4e5b9ull + 0x9e3779b97f4a7c15ull);
    return key;
  }
  void at(double when, std::function<void()> what) { events_.push({now_ + when, ++order_, std::move(what)}); }
  double chance() { return std::uniform_real_distribution<double>()(random_); }
  uint32_t any() { return static_cast<uint32_t>(random_() % scene_.hosts); }

  void meet();
  void want(uint32_t h, uint64_t prompt);
  void go_on(uint32_t h, uint64_t block);
  void ask(uint32_t from, uint32_t to, uint64_t block, uint32_t life);
  void pump(uint32_t h);
  void arrived(uint32_t h, const Send& send);
  void compute(uint32_t h, uint64_t block);
  void has(uint32_t h, uint64_t block, bool there);
  void goes(uint32_t h);
  void end_send(uint32_t h, size_t i);
  void failed(uint32_t h, uint64_t block, uint32_t from);
  void prompts(uint32_t h);
  void churn();

  struct Event {
    double when;
    uint64_t order;
    std::function<void()> what;
    bool operator<(const Event& other) const { return when > other.when || (when == other.when && order > other.order); }
  };
  const Scene scene_;
  std::mt19937_64 random_;
  std::vector<Host> hosts_;
  std::priority_queue<Event> events_;
  double now_ = 0, hot_at_ = 0;
  uint64_t order_ = 0, turns_ = 0, own_ = 1 << 20;
  Outcome out_;
};

inline Outcome Simulation::run() {
  meet();
  for (uint32_t h = 0; h < scene_.hosts; ++h) prompts(h);
  if (scene_.churn_per_s > 0) churn();
  if (scene_.hot) {
    at(0.5, [this] {
      for (uint64_t b = 0; b < scene_.blocks; ++b) compute(0, b);
    });
    at(1.5, [this] {
      hot_at_ = now_;
      for (uint32_t h = 1; h < scene_.hosts; ++h) at(chance() * 1e-3, [this, h] { want(h, 0); });
    });
  }
  out_.hot_alone_s = scene_.blocks * kBlockBytes / kBytesPerS;
  while (!events_.empty()) {
    const Event next = events_.top();
    events_.pop();
    now_ = next.when;
    next.what();
  }
  for (const Host& host : hosts_)
    for (uint64_t b = 0; b < scene_.blocks; ++b) {
      const auto copy = host.blocks.find(b);
      out_.hot_copies += copy != host.blocks.end() && copy->second.layers == kLayers;
    }
  out_.hot_copies /= scene_.blocks;
  return out_;
}

// Who knows whom: all, or some that were drawn.
inline void Simulation::meet() {
  const auto know = [&](uint32_t a, uint32_t b) {
    if (a == b || hosts_[a].number.count(b) || hosts_[a].peers.size() >= kDegree || hosts_[b].peers.size() >= kDegree) return;
    for (auto [x, y] : {std::pair{a, b}, {b, a}}) {
      hosts_[x].number[y] = hosts_[x].peers.size();
      hosts_[x].usable |= peer::Directory::Mask{1} << hosts_[x].peers.size();
      hosts_[x].directory->completed(hosts_[x].peers.size());
      hosts_[x].peers.push_back(y);
    }
  };
  for (uint32_t h = 0; h < scene_.hosts; ++h)
    if (scene_.slow_links > 0 && h > 0 && chance() < scene_.slow_links) hosts_[h].bytes_per_s /= 10;
  if (scene_.hosts <= kDegree)
    for (uint32_t a = 0; a < scene_.hosts; ++a)
      for (uint32_t b = 0; b < a; ++b) know(a, b);
  else
    for (uint32_t draw = 0; draw < scene_.hosts * kDegree; ++draw) know(draw % scene_.hosts, any());
}

inline void Simulation::prompts(uint32_t h) {
  const double next_s = -std::log(1 - chance()) / scene_.prompts_per_s;
  if (now_ + next_s > scene_.seconds) return;
  at(next_s, [this, h] {
    const bool shared = chance() < 0.25;
    if (hosts_[h].up) want(h, shared ? 1 + random_() % kSharedPrompts : ++own_);
    prompts(h);
  });
}

inline void Simulation::churn() {
  const double next_s = -std::log(1 - chance()) / (scene_.churn_per_s * scene_.hosts);
  if (now_ + next_s > scene_.seconds) return;
  at(next_s, [this] {
    if (const uint32_t h = any(); h != 0 && hosts_[h].up) goes(h);
    churn();
  });
}

inline void Simulation::want(uint32_t h, uint64_t prompt) {
  Host& host = hosts_[h];
  for (uint64_t b = 0; b < scene_.blocks; ++b) {
    const uint64_t block = prompt * scene_.blocks + b;
    if (host.blocks.count(block) || host.wanted.count(block)) continue;
    out_.lookups += 1;
    out_.of_nobody += host.directory->holders(key_of(block)) == 0;
    host.wanted.emplace(block, peer::Route{});
    go_on(h, block);
  }
}

inline void Simulation::go_on(uint32_t h, uint64_t block) {
  Host& host = hosts_[h];
  const auto wanted = host.wanted.find(block);
  if (wanted == host.wanted.end() || !host.up) return;
  const Key key = key_of(block);
  const uint64_t turn = key.words[1] ^ ++turns_ * 0xff51afd7ed558ccdull ^ random_();
  const auto cost = [&](size_t p) { return host.in_flight[p] * kBlockBytes / kBytesPerS; };
  const bool nobody = (host.directory->holders(key) | wanted->second.referred) == 0;
  const peer::Next next = peer::next_step(*host.directory, host.usable, key, wanted->second, turn, cost);
  const uint32_t life = host.life;
  switch (next.step) {
    case peer::Step::Ask:
      out_.asks += 1, out_.blind_asks += nobody;
      host.in_flight[next.peer] += 1;
      at(kHopS, [this, h, to = host.peers[next.peer], block, life] { ask(h, to, block, life); });
      break;
    case peer::Step::GiveUp:
      host.wanted.erase(wanted);
      at(kComputeS / scene_.blocks, [this, h, block, life] {
        if (hosts_[h].life == life) compute(h, block);
      });
      break;
    default:
      at(static_cast<double>(next.wait_ms) * 1e-3, [this, h, block, life, turn_over = next.step == peer::Step::WaitForTurn] {
        const auto still = hosts_[h].wanted.find(block);
        if (hosts_[h].life != life || still == hosts_[h].wanted.end()) return;
        if (turn_over) ask_again(still->second);
        go_on(h, block);
      });
  }
}

// At the one that is asked.
inline void Simulation::ask(uint32_t from, uint32_t to, uint64_t block, uint32_t life) {
  Host& host = hosts_[to];
  std::vector<std::string> instead;
  if (host.up && host.blocks.count(block)) {
    if (!scene_.admission || host.admission->begin(key_of(block), std::to_string(from), instead)) {
      out_.most_copies_at_once = std::max(out_.most_copies_at_once, ++host.sending[block]);
      host.sends.push_back({block, from, 0, life});
      out_.worst_queue = std::max(out_.worst_queue, static_cast<uint32_t>(host.sends.size()));
      return pump(to);
    }
    if (const auto wanted = hosts_[from].wanted.find(block); hosts_[from].life == life && wanted != hosts_[from].wanted.end()) {
      wanted->second.busy = true;
      for (const std::string& node : instead)
        if (const auto other = hosts_[from].number.find(static_cast<uint32_t>(std::stoul(node)));
            other != hosts_[from].number.end())
          wanted->second.referred |= peer::Directory::Mask{1} << other->second;
    }
  }
  at(kHopS, [this, from, to, block, life] {
    if (hosts_[from].life != life) return;
    hosts_[from].in_flight[hosts_[from].number.at(to)] -= 1;
    go_on(from, block);
  });
}

// The link sends one layer at a time, of each transfer in turns.
inline void Simulation::pump(uint32_t h) {
  Host& host = hosts_[h];
  if (host.link_busy || !host.up) return;
  for (size_t tried = 0; tried < host.sends.size(); ++tried) {
    const size_t i = host.turn++ % host.sends.size();
    const Send& send = host.sends[i];
    const auto copy = host.blocks.find(send.block);
    if (hosts_[send.to].life != send.life || copy == host.blocks.end()) {
      if (copy == host.blocks.end()) failed(send.to, send.block, h);
      end_send(h, i);
      return pump(h);
    }
    if (send.layer >= copy->second.layers) continue;
    host.link_busy = true;
    const double rate = std::min(host.bytes_per_s, hosts_[send.to].bytes_per_s);
    at(kBlockBytes / kLayers / rate, [this, h, life = host.life, block = send.block, to = send.to] {
      Host& again = hosts_[h];
      if (again.life != life) return;
      again.link_busy = false;
      for (size_t k = 0; k < again.sends.size(); ++k) {
        Send& send = again.sends[k];
        if (send.block != block || send.to != to) continue;
        send.layer += 1;
        at(kHopS, [this, h, copy = send] { arrived(h, copy); });
        if (send.layer == kLayers) end_send(h, k);
        break;
      }
      pump(h);
    });
    return;
  }
}

inline void Simulation::end_send(uint32_t h, size_t i) {
  Host& host = hosts_[h];
  const uint64_t block = host.sends[i].block;
  host.sends.erase(host.sends.begin() + static_cast<ptrdiff_t>(i));
  if (const auto sending = host.sending.find(block); --sending->second == 0) host.sending.erase(sending);
  if (scene_.admission) host.admission->end(key_of(block));
}

inline void Simulation::arrived(uint32_t h, const Send& send) {
  Host& to = hosts_[send.to];
  if (to.life != send.life) return;
  Copy& copy = to.blocks[send.block];
  if (send.layer == 1) copy.from = h, has(send.to, send.block, true);
  if (copy.from != h) return;
  copy.layers = send.layer;
  if (send.layer == kLayers) {
    out_.fetched += 1;
    to.wanted.erase(send.block);
    to.in_flight[to.number.at(h)] -= 1;
    if (send.block < scene_.blocks) out_.hot_spread_s = std::max(out_.hot_spread_s, now_ - hot_at_);
  }
  pump(send.to);
}

// The sender is gone, or has it no more: what has come is given up.
inline void Simulation::failed(uint32_t h, uint64_t block, uint32_t from) {
  Host& host = hosts_[h];
  const auto copy = host.blocks.find(block);
  if (copy != host.blocks.end() && copy->second.layers < kLayers && copy->second.from == from) {
    host.blocks.erase(copy);
    has(h, block, false);
    out_.lost += 1;
  }
  if (const auto number = host.number.find(from); number != host.number.end() && host.in_flight[number->second])
    host.in_flight[number->second] -= 1;
  at(kHopS, [this, h, block] { go_on(h, block); });
}

inline void Simulation::compute(uint32_t h, uint64_t block) {
  if (hosts_[h].blocks.count(block)) return;
  out_.computed += 1;
  out_.hot_computed += block < scene_.blocks && h != 0;
  hosts_[h].blocks[block] = {kLayers};
  has(h, block, true);
}

// Told to all that know it.
inline void Simulation::has(uint32_t h, uint64_t block, bool there) {
  const uint64_t mark = mark_of(key_of(block), there);
  for (const uint32_t other : hosts_[h].peers) {
    out_.words += 1;
    at(kWordS, [this, h, other, mark, life = hosts_[h].life] {
      if (hosts_[h].life == life) hosts_[other].directory->tell(hosts_[other].number.at(h), mark);
    });
  }
}

inline void Simulation::goes(uint32_t h) {
  Host& host = hosts_[h];
  host.up = false, host.life += 1, host.link_busy = false;
  const std::vector<Send> sends = std::move(host.sends);
  host.sends.clear(), host.sending.clear(), host.blocks.clear(), host.wanted.clear();
  host.admission = std::make_unique<peer::Admission>();
  std::fill(host.in_flight.begin(), host.in_flight.end(), 0);
  for (const uint32_t other : host.peers) {
    const size_t number = hosts_[other].number.at(h);
    hosts_[other].usable &= ~(peer::Directory::Mask{1} << number);
    hosts_[other].directory->forget(number);
    pump(other);  // what it sent there is over
  }
  for (const Send& send : sends)
    if (hosts_[send.to].life == send.life) failed(send.to, send.block, h);
  at(1, [this, h] {
    hosts_[h].up = true;
    for (const uint32_t other : hosts_[h].peers) {
      const size_t number = hosts_[other].number.at(h);
      hosts_[other].usable |= peer::Directory::Mask{1} << number;
      hosts_[other].directory->completed(number);
    }
  });
}

}  // namespace kv::test
