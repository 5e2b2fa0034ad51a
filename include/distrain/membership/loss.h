#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "distrain/base/error.h"
#include "distrain/membership/incarnation.h"

namespace distrain::membership {

/// The loss of one process of a rank.
struct Loss {
  int rank = -1;
  base::Error error;  ///< peer_lost, or the reason that the rank sent when it left
  /// True if the job continues and a new process may replace the rank; false if all ranks end.
  bool job_goes_on = false;
  uint32_t incarnation = 0;  ///< of the lost process

  ProcessNumber process() const { return process_number(rank, incarnation); }
};

/// The losses after which a job continues.
struct Tolerance {
  std::set<int> ranks;
  size_t least = 1;         ///< number of them that must remain
  std::string if_too_few;   ///< appended to the job's error if fewer remain
  bool may_return = false;  ///< new processes may replace lost ranks
};

}  // namespace distrain::membership
