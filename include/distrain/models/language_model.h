#pragma once

#include <cstdint>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "distrain/data/named_tensors.h"
#include "distrain/nn/dropout.h"
#include "distrain/rpc/agent.h"

namespace distrain::models {

/// On the parameter server: word number → vector, with a sparse gradient of the rows looked up.
class WordEmbedding {
 public:
  WordEmbedding(int64_t words, int64_t size, uint64_t seed, c10::Device device);

  /// int64 [length, columns] → float [length, columns, size]
  at::Tensor forward(rpc::CallContext& call, at::Tensor words);
  at::Tensor lookup(const at::Tensor& words) const;
  data::NamedTensors named_parameters() const { return {{"encoder.weight", weight_}}; }

 private:
  at::Tensor weight_;
};

/// On the parameter server: LSTM output → a score for each word. The loss is computed here, too:
/// scores of a whole vocabulary are much bigger than what they are made of.
class Decoder {
 public:
  Decoder(int64_t words, int64_t hidden, uint64_t seed, c10::Device device);

  /// Mean cross entropy of float [n, hidden] against int64 [n].
  at::Tensor loss(rpc::CallContext& call, at::Tensor hidden, at::Tensor targets);
  /// float [n, hidden] → [n, words], without gradients.
  at::Tensor scores(rpc::CallContext& call, at::Tensor hidden);

  static at::Tensor loss_of(const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& hidden, const at::Tensor& targets);
  static at::Tensor scores_of(const at::Tensor& weight, const at::Tensor& bias,
                              const at::Tensor& hidden);
  const at::Tensor& weight() const { return weight_; }
  const at::Tensor& bias() const { return bias_; }
  data::NamedTensors named_parameters() const {
    return {{"decoder.weight", weight_}, {"decoder.bias", bias_}};
  }

 private:
  at::Tensor weight_;
  at::Tensor bias_;
};

/// The state that an LSTM carries from batch to batch: float [layers, columns, hidden] each.
struct LstmState {
  at::Tensor hidden;
  at::Tensor cell;
};

/// On the trainers: torch.nn.LSTM by names, shapes, initialisation and result, with dropout between
/// its layers from a key (see Dropout).
class LstmImpl : public torch::nn::Module {
 public:
  LstmImpl(int64_t input, int64_t hidden, int64_t layers, double dropout, uint64_t seed,
           c10::Device device = c10::kCPU);

  /// float [length, columns, input] → [length, columns, hidden]; `state` is moved on.
  at::Tensor forward(at::Tensor x, LstmState& state, nn::Dropout& dropout);
  LstmState zero_state(int64_t columns) const;
  /// As torch.nn.LSTM names them, under `rnn.`.
  data::NamedTensors named() const;

 private:
  const int64_t hidden_;
  const int64_t layers_;
  const double dropout_;
  std::vector<at::Tensor> weights_;  // ih, hh, bias_ih, bias_hh of each layer
};
TORCH_MODULE(Lstm);

}  // namespace distrain::models
