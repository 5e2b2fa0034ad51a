#pragma once

#include <vector>

#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

namespace distrain::testing {

/// A typical user-defined module from [n, 8] to [n, 3]: not cloneable, layers as data members.
struct PlainNetImpl : torch::nn::Module {
  explicit PlainNetImpl(int64_t width = 16) {
    using namespace torch::nn;
    conv = register_module("conv", Conv1d(Conv1dOptions(1, 4, 3).padding(1)));
    in = register_module("in", Linear(32, width));
    norm = register_module("norm", LayerNorm(LayerNormOptions({width})));
    lstm = register_module("lstm", LSTM(LSTMOptions(width, 8).batch_first(true)));
    out = register_module("out", Linear(8, 3));
  }
  at::Tensor forward(at::Tensor x) {
    x = conv->forward(x.unsqueeze(1)).flatten(1);
    x = at::relu(norm->forward(in->forward(x)));
    x = std::get<0>(lstm->forward(x.unsqueeze(1))).squeeze(1);
    return out->forward(x);
  }
  torch::nn::Conv1d conv{nullptr};
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
};
TORCH_MODULE(PlainNet);

}  // namespace distrain::testing
