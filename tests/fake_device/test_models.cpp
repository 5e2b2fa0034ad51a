// Tests whole models on the fake device: their gradients equal the CPU's.
#include <torch/csrc/autograd/autograd.h>

#include "nets.h"
#include "support/catch.h"
#include "support/fake_device.h"

namespace distrain::testing {
namespace {

// Returns the loss, the gradients and the updated state of one pass.
Tensors pass(const Net& net, c10::Device device) {
  const Tensors parameters = leaves(net.parameters, device);
  const Tensors state = to_device(net.state, device);
  const at::Tensor loss = net.loss(parameters, to_device(net.batch, device), state);
  Tensors results = torch::autograd::grad({loss}, parameters);
  for (const at::Tensor& gradient : results) CHECK(gradient.device() == device);
  results.push_back(loss);
  results.insert(results.end(), state.begin(), state.end());
  return results;
}

TEST_CASE("gradients on the device equal the CPU's") {
  at::manual_seed(1);
  const Net net = GENERATE(perceptron(), conv_net(), bags(true), bags(false), language_model(true),
                           language_model(false), residual_net());
  CAPTURE(net.name);
  run_all_fake_streams();
  reset_fake_device_counters();
  const Tensors there = pass(net, fake(2));
  const auto in = static_cast<int64_t>(net.parameters.size() + net.batch.size() + net.state.size());
  const FakeDeviceCounters counted = fake_device_counters();
  CHECK(counted.host_to_device.number == in);
  CHECK(counted.device_to_host.number == 0);
  CHECK(counted.device_to_device.number == 0);
  CHECK(counted.scalars == 0);
  CHECK(counted.host_waits == 0);
  CHECK(difference(there, pass(net, at::kCPU)) <= 1e-5);
}

}  // namespace
}  // namespace distrain::testing
