#pragma once

#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "distrain/job/checkpoints.h"
#include "distrain/job/training.h"

namespace distrain::job {

/// A trainer's part of a checkpoint that is being made.
struct HeldPart {
  PartName part;
  int32_t trainer = 0;
  Held tensors;
  static constexpr auto kFields =
      std::tuple(&HeldPart::part, &HeldPart::trainer, &HeldPart::tensors);
};

/// Puts the tensors of all into the checkpoint, under the names that they have there. Those of
/// other ranks are fetched one after the other, and each is let go there as soon as it is here.
/// Calls `got_one` after each.
void fetch(std::vector<HeldPart>& parts, Snapshot& into, const std::function<void()>& got_one);

}  // namespace distrain::job
