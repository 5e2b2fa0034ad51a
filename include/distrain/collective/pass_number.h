#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "distrain/base/error.h"

namespace distrain::collective {

/// Which backward pass a rank averages gradients of, as it counts them: with the gradients it goes
/// to the other ranks, which must be in the same one. Numbers from 1; 0: not known.
struct PassNumber {
  uint64_t step = 0;     ///< of the job
  uint64_t forward = 0;  ///< of the replica; those in autograd contexts are counted by themselves
  uint64_t again = 0;    ///< passes since that forward, before this one
  uint64_t context = 0;  ///< the id of the pass's autograd context; 0: none
  friend bool operator==(const PassNumber&, const PassNumber&) = default;

  /// Whether both may be of one pass: nothing that both know tells otherwise. Calls for one context
  /// of another rank may come to the ranks in any order, so there its id decides.
  bool agrees_with(const PassNumber& other) const;
  /// "the backward pass of forward 3 in step 7", as far as it is known.
  std::string text() const;
};

/// A rank of the job and the pass it is in.
struct RankInPass {
  int rank = -1;
  PassNumber pass;
};
/// `invalid` if they differ, naming the rank that is ahead, which left out a pass.
std::optional<base::Error> pass_error(const RankInPass& a, const RankInPass& b);

}  // namespace distrain::collective
