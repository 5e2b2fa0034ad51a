#include "model.h"

namespace distrain::scenario {

double embedding_range(const HybridOptions& options) {
  return options.data.empty() ? 0.0 : 1.0 / options.embedding_dim;
}

models::Dense make_dense(const HybridOptions& options, int64_t classes, c10::Device device) {
  return models::Dense(options.embedding_dim, classes, options.seed + 1, device);
}

const std::vector<std::string>& hybrid_parameters() {
  static const std::vector<std::string> kNames = {"embedding.weight", "fc.weight", "fc.bias"};
  return kNames;
}

}  // namespace distrain::scenario
