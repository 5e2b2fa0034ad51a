#pragma once

#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "distrain/autograd/parameter_versions.h"
#include "distrain/nn/random.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/named_tensors.h"
#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

/// The embedding table on the parameter server. Its sparse gradients have only the batch's rows.
class WordEmbedding {
 public:
  WordEmbedding(int64_t words, int64_t size, uint64_t seed, c10::Device device);

  /// Looks up int64 `words` [length, columns]. Returns float [length, columns, size].
  at::Tensor forward(rpc::CallContext& call, at::Tensor words) {
    const autograd::ParameterRead no_row_changes_meanwhile(call.agent);
    return rpc::for_rank(call.agent, call.caller.rank, lookup(words));
  }
  at::Tensor lookup(const at::Tensor& words) const {
    rpc::check_rows(words, weight_);
    return at::embedding(weight_, rpc::to_device(words, weight_.device()), /*padding_idx=*/-1,
                         /*scale_grad_by_freq=*/false,
                         /*sparse=*/true);
  }
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
  at::Tensor loss(rpc::CallContext& call, at::Tensor hidden, at::Tensor targets) {
    const auto versions = autograd::current_versions(call.agent, parameters_);
    return rpc::for_rank(call.agent, call.caller.rank, loss_of(versions, hidden, targets));
  }
  /// Returns scores [n, words] for float `hidden` [n, hidden], without recording gradients.
  at::Tensor scores(rpc::CallContext& call, at::Tensor hidden) {
    const at::NoGradGuard no_grad;
    const auto versions = autograd::current_versions(call.agent, parameters_);
    return rpc::for_rank(call.agent, call.caller.rank, scores_of(versions, hidden));
  }

  // Compute the results of loss() and scores() for one version of parameters().
  static at::Tensor loss_of(const std::vector<at::Tensor>& parameters, const at::Tensor& hidden,
                            const at::Tensor& targets) {
    return at::cross_entropy_loss(scores_of(parameters, hidden),
                                  rpc::to_device(targets, parameters[0].device()));
  }
  static at::Tensor scores_of(const std::vector<at::Tensor>& parameters, const at::Tensor& hidden) {
    return at::linear(rpc::to_device(hidden, parameters[0].device()), parameters[0], parameters[1]);
  }
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
  LstmState zero_state(int64_t columns) const {
    const auto options = weights_.front().options();
    return {at::zeros({layers_, columns, hidden_}, options),
            at::zeros({layers_, columns, hidden_}, options)};
  }

 private:
  const int64_t hidden_;
  const int64_t layers_;
  const double dropout_;
  std::vector<at::Tensor> weights_;  // ih, hh, bias_ih, bias_hh of each layer
};
TORCH_MODULE(Lstm);

}  // namespace distrain::scenario
