#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "distrain/rpc/agent.h"
#include "distrain/rpc/named_tensors.h"

namespace distrain::scenario {

/// The parameter server's module: the sum of the rows of a bag's words (EmbeddingBag, mode sum).
/// Its gradient is sparse: only the rows that were looked up travel and change.
class EmbeddingTable {
 public:
  /// `range` 0: rows from N(0, 1), as torch.nn.EmbeddingBag's; else uniform in ±range, on `device`.
  using Constructor = EmbeddingTable(int64_t rows, int64_t dim, double range, uint64_t seed,
                                     std::string device);
  EmbeddingTable(int64_t rows, int64_t dim, double range, uint64_t seed, const std::string& device);

  /// int64 indices [n], offsets [bags] → float [bags, dim].
  at::Tensor forward(rpc::CallContext& call, at::Tensor indices, at::Tensor offsets);
  at::Tensor lookup(const at::Tensor& indices, const at::Tensor& offsets) const;
  std::vector<at::Tensor> parameters() { return {weight_}; }
  rpc::NamedTensors named_parameters() const { return {{"embedding.weight", weight_}}; }

 private:
  at::Tensor weight_;
};

/// The trainers' module, torch.nn.Linear, on any device; the same for the same seed.
class DenseImpl : public torch::nn::Module {
 public:
  DenseImpl(int64_t inputs, int64_t classes, uint64_t seed, c10::Device device);
  at::Tensor forward(const at::Tensor& x) const;

  at::Tensor weight;
  at::Tensor bias;
};
TORCH_MODULE(Dense);

}  // namespace distrain::scenario
