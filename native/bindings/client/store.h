// What the bindings of the client share: key arguments, waiting with signals served, memory handed to Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/client/client.h"

namespace kv {

// Keys as an argument: a Chain, a list or tuple of 32-byte keys, or one packed buffer. Valid while the argument lives.
class KeysArgument {
 public:
  explicit KeysArgument(nanobind::handle source);  // raises InvalidArgument
  std::span<const Key> keys() const { return keys_; }
  const Chain* chain() const { return chain_; }

 private:
  std::span<const Key> keys_;
  std::vector<Key> converted_;
  const Chain* chain_ = nullptr;
};

// What a get answered.
struct Blocks {
  std::shared_ptr<BlockBatch> batch;
};

// Calls wait(deadline) without the GIL in slices, so that Ctrl-C works. `wait` throws DeadlineExceeded or returns when done.
void wait_with_signals(double timeout_s, const std::function<void(const timespec&)>& wait);

// A stretch of the pool for Python: the buffer's exporter and the owner of arrays over it. What it keeps, a pin or a
// writer's grants, stays as long as anything still points here.
struct Memory {
  std::shared_ptr<BlockBatch> batch;  // with a pin of this block, given back at the end
  size_t index = 0;
  std::shared_ptr<const void> grants;  // a writer, or a region
  std::byte* data = nullptr;
  uint64_t length = 0;

  Memory(std::shared_ptr<BlockBatch> from, size_t block, const std::byte* data, uint64_t length);  // raises Closed
  Memory(std::shared_ptr<const void> from, std::byte* data, uint64_t length)
      : grants(std::move(from)), data(data), length(length) {}
  Memory(Memory&& other) noexcept;
  ~Memory();
};

nanobind::object as_memoryview(Memory&& memory);
// One layer as [2, kv_heads, tokens, head_dim] in the layout's dtype (NumPy: bfloat16 of ml_dtypes); as bytes under a codec.
nanobind::object as_array(Memory&& memory, const Layout& layout, uint32_t tokens);
nanobind::object as_tensor(Memory&& memory, const Layout& layout, uint32_t tokens);

void bind_memory(nanobind::module_& m);
void bind_blocks(nanobind::module_& m);
void bind_writer(nanobind::module_& m);
void bind_region(nanobind::module_& m);
void bind_client(nanobind::module_& m);
void bind_search(nanobind::module_& m);
void bind_stretches(nanobind::module_& m);

}  // namespace kv
