#pragma once

#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "distrain/nn/random.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/named_tensors.h"

namespace distrain::scenario {

/// The embedding table on the parameter server. Its sparse gradients have only the batch's rows.
class WordEmbedding {
 public:
  WordEmbedding(int64_t words, int64_t size, uint64_t seed, c10::Device device);

  /// Looks up int64 `words` [length, columns]. Returns float [length, columns, size].
  at::Tensor forward(rpc::CallContext& call, at::Tensor words);
  at::Tensor lookup(const at::Tensor& words) const;
  rpc::NamedTensors named_parameters() const { return {{"encoder.weight", weight_}}; }

 private:
  at::Tensor weight_;
};

/// The output layer on the parameter server: computes a score for each word from the LSTM's output.
/// It also computes the loss, so that trainers do not receive the scores, which are much larger.
class Decoder {
 public:
  Decoder(int64_t words, int64_t hidden, uint64_t seed, c10::Device device);

  /// Returns the mean cross entropy for float `hidden` [n, hidden] and int64 `targets` [n].
  at::Tensor loss(rpc::CallContext& call, at::Tensor hidden, at::Tensor targets);
  /// Returns scores [n, words] for float `hidden` [n, hidden], without recording gradients.
  at::Tensor scores(rpc::CallContext& call, at::Tensor hidden);

  // Compute the results of loss() and scores() for one version of parameters().
  static at::Tensor loss_of(const std::vector<at::Tensor>& parameters, const at::Tensor& hidden,
                            const at::Tensor& targets);
  static at::Tensor scores_of(const std::vector<at::Tensor>& parameters, const at::Tensor& hidden);
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  rpc::NamedTensors named_parameters() const {
    return {{"decoder.weight", parameters_[0]}, {"decoder.bias", parameters_[1]}};
  }

 private:
  const std::vector<at::Tensor> parameters_;  // weight [words, hidden], bias [words]
};

/// The state that an LSTM carries from batch to batch: float [layers, columns, hidden] each.
struct LstmState {
  at::Tensor hidden;
  at::Tensor cell;
};

/// The LSTM on the trainers: as torch.nn.LSTM, with the same parameter names, shapes,
/// initialization and results, but with keyed dropout between its layers (see Dropout).
class LstmImpl : public torch::nn::Module {
 public:
  LstmImpl(int64_t input, int64_t hidden, int64_t layers, double dropout, uint64_t seed,
           c10::Device device = c10::kCPU);

  /// Maps float [length, columns, input] to [length, columns, hidden] and updates `state`.
  at::Tensor forward(at::Tensor x, LstmState& state, nn::Dropout& dropout);
  LstmState zero_state(int64_t columns) const;

 private:
  const int64_t hidden_;
  const int64_t layers_;
  const double dropout_;
  std::vector<at::Tensor> weights_;  // ih, hh, bias_ih, bias_hh of each layer
};
TORCH_MODULE(Lstm);

}  // namespace distrain::scenario
