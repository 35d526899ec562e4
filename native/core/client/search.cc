#include "core/client/search.h"

#include <algorithm>
#include <array>
#include <unordered_map>

#include "core/format/keys.h"

namespace kv {
namespace {

constexpr size_t kWindowsAhead = 12;  // windows between a prefetch and its use
constexpr size_t kStretch = 4096;     // windows whose fingerprints are computed at a time, so that they stay in the cache

}  // namespace

std::vector<Placed> search(const Index& index, uint64_t base, std::span<const int32_t> tokens, size_t window, bool on_disk) {
  std::vector<Placed> out;
  if (tokens.size() < window) return out;
  const size_t windows = tokens.size() - window + 1;
  std::vector<uint64_t> fingerprints(std::min(windows, kStretch));
  std::unordered_map<uint32_t, size_t> ends;  // record -> end of its last place
  std::array<Sighting, kMaxSightings> seen;
  for (size_t first = 0; first < windows; first += kStretch) {
    const size_t count = std::min(kStretch, windows - first);
    window_fingerprints(base, tokens.data() + first, count + window - 1, window, fingerprints.data());
    for (size_t i = 0; i < std::min(kWindowsAhead, count); ++i) index.finder().prefetch(Finder::by_fingerprint(fingerprints[i]));
    for (size_t i = 0; i < count; ++i) {
      if (i + kWindowsAhead < count) index.finder().prefetch(Finder::by_fingerprint(fingerprints[i + kWindowsAhead]));
      const size_t found = index.sightings(Finder::by_fingerprint(fingerprints[i]), seen, on_disk);
      for (size_t k = 0; k < found; ++k) {
        size_t& end = ends[seen[k].record];
        if (seen[k].tokens < window || first + i < end) continue;
        end = first + i + window;
        out.push_back({first + i, seen[k]});
      }
    }
  }
  return out;
}

std::vector<Sighting> children(const Index& index, const Key& parent, bool on_disk) {
  std::array<Sighting, kMaxSightings> seen;
  const size_t found = index.sightings(Finder::by_parent(static_cast<uint32_t>(parent.words[0])), seen, on_disk);
  return {seen.begin(), seen.begin() + static_cast<ptrdiff_t>(found)};
}

}  // namespace kv
