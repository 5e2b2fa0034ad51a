#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "distrain/models/embedding_table.h"
#include "distrain/scenario/hybrid.h"

namespace distrain::scenario {

/// As fastText's for real text, so that the sum over a long one does not drown the rest; the
/// tutorial's for random batches.
inline double embedding_range(const HybridOptions& options) {
  return options.data.empty() ? 0.0 : 1.0 / options.embedding_dim;
}

inline models::Dense make_dense(const HybridOptions& options, int64_t classes, c10::Device device) {
  return models::Dense(options.embedding_dim, classes, options.seed + 1, device);
}

/// In the order of the optimizer: the server's, then the trainers'.
inline std::vector<std::string> hybrid_parameters() {
  return {"embedding.weight", "fc.weight", "fc.bias"};
}

}  // namespace distrain::scenario
