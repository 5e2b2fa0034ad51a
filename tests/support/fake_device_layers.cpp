// Operators of the fake device that do not exist on the CPU under the same name, or that
// write to more than their schema declares.
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/ConvUtils.h>
#include <torch/library.h>

#include "support/fake_device_internal.h"

namespace distrain::testing::fake_device {
namespace {

using at::IntArrayRef;
using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

at::MemoryFormat format_of(const Tensor& x, const Tensor& weight) {
  const auto format = x.suggest_memory_format();
  return format == at::MemoryFormat::Contiguous ? weight.suggest_memory_format() : format;
}

Tensor convolution(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  const auto size =
      transposed
          ? at::native::conv_input_size(x.sizes(), weight.sizes(), padding, output_padding, stride,
                                        dilation, groups)
          : at::native::conv_output_size(x.sizes(), weight.sizes(), padding, stride, dilation);
  const Tensor y = at::empty(size, x.options().memory_format(format_of(x, weight)));
  Launch launch;
  launch.submit([y = launch.operand(y), x = launch.operand(x), w = launch.operand(weight),
                 b = launch.operand(bias), stride = stride.vec(), padding = padding.vec(),
                 dilation = dilation.vec(), transposed, output_padding = output_padding.vec(),
                 groups] {
    Tensor(y).copy_(at::convolution(x, w, b.defined() ? MaybeTensor(b) : MaybeTensor(), stride,
                                    padding, dilation, transposed, output_padding, groups));
  });
  return y;
}

Tensor like_if(bool wanted, const Tensor& tensor) {
  return wanted ? at::empty_like(tensor) : Tensor();
}

// Copies each tensor of `from` to the same place of `to` if both tensors are defined.
void store(const Three& to, const Three& from) {
  const auto put = [](Tensor there, const Tensor& value) {
    if (there.defined() && value.defined()) there.copy_(value);
  };
  put(std::get<0>(to), std::get<0>(from));
  put(std::get<1>(to), std::get<1>(from));
  put(std::get<2>(to), std::get<2>(from));
}

Three operands(Launch& launch, const Three& tensors) {
  return {launch.operand(std::get<0>(tensors)), launch.operand(std::get<1>(tensors)),
          launch.operand(std::get<2>(tensors))};
}

Three convolution_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                           IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                           bool transposed, IntArrayRef output_padding, int64_t groups,
                           std::array<bool, 3> mask) {
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const Three results = {like_if(mask[0], x), like_if(mask[1], weight),
                         mask[2] ? at::empty({channels}, weight.options()) : Tensor()};
  Launch launch;
  launch.submit([to = operands(launch, results), dy = launch.operand(dy), x = launch.operand(x),
                 w = launch.operand(weight), channels, stride = stride.vec(),
                 padding = padding.vec(), dilation = dilation.vec(), transposed,
                 output_padding = output_padding.vec(), groups, mask] {
    store(to, at::convolution_backward(dy, x, w, IntArrayRef{channels}, stride, padding, dilation,
                                       transposed, output_padding, groups, mask));
  });
  return results;
}

MaybeTensor maybe(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : MaybeTensor();
}

Three batch_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                 const MaybeTensor& mean, const MaybeTensor& variance, bool training,
                 double momentum, double eps) {
  const int64_t saved = training ? x.size(1) : 0;
  const Three results = {at::empty_like(x), at::empty({saved}, x.options()),
                         at::empty({saved}, x.options())};
  Launch launch;
  launch.submit([to = operands(launch, results), x = launch.operand(x),
                 weight = maybe(launch.operand(weight)), bias = maybe(launch.operand(bias)),
                 mean = maybe(launch.operand(mean)), variance = maybe(launch.operand(variance)),
                 training, momentum, eps] {
    store(to, at::native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps));
  });
  return results;
}

Three batch_norm_backward(const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                          const MaybeTensor& mean, const MaybeTensor& variance,
                          const MaybeTensor& saved_mean, const MaybeTensor& saved_scale,
                          bool training, double eps, std::array<bool, 3> mask) {
  const auto channels = [&](bool wanted) {
    return wanted ? at::empty({x.size(1)}, x.options().memory_format(std::nullopt)) : Tensor();
  };
  const Three results = {like_if(mask[0], x), channels(mask[1]), channels(mask[2])};
  Launch launch;
  launch.submit([to = operands(launch, results), dy = launch.operand(dy), x = launch.operand(x),
                 weight = maybe(launch.operand(weight)), mean = maybe(launch.operand(mean)),
                 variance = maybe(launch.operand(variance)),
                 saved_mean = maybe(launch.operand(saved_mean)),
                 saved_scale = maybe(launch.operand(saved_scale)), training, eps, mask] {
    store(to, at::native_batch_norm_backward(dy, x, weight, mean, variance, saved_mean, saved_scale,
                                             training, eps, mask));
  });
  return results;
}

// Computes an LSTM cell. The gates are in torch's order: input, forget, cell, output. The third
// result keeps the gates for lstm_cell_backward().
Three lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const Three results = {at::empty_like(cell), at::empty_like(cell), at::empty_like(input_gates)};
  Launch launch;
  launch.submit([to = operands(launch, results), in = launch.operand(input_gates),
                 hidden = launch.operand(hidden_gates), cell = launch.operand(cell),
                 in_bias = launch.operand(input_bias), hidden_bias = launch.operand(hidden_bias)] {
    Tensor sum = in + hidden;
    if (in_bias.defined()) sum = sum + in_bias + hidden_bias;
    const auto parts = sum.chunk(4, 1);
    const Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(),
                 o = parts[3].sigmoid();
    const Tensor next = f * cell + i * g;
    store(to, {o * next.tanh(), next, at::cat({i, f, g, o}, 1)});
  });
  return results;
}

Three lstm_cell_backward(const MaybeTensor& dh, const MaybeTensor& dc, const Tensor& cell,
                         const Tensor& next, const Tensor& workspace, bool has_bias) {
  const bool wanted = (dh && dh->defined()) || (dc && dc->defined());
  if (!wanted) return {};
  const Three results = {at::empty_like(workspace), at::empty_like(cell),
                         has_bias ? at::empty({workspace.size(1)}, workspace.options()) : Tensor()};
  Launch launch;
  launch.submit([to = operands(launch, results), dh = launch.operand(dh), dc = launch.operand(dc),
                 cell = launch.operand(cell), next = launch.operand(next),
                 gates = launch.operand(workspace)] {
    const auto parts = gates.chunk(4, 1);
    const Tensor i = parts[0], f = parts[1], g = parts[2], o = parts[3];
    const Tensor squashed = next.tanh();
    const Tensor dout = dh.defined() ? dh : at::zeros_like(cell);
    Tensor dnext = dout * o * (1 - squashed * squashed);
    if (dc.defined()) dnext = dnext + dc;
    const Tensor dgates = at::cat({dnext * g * i * (1 - i), dnext * cell * f * (1 - f),
                                   dnext * i * (1 - g * g), dout * squashed * o * (1 - o)},
                                  1);
    store(to, {dgates, dnext * f, dgates.sum(0)});
  });
  return results;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_batch_norm", batch_norm);
  m.impl("native_batch_norm_backward", batch_norm_backward);
  m.impl("_embedding_bag_backward", at::native::_embedding_bag_backward_symint);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

}  // namespace
}  // namespace distrain::testing::fake_device
