#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distrain/job/job.h"
#include "options.h"

namespace distrain::app {

/// One fault of `--inject`, with the rank that it is for.
struct InjectedFault {
  enum class Kind {
    kDelay,  ///< `delay=50ms`: before each call
    kStage,  ///< `stage=100ms`: a pipeline's stage sleeps in place of computing
    kFail,   ///< `fail=checkpoint.3`: at that system call of the first save
    kSave,   ///< `save=200ms`: before each checkpoint is written
  };
  std::string text;  ///< as it was given
  Kind kind = Kind::kDelay;
  double seconds = 0;  ///< kDelay, kStage, kSave
  int64_t system_call = 0;
  std::optional<int> rank;  ///< none: each rank that the fault is possible on
};

/// `KIND=VALUE[@rank=N][,...]`. Throws `invalid` naming the part that is wrong.
std::vector<InjectedFault> parse_injections(std::string_view text);

/// What a job can be disturbed in.
struct Injectable {
  bool saves = false;   ///< `--checkpoint` is given
  bool stages = false;  ///< ranks from 1 on are stages of a pipeline
};

/// Throws `invalid` for a rank or a part that the job has not; warns of what has no effect.
void check_injections(const std::vector<InjectedFault>& faults, Injectable job,
                      Placement& placement);

/// What meets this rank. Of two that say the same thing the last one holds.
job::Injection injection_of(const std::vector<InjectedFault>& faults, int rank);

}  // namespace distrain::app
