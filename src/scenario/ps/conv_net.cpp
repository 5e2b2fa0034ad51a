#include "conv_net.h"

#include <cmath>

#include <ATen/Functions.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/autograd/context.h"
#include "distrain/autograd/parameter_versions.h"
#include "distrain/base/trace.h"
#include "distrain/nn/keyed_generator.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/optim/single_process_optimizer.h"
#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

ConvNet::ConvNet(uint64_t seed, const std::vector<c10::Device>& devices) {
  const at::Generator generator = nn::keyed_generator({seed});
  const auto layer = [&](const std::vector<int64_t>& shape, c10::Device device) {
    const int64_t inputs = c10::multiply_integers(shape) / shape[0];
    const double bound = 1.0 / std::sqrt(static_cast<double>(inputs));
    for (const at::IntArrayRef sizes : {at::IntArrayRef(shape), at::IntArrayRef(shape[0])}) {
      parameters_.push_back(nn::uniform(sizes, bound, generator, device).requires_grad_());
    }
  };
  layer({32, 1, 3, 3}, devices.front());
  layer({64, 32, 3, 3}, devices.front());
  layer({128, 9216}, devices.back());
  layer({10, 128}, devices.back());
}

const std::vector<std::string>& ConvNet::names() {
  static const std::vector<std::string> kNames = {"conv1.weight", "conv1.bias", "conv2.weight",
                                                  "conv2.bias",   "fc1.weight", "fc1.bias",
                                                  "fc2.weight",   "fc2.bias"};
  return kNames;
}

rpc::NamedTensors ConvNet::named_parameters() const {
  const auto named = optim::named(names(), parameters_);
  return {named.begin(), named.end()};
}

at::Tensor ConvNet::forward(const std::vector<at::Tensor>& parameters, const at::Tensor& images,
                            nn::Dropout dropout, std::optional<double> rate) {
  const base::TraceScope scope("forward");
  at::Tensor x = rpc::to_device(images, parameters[0].device());
  x = at::relu(at::conv2d(x, parameters[0], parameters[1]));
  x = at::relu(at::conv2d(x, parameters[2], parameters[3]));
  x = dropout.channels(at::max_pool2d(x, {2, 2}), rate.value_or(0.25));
  x = rpc::to_device(x.flatten(1), parameters[4].device());
  x = at::relu(at::linear(x, parameters[4], parameters[5]));
  x = at::linear(dropout(x, rate.value_or(0.5)), parameters[6], parameters[7]);
  return at::log_softmax(x, 1);
}

PsForward ConvNet::forward_training(rpc::CallContext& call, at::Tensor images,
                                    std::optional<uint64_t> dropout_key,
                                    std::optional<double> dropout_rate) {
  // Trainers are ranks 1 and up. Get the progress before the versions, so that it is a lower bound.
  const optim::Progress progress =
      optim::progress_of(call.agent, parameters_[0], call.caller.rank - 1);
  const auto versions = autograd::current_versions(call.agent, parameters_);
  const at::Tensor scores = forward(
      versions, images, dropout_key ? nn::Dropout({*dropout_key}) : nn::Dropout(), dropout_rate);
  return {rpc::for_rank(call.agent, call.caller.rank, scores), progress.updates, progress.lead};
}

at::Tensor ConvNet::forward_evaluating(rpc::CallContext& call, at::Tensor images) {
  const at::NoGradGuard no_grad;
  const auto versions = autograd::current_versions(call.agent, parameters_);
  return rpc::for_rank(call.agent, call.caller.rank, forward(versions, images, nn::Dropout()));
}

std::vector<rpc::RRef<at::Tensor>> ConvNet::parameter_rrefs(rpc::CallContext& call) {
  std::vector<rpc::RRef<at::Tensor>> rrefs;
  for (const at::Tensor& parameter : parameters_) rrefs.push_back(call.agent.make_rref(parameter));
  return rrefs;
}

std::vector<at::Tensor> ConvNet::gradients(rpc::CallContext& call, uint64_t context) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters_) {
    const at::Tensor gradient = autograd::gradient(call.agent, context, parameter);
    gradients.push_back(gradient.defined() ? rpc::for_rank(call.agent, call.caller.rank, gradient)
                                           : gradient);
  }
  return gradients;
}

}  // namespace distrain::scenario
