// Where the buffers of a region's blocks lie, as C passes them (kvs_buffer_shape). Owns nothing.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "capi/objects.h"

namespace kv::capi {

// The buffers of one layer, in the order of its bytes.
using Pieces = std::vector<Extent>;

inline void check_shape(const kvs_buffer_shape& shape) {
  std::array<bool, 3> there = {};
  for (const uint32_t axis : shape.axes) {
    if (axis > KVS_AXIS_PART) refuse("axis " + std::to_string(axis) + "; it must be a kvs_axis, 0 to 2");
    there[axis] = true;
  }
  if (!there[0] || !there[1] || !there[2]) refuse("axes must name layer, kv and part, each once");
  uint64_t all = 1;
  for (const uint32_t size : shape.sizes) {
    if (size < 1 || size > (1u << 16)) refuse("an axis of " + std::to_string(size) + " buffers; it must have 1 to 65536");
    all *= size;
  }
  if (all > (1u << 24)) refuse(std::to_string(all) + " buffers in a block; at most 16777216");
}

inline uint32_t size_of(const kvs_buffer_shape& shape, kvs_axis axis) {
  return shape.sizes[std::find(shape.axes, shape.axes + 3, static_cast<uint32_t>(axis)) - shape.axes];
}

inline size_t buffers_of(const kvs_buffer_shape& shape) { return size_t{shape.sizes[0]} * shape.sizes[1] * shape.sizes[2]; }

// Of one block, by layer.
inline std::vector<Pieces> by_layer(const kvs_buffer_shape& shape, const kvs_buffer* buffers) {
  const std::array<size_t, 3> steps = {size_t{shape.sizes[1]} * shape.sizes[2], shape.sizes[2], 1};
  std::array<size_t, 3> step = {};
  for (int i = 0; i < 3; ++i) step[shape.axes[i]] = steps[i];
  std::vector<Pieces> layers(size_of(shape, KVS_AXIS_LAYER));
  for (size_t layer = 0; layer < layers.size(); ++layer)
    for (size_t kv = 0; kv < size_of(shape, KVS_AXIS_KV); ++kv)
      for (size_t part = 0; part < size_of(shape, KVS_AXIS_PART); ++part) {
        const kvs_buffer& at = buffers[layer * step[KVS_AXIS_LAYER] + kv * step[KVS_AXIS_KV] + part * step[KVS_AXIS_PART]];
        layers[layer].push_back({at.offset, at.length});
      }
  return layers;
}

inline Pieces all_of(const std::vector<Pieces>& layers) {
  Pieces out;
  for (const Pieces& layer : layers) out.insert(out.end(), layer.begin(), layer.end());
  return out;
}

// Those that touch are one.
inline Pieces in_pieces(const std::vector<Pieces>& layers) {
  Pieces out;
  for (const Pieces& layer : layers)
    for (const Extent& at : layer)
      if (!out.empty() && out.back().end() == at.offset)
        out.back().length += at.length;
      else
        out.push_back(at);
  return out;
}

}  // namespace kv::capi
