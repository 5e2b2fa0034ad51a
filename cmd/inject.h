#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distrain/scenario/job.h"
#include "placement.h"

namespace distrain::cmd {

/// One fault of `--inject`, with the rank that it is for.
struct InjectedFault {
  enum class Kind {
    kDelay,  ///< `delay=50ms`: before each call
    kFail,   ///< `fail=checkpoint.3`: at that system call of the first save
  };
  std::string text;  ///< as it was given
  Kind kind = Kind::kDelay;
  double delay_s = 0;
  int64_t system_call = 0;
  std::optional<int> rank;  ///< none: each rank that the fault is possible on
};

/// `KIND=VALUE[@rank=N][,...]`. Throws `invalid` naming the part that is wrong.
std::vector<InjectedFault> parse_injections(std::string_view text);

/// Throws `invalid` for a rank that the job has not; warns of what has no effect.
void check_injections(const std::vector<InjectedFault>& faults, bool saves, Placement& placement);

/// What meets this rank. Of two that say the same thing the last one holds.
scenario::Injection injection_of(const std::vector<InjectedFault>& faults, int rank);

}  // namespace distrain::cmd
