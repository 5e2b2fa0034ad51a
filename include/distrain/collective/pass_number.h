#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "distrain/base/error.h"

namespace distrain::collective {

/// Identifies the backward pass whose gradients a rank averages. Ranks send it with the gradients,
/// because all ranks must average the same pass. The order of the members is that of the wire.
/// Steps and forwards count from 1; 0 is unknown.
struct PassNumber {
  uint64_t step = 0;     ///< step of the job
  uint64_t forward = 0;  ///< forward of the replica, counted apart in and out of autograd contexts
  uint64_t again = 0;    ///< number of earlier passes since that forward
  uint64_t context = 0;  ///< id of the autograd context; 0: none
  friend bool operator==(const PassNumber&, const PassNumber&) = default;

  /// Returns true if no number that both sides know differs. For passes of the same context the
  /// forwards may differ, because calls of another rank may arrive in any order.
  bool agrees_with(const PassNumber& other) const;
  /// Returns the known numbers as text: "the backward pass of forward 3 in step 7".
  std::string text() const;
};

struct RankInPass {
  int rank = -1;
  PassNumber pass;
};
/// Returns `invalid` if the passes disagree. Names the rank that is ahead: it has left out a pass.
std::optional<base::Error> pass_error(const RankInPass& a, const RankInPass& b);

}  // namespace distrain::collective
