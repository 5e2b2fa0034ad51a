#pragma once

#include <cstdint>
#include <span>

#include "distrain/data/batches.h"

namespace distrain::scenario {

/// Random batches as in PyTorch's tutorial on combining DDP with RPC.
struct RandomBags {
  uint64_t seed = 1;
  int64_t num_embeddings = 100;
  int64_t classes = 8;
  bool has_teacher = false;  ///< targets follow from the indices; false: random

  /// Returns 20 to 50 indices in bags of 1 to 10, and targets: always the same for a step.
  data::Batch batch(int trainer, int64_t epoch, int64_t step) const;
  /// Returns the label that the hidden teacher gives to `bag`. The teacher draws a class and a
  /// weight for each index; the label is the class with the largest total weight. A sum of
  /// embeddings and a linear layer can represent the teacher if an embedding has at least as many
  /// numbers as there are classes.
  int64_t taught(std::span<const int64_t> bag) const;
};

}  // namespace distrain::scenario
