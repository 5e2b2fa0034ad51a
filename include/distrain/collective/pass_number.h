#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "distrain/base/error.h"

namespace distrain::collective {

/// Identifies the backward pass whose gradients a rank averages. Ranks send the PassNumber with the
/// gradients, because all ranks must average the same pass. The members are sent in the declared
/// order. Steps and forward passes count from 1; 0 means unknown.
struct PassNumber {
  uint64_t step = 0;     ///< step of the job
  uint64_t forward = 0;  ///< forward pass; those in autograd contexts are counted separately
  uint64_t again = 0;    ///< number of earlier backward passes since that forward pass
  uint64_t context = 0;  ///< id of the autograd context; 0: none
  friend bool operator==(const PassNumber&, const PassNumber&) = default;

  /// Returns true if the numbers that are known in both passes are equal, with two exceptions. If
  /// both passes are in the same autograd context, `forward` may differ, because calls from another
  /// rank may arrive in any order. If only one pass is in a context, only `step` is compared.
  bool agrees_with(const PassNumber& other) const;
  /// Returns the known numbers as text: "the backward pass of forward 3 in step 7".
  std::string text() const;
};

struct RankInPass {
  int rank = -1;
  PassNumber pass;
};
/// Returns an `invalid` error if the passes disagree, naming the rank ahead: it has skipped a pass.
std::optional<base::Error> pass_error(const RankInPass& a, const RankInPass& b);

}  // namespace distrain::collective
