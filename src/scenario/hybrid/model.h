#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "distrain/models/embedding_table.h"
#include "distrain/scenario/hybrid.h"

namespace distrain::scenario {

/// As fastText's for real text, so that the sum over a long one does not drown the rest; the
/// tutorial's for random batches.
double embedding_range(const HybridOptions& options);

models::Dense make_dense(const HybridOptions& options, int64_t classes, c10::Device device);

/// In the order of the optimizer: the server's, then the trainers'.
const std::vector<std::string>& hybrid_parameters();

}  // namespace distrain::scenario
