#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "scenario/pipeline/resnet.h"
#include "scenario/ps/ps.h"
#include "scenario/rnn/lstm.h"

namespace distrain::testing {

using Tensors = std::vector<at::Tensor>;

inline Tensors to_device(const Tensors& tensors, c10::Device device) {
  Tensors moved;
  for (const at::Tensor& tensor : tensors) moved.push_back(tensor.detach().to(device, true, true));
  return moved;
}

inline Tensors leaves(const Tensors& tensors, c10::Device device) {
  Tensors moved = to_device(tensors, device);
  for (at::Tensor& tensor : moved) tensor.requires_grad_();
  return moved;
}

/// Returns the largest difference of corresponding elements; infinite if the sizes differ.
inline double difference(const Tensors& a, const Tensors& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const auto dense = [](const at::Tensor& t) {
      return (t.is_sparse() ? t.to_dense() : t).detach().cpu().to(at::kDouble);
    };
    const at::Tensor apart = (dense(a[i]) - dense(b[i])).abs();
    if (apart.numel() == 0) continue;
    // NaN shows that memory was read before it was written.
    largest =
        apart.isnan().any().item<bool>() ? INFINITY : std::max(largest, apart.max().item<double>());
  }
  return largest;
}

/// A model and one batch, on the CPU.
struct Net {
  std::string name;
  Tensors parameters;
  Tensors batch;
  Tensors state;  ///< buffers that a pass changes
  std::function<at::Tensor(const Tensors& parameters, const Tensors& batch, const Tensors& state)>
      loss;
};

inline at::Tensor classes(int64_t n, int64_t count) { return at::randint(count, {n}, at::kLong); }

inline Net perceptron() {
  return {"perceptron",
          {at::randn({16, 8}), at::randn({16}), at::randn({3, 16}), at::randn({3})},
          {at::randn({5, 8}), classes(5, 3)},
          {},
          [](const Tensors& p, const Tensors& batch, const Tensors&) {
            const at::Tensor hidden = at::relu(at::linear(batch[0], p[0], p[1]));
            return at::cross_entropy_loss(at::linear(hidden, p[2], p[3]), batch[1]);
          }};
}

/// Returns a model and a batch like those of the ps job.
inline Net conv_net() {
  const scenario::ConvNet model(1);
  return {"conv net",
          model.parameters(),
          {at::randn({4, 1, 28, 28}), classes(4, 10)},
          {},
          [](const Tensors& p, const Tensors& batch, const Tensors&) {
            return at::nll_loss(scenario::ConvNet::forward(p, batch[0], nn::Dropout()), batch[1]);
          }};
}

/// Returns a net like that of the hybrid job: an embedding bag and a dense layer.
inline Net bags(bool sparse = true) {
  return {sparse ? "bags, sparse" : "bags, dense",
          {at::randn({20, 6}), at::randn({4, 6}), at::randn({4})},
          {at::tensor({1, 2, 2, 19, 0, 7, 7, 3}, at::kLong), at::tensor({0, 3, 3, 6}, at::kLong),
           classes(4, 4)},
          {},
          [sparse](const Tensors& p, const Tensors& batch, const Tensors&) {
            const at::Tensor rows =
                std::get<0>(at::embedding_bag(p[0], batch[0], batch[1], false, 0, sparse));
            return at::cross_entropy_loss(at::linear(rows, p[1], p[2]), batch[2]);
          }};
}

/// Returns a net like that of the rnn job: an embedding, two LSTM layers, a decoder.
inline Net language_model(bool sparse = true) {
  const int64_t words = 11, size = 5, hidden = 7;
  Net net{sparse ? "language model, sparse" : "language model, dense", {}, {}, {}, {}};
  net.parameters.push_back(at::randn({words, size}));
  for (const int64_t in : {size, hidden}) {
    net.parameters.push_back(at::randn({4 * hidden, in}) * 0.3);
    net.parameters.push_back(at::randn({4 * hidden, hidden}) * 0.3);
    net.parameters.push_back(at::randn({4 * hidden}) * 0.3);
    net.parameters.push_back(at::randn({4 * hidden}) * 0.3);
  }
  net.parameters.push_back(at::randn({words, hidden}));
  net.parameters.push_back(at::randn({words}));
  net.batch = {at::randint(words, {6, 3}, at::kLong), classes(18, words)};
  net.loss = [=](const Tensors& p, const Tensors& batch, const Tensors&) {
    at::Tensor x = at::embedding(p[0], batch[0], -1, false, sparse);
    for (int layer = 0; layer < 2; ++layer) {
      const auto first = p.begin() + 1 + 4 * layer;
      const at::Tensor zero = at::zeros({1, 3, hidden}, x.options());
      x = std::get<0>(
          at::lstm(x, {zero, zero}, Tensors(first, first + 4), true, 1, 0.0, true, false, false));
    }
    return scenario::Decoder::loss_of({p[9], p[10]}, x.reshape({18, hidden}), batch[1]);
  };
  return net;
}

/// Returns a small ResNet, channels last: a stem, a block with a shortcut, pooling, a head. Its
/// state holds the running statistics of batch norm.
inline Net residual_net() {
  const auto conv = [](int64_t out, int64_t in, int64_t kernel) {
    return (at::randn({out, in, kernel, kernel}) * 0.2).contiguous(at::MemoryFormat::ChannelsLast);
  };
  Net net{"residual net",
          {conv(8, 3, 7), conv(12, 8, 3), conv(12, 12, 3), conv(12, 8, 1), at::randn({5, 12}),
           at::randn({5})},
          {at::randn({4, 3, 20, 20}), classes(4, 5)},
          {},
          {}};
  for (const int64_t channels : {8, 12, 12, 12}) {
    net.parameters.push_back(at::rand({channels}) + 0.5);
    net.parameters.push_back(at::randn({channels}));
    net.state.push_back(at::zeros({channels}));
    net.state.push_back(at::ones({channels}));
    net.state.push_back(at::zeros({}, at::kLong));
  }
  net.loss = [](const Tensors& p, const Tensors& batch, const Tensors& state) {
    const auto layer = [&](size_t i, int64_t stride) {
      scenario::ConvNorm norm;
      norm.kernel = p[i].size(2);
      norm.stride = stride;
      norm.weight = p[i];
      norm.scale = p[6 + 2 * i];
      norm.shift = p[7 + 2 * i];
      norm.running_mean = state[3 * i];
      norm.running_var = state[3 * i + 1];
      norm.batches_tracked = state[3 * i + 2];
      return norm;
    };
    at::Tensor x = batch[0].contiguous(at::MemoryFormat::ChannelsLast);
    x = at::max_pool2d(layer(0, 2).forward(x, true).relu_(), {3, 3}, {2, 2}, {1, 1});
    const scenario::ResidualBlock block{{layer(1, 2), layer(2, 1)}, layer(3, 2)};
    x = at::adaptive_avg_pool2d(block.forward(x, true), {1, 1}).flatten(1);
    return at::cross_entropy_loss(at::linear(x, p[4], p[5]), batch[1]);
  };
  return net;
}

}  // namespace distrain::testing
