// Failures on a schedule, between the disk tier and the file system: a Files and an Engine that pass everything on to real ones
// except what the schedule says fails. For tests of the daemon (KVSTORED_FAULTS) and of this directory.
//
// The schedule is text, "seed=7,write_enospc=0.02,publish_kill=@3,power_loss_after=40":
//   STEP_FAULT=P      each time with probability P     STEP_FAULT=@N      the Nth time and no other     STEP_FAULT=@N+   from
//   then on steps             open create reuse publish remove aside (Files), read write (Engine, at the submission), done (a
//   completion) faults            eio enospc erofs enomem emfile   the call answers that
//                     short (read, write)     a part of it is moved
//                     flip (read)             one bit comes back wrong
//                     full (read, write)      the queue has no slot
//                     kill                    SIGKILL to this process, before the step
//   seed=N            of all that is random, 1 if not given
//   power_loss_after=N   after N steps: what was written since the start is dropped, emptied, cut or torn, at random, as if it
//   had
//                     never reached the disk; then SIGKILL
//
// Invariant: without a fault, the same answers as without this. The same seed and the same calls give the same faults.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/files/engine.h"
#include "core/files/files.h"

namespace kv {

class Faults {
 public:
  // Throws InvalidArgument that names what it does not understand.
  Faults(const std::string& schedule, const std::string& directory, std::unique_ptr<Files> files, std::unique_ptr<Engine> engine);
  ~Faults();
  Files& files();
  Engine& engine();
  // For an owner of their own. This must outlive them.
  std::unique_ptr<Files> take_files();
  std::unique_ptr<Engine> take_engine();
  uint64_t injected() const { return injected_; }

 private:
  enum class Step { Open, Create, Reuse, Publish, Remove, Aside, Read, Write, Done };
  enum class Fault { None, Eio, Enospc, Erofs, Enomem, Emfile, Short, Flip, Full, Kill };
  struct Rule {
    Step step;
    Fault fault;
    double probability = 0;
    uint64_t first = 0, last = 0;  // of the step's calls, if not 0
  };
  class FaultyFiles;
  class FaultyEngine;

  void parse(const std::string& schedule);
  static Rule rule_of(const std::string& name, const std::string& value);
  Fault next(Step step);  // what happens to this call; does not return if the process ends here
  uint64_t random();
  void lose_power();
  void damage(const std::string& path);

  const std::string directory_;
  std::vector<Rule> rules_;
  uint64_t state_ = 1;
  uint64_t power_loss_after_ = 0;
  uint64_t steps_ = 0;
  uint64_t injected_ = 0;
  std::array<uint64_t, 9> calls_{};           // per step
  std::set<std::string> unsafe_;              // files written by this process that a power loss would find
  std::map<std::string, std::string> taken_;  // of those, the temporary ones that had a block's name -> that name
  std::unique_ptr<FaultyFiles> files_;
  std::unique_ptr<FaultyEngine> engine_;
};

}  // namespace kv
