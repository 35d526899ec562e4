// Stands where a directory has not answered yet: every call takes too long, at once, and no transfer is taken. So a tier that has
// several directories begins with those that answer, and treats the others as it treats one that hangs later.
#pragma once

#include <cerrno>

#include "core/files/engine.h"
#include "core/files/files.h"

namespace kv {

class AbsentFiles final : public Files {
 public:
  int open_read(const std::string&, uint64_t*) override { return -ETIMEDOUT; }
  int create_temp(uint64_t, std::string*) override { return -ETIMEDOUT; }
  int take_over(const std::string&, uint64_t, std::string*) override { return -ETIMEDOUT; }
  int publish(const std::string&, const std::string&) override { return -ETIMEDOUT; }
  void make_directories(Fanout) override {}
  int remove(const std::string&) override { return -ETIMEDOUT; }
  int aside(const std::string&) override { return -ETIMEDOUT; }
  void close(int) override {}
  uint32_t flushed_s() override { return 0; }
  int keep_flushed(uint32_t) override { return -ETIMEDOUT; }
  int deleted(uint32_t, std::vector<Key>*) override { return -ETIMEDOUT; }
  int keep_deleted(std::span<const Key>) override { return -ETIMEDOUT; }
  uint32_t written_s(int, uint32_t) override { return 0; }
  Written written() override { return {}; }
  int count_written(const Written&) override { return -ETIMEDOUT; }
  int in_place() override { return -ETIMEDOUT; }
};

class AbsentEngine final : public Engine {
 public:
  bool submit(Transfer*) override { return false; }
  size_t completed(std::span<Transfer*>) override { return 0; }
  int event_fd() const override { return -1; }
  uint32_t depth() const override { return 0; }
  uint32_t in_flight() const override { return 0; }
  std::string name() const override { return "absent"; }
};

}  // namespace kv
