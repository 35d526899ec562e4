#include "core/peer/announce.h"

#include <chrono>
#include <thread>

#include "core/base/polling.h"

namespace kv::peer {
namespace {

constexpr uint32_t kRecordsAtOnce = 4096;  // of one hold of the store's lock
constexpr size_t kMarksPerFrame = kMaxControlBytes / sizeof(uint64_t);
constexpr std::chrono::milliseconds kLinger{3};    // after what was told, so that changes in a burst go together
constexpr std::chrono::milliseconds kSlice{1000};  // between two looks whether the other end is there

struct Listening {
  Listening(Journal& journal, const std::string& taker) : journal(journal), taker(taker) {
    journal.listen(1);
    if (!taker.empty()) taken = journal.take_for(taker, 1);
  }
  ~Listening() {
    journal.listen(-1);
    if (!taker.empty()) journal.take_for(taker, -1);
  }
  Journal& journal;
  const std::string& taker;
  uint64_t taken = 0;  // of what was pushed to it
};

void put_pushed(Channel& channel, uint32_t request, std::span<const Key> keys) {
  for (; !keys.empty(); keys = keys.subspan(std::min<size_t>(keys.size(), kMaxKeysPerFetch)))
    channel.put({.kind = static_cast<uint16_t>(Kind::Pushed), .request = request},
                std::as_bytes(keys.first(std::min<size_t>(keys.size(), kMaxKeysPerFetch))));
  channel.flush();
}

void put_marks(Channel& channel, uint32_t request, std::span<const uint64_t> marks, bool complete) {
  do {
    const auto part = marks.first(std::min(marks.size(), kMarksPerFrame));
    marks = marks.subspan(part.size());
    const Frame head{.kind = static_cast<uint16_t>(Kind::Holds), .request = request, .layer = complete && marks.empty()};
    channel.put(head, std::as_bytes(part));
  } while (!marks.empty());
  channel.flush();
}

}  // namespace

void announce(Store& store, Channel& channel, uint32_t request, const std::string& taker, const std::atomic<bool>& over) {
  Journal& journal = store.journal();
  Listening listening(journal, taker);
  std::vector<uint64_t> changes;
  uint64_t from = journal.head();  // what changes while the table is read is told behind what was read of it
  const auto read_changes = [&] {
    changes.clear();
    if (!journal.read(from, changes)) throw Broken(Broken::Why::Gone, "more changed than can be told: it connects anew");
  };
  bool whole = false;  // all was told once
  for (uint64_t told_ns = monotonic_ns(); !over.load();) {
    const std::vector<Key> pushed = journal.take(taker, listening.taken);  // first: what was put before it is told before it
    for (uint32_t record = 0; !whole && record < store.options().max_blocks && !over.load();) {
      put_marks(channel, request, store.held_marks(record, kRecordsAtOnce), false);
      read_changes();
      if (!changes.empty()) put_marks(channel, request, changes, false);
    }
    read_changes();
    if (!whole || !changes.empty() || monotonic_ns() - told_ns > uint64_t{kHoldsMs} * 1'000'000) {
      put_marks(channel, request, changes, true);
      told_ns = monotonic_ns(), whole = true;
      put_pushed(channel, request, pushed);
      if (!changes.empty()) std::this_thread::sleep_for(kLinger);
    } else {
      put_pushed(channel, request, pushed);
    }
    if (channel.hung_up()) throw Broken(Broken::Why::Gone, "it hung up");
    journal.wait(from, taker, listening.taken, kSlice, over);
  }
}

}  // namespace kv::peer
