// Tests optimizers on the fake device: they have the same results as on the CPU, and do not block.
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include "distrain/autograd/context.h"
#include "distrain/autograd/parameter_versions.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/optim/update_rule.h"
#include "distrain/rpc/device.h"
#include "nets.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/fake_device.h"

namespace distrain::testing {
namespace {

using optim::Adagrad;
using optim::Adam;
using optim::AdamW;
using optim::OptimizerOptions;
using optim::RmsProp;
using optim::Sgd;

constexpr int kSteps = 20;
constexpr double kNear = 1e-6;
// The CPU's kernels of sparse updates do not round as torch's operations, which run on the device.
// So values above 1 may differ by more than kNear, in proportion to them.
double near_of(const Tensors& values) {
  double largest = 1;
  for (const at::Tensor& value : values) {
    largest = std::max(largest, value.abs().max().item<double>());
  }
  return kNear * largest;
}

at::Tensor sparse(const at::Tensor& rows, const at::Tensor& values, at::IntArrayRef shape) {
  return at::_sparse_coo_tensor_unsafe(rows, values, shape);
}

// A parameter and its update rule on one device.
struct Side {
  explicit Side(c10::Device device, const OptimizerOptions& options, const at::Tensor& initial)
      : device(device),
        rule(std::make_unique<optim::UpdateRule>(options)),
        parameter(initial.to(device, false, /*copy=*/true).requires_grad_()) {}

  c10::Device device;
  std::unique_ptr<optim::UpdateRule> rule;
  at::Tensor parameter;
};

void check_state(const Side& there, const Side& here) {
  const auto state = there.rule->state(0);
  for (const auto& [name, value] : here.rule->state(0)) {
    CAPTURE(name);
    CHECK(state.at(name).device() == (name == "step" ? c10::kCPU : there.device));
    CHECK(difference({state.at(name)}, {value}) <= near_of({value}));
  }
}

TEST_CASE("update rules with dense gradients equal the CPU's") {
  at::manual_seed(1);
  const OptimizerOptions options = GENERATE(
      OptimizerOptions(Sgd{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}),
      OptimizerOptions(Adagrad{.lr = 0.1, .lr_decay = 0.1}),
      OptimizerOptions(Adam{.lr = 0.1, .weight_decay = 0.01, .amsgrad = true}),
      OptimizerOptions(AdamW{.lr = 0.1, .weight_decay = 0.1, .amsgrad = true}),
      OptimizerOptions(RmsProp{
          .lr = 0.01, .eps = 1e-3, .weight_decay = 0.01, .momentum = 0.9, .centered = true}));
  const at::Tensor initial = at::randn({5, 3});
  Side there(fake(1), options, initial), here(c10::kCPU, options, initial);
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor gradient = at::randn({5, 3});
    const at::Tensor moved = gradient.to(there.device);
    reset_fake_device_counters();
    there.rule->apply(0, there.parameter, moved);
    const FakeDeviceCounters counted = fake_device_counters();
    CHECK(counted.host_to_device.number + counted.device_to_host.number == 0);
    CHECK(counted.scalars + counted.host_waits == 0);
    here.rule->apply(0, here.parameter, gradient);
  }
  CHECK(difference({there.parameter}, {here.parameter}) <= kNear);
  check_state(there, here);
}

TEST_CASE("update rules with sparse gradients equal the CPU's") {
  at::manual_seed(2);
  const OptimizerOptions options =
      GENERATE(OptimizerOptions(Sgd{.lr = 0.1}), OptimizerOptions(Adagrad{.lr = 0.1}),
               OptimizerOptions(Adam{.lr = 0.1}));
  const at::Tensor initial = at::randn({10, 4});
  Side there(fake(1), options, initial), here(c10::kCPU, options, initial);
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor rows = at::randint(10, {1, 8}, at::kLong), values = at::randn({8, 4});
    const at::Tensor gradient = sparse(rows.to(fake(1)), values.to(fake(1)), {10, 4});
    reset_fake_device_counters();
    there.rule->apply(0, there.parameter, step % 2 == 1 ? gradient.coalesce() : gradient);
    const FakeDeviceCounters counted = fake_device_counters();
    CHECK(counted.host_to_device.number + counted.device_to_host.number == 0);
    CHECK(counted.scalars == 0);
    here.rule->apply(0, here.parameter, sparse(rows, values, {10, 4}));
  }
  CHECK(difference({there.parameter}, {here.parameter}) <= near_of({here.parameter}));
  check_state(there, here);
}

TEST_CASE("a state of the CPU is loaded to the parameter's device, in its layout") {
  at::manual_seed(3);
  const at::Tensor initial = at::randn({2, 3, 4, 4});
  const OptimizerOptions options = Adam{.lr = 0.1};
  Side here(c10::kCPU, options, initial);
  Side there(fake(2), options, initial.contiguous(at::MemoryFormat::ChannelsLast));
  for (int step = 0; step < 3; ++step) {
    here.rule->apply(0, here.parameter, at::randn(initial.sizes()));
  }
  there.rule->adopt(0, there.rule->load(0, there.parameter, here.rule->state(0)));
  const at::NoGradGuard no_grad;
  there.parameter.copy_(here.parameter);
  check_state(there, here);
  CHECK(there.rule->state(0).at("exp_avg").strides() == there.parameter.strides());
  const at::Tensor gradient = at::randn(initial.sizes());
  here.rule->apply(0, here.parameter, gradient);
  there.rule->apply(0, there.parameter, gradient.to(fake(2)));
  CHECK(difference({there.parameter}, {here.parameter}) <= kNear);
}

TEST_CASE("a norm reads one number from each device") {
  at::manual_seed(4);
  const at::Tensor rows = at::tensor({1, 3, 1}, at::kLong).unsqueeze(0), values = at::randn({3, 2});
  const Tensors dense = {at::randn({4, 3}), at::randn({7}), at::Tensor(), at::randn({0, 2})};
  Tensors here = dense, there;
  here.push_back(sparse(rows, values, {5, 2}));
  for (const at::Tensor& gradient : dense) {
    there.push_back(gradient.defined() ? gradient.to(fake()) : gradient);
  }
  there.push_back(sparse(rows.to(fake(1)), values.to(fake(1)), {5, 2}));
  there.push_back(at::full({3}, 2.0, at::kDouble));  // CPU tensors count, too
  reset_fake_device_counters();
  const double norm = optim::norm_squared(there);
  CHECK(fake_device_counters().scalars == 2);
  CHECK(fake_device_counters().device_to_host.number == 0);
  CHECK(norm == Approx(optim::norm_squared(here) + 12).epsilon(kNear));
  CHECK(optim::norm_squared({at::Tensor()}) == 0);
}

void expose_nets(rpc::Agent& agent) {
  autograd::install(agent);
  optim::install(agent);
}

TEST_CASE("an update on the device keeps the version that a pass in flight uses") {
  Cluster cluster(1, expose_nets);
  at::manual_seed(5);
  const at::Tensor initial = at::randn({3, 3}), x = at::randn({2, 3}), gradient = at::ones({3, 3});
  const auto of = [](const at::Tensor& x, const at::Tensor& w) {
    return x.matmul(w).tanh().matmul(w.t()).pow(2).sum();
  };
  const auto run = [&](c10::Device device) {
    at::Tensor weight = initial.to(device, false, /*copy=*/true).requires_grad_();
    const auto rule = std::make_unique<optim::UpdateRule>(Sgd{.lr = 0.5});
    Tensors results;
    {
      const at::Tensor version = autograd::current_versions(cluster[0], {weight})[0];
      const at::Tensor loss = of(x.to(device), version);
      {
        const autograd::ParameterUpdate update(cluster[0]);
        CHECK(update.unshare(weight));
        rule->apply(0, weight, gradient.to(device));
      }
      results = torch::autograd::grad({loss}, {weight});
    }
    const void* const memory = weight.storage().data();
    const autograd::ParameterUpdate update(cluster[0]);
    CHECK_FALSE(update.unshare(weight));
    rule->apply(0, weight, gradient.to(device));
    CHECK(weight.storage().data() == memory);
    results.push_back(weight.detach());
    return results;
  };
  CHECK(difference(run(fake(3)), run(c10::kCPU)) <= kNear);
  cluster.shutdown();
}

// Trains as a server does: a pass reads parameter versions, then a step updates the parameters.
Tensors train(rpc::Agent& agent, const Net& net, const OptimizerOptions& options,
              c10::Device device) {
  const Tensors parameters = leaves(net.parameters, device);
  const Tensors state = to_device(net.state, device);
  const auto rule = std::make_unique<optim::UpdateRule>(options);
  Tensors losses;
  for (int step = 0; step < kSteps; ++step) {
    at::Tensor loss;
    {
      const Tensors versions = autograd::current_versions(agent, parameters);
      loss = net.loss(versions, to_device(net.batch, device), state);
    }
    const Tensors gradients = torch::autograd::grad({loss}, parameters);
    losses.push_back(loss.detach());
    loss.reset();
    const at::NoGradGuard no_grad;
    const autograd::ParameterUpdate update(agent);
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor parameter = parameters[i];
      if (!gradients[i].is_sparse()) CHECK_FALSE(update.unshare(parameter));
      rule->apply(i, parameter, gradients[i]);
    }
  }
  Tensors results = parameters;
  results.insert(results.end(), losses.begin(), losses.end());
  results.insert(results.end(), state.begin(), state.end());
  return results;
}

TEST_CASE("twenty steps of the jobs' models on the device equal the CPU's") {
  Cluster cluster(1, expose_nets);
  at::manual_seed(6);
  const auto [net, options] =
      GENERATE(std::pair(conv_net(), OptimizerOptions(Sgd{.lr = 0.05})),
               std::pair(bags(), OptimizerOptions(Sgd{.lr = 0.05})),
               std::pair(bags(), OptimizerOptions(Adagrad{.lr = 0.05})),
               std::pair(bags(), OptimizerOptions(Adam{.lr = 0.01})),
               std::pair(language_model(), OptimizerOptions(Sgd{.lr = 0.1})),
               std::pair(residual_net(), OptimizerOptions(Sgd{.lr = 0.01})));
  CAPTURE(net.name, options.index());
  run_all_fake_streams();
  reset_fake_device_counters();
  const Tensors there = train(cluster[0], net, options, fake(1));
  const FakeDeviceCounters counted = fake_device_counters();
  CHECK(counted.host_to_device.number ==
        static_cast<int64_t>(net.parameters.size() + net.state.size() + kSteps * net.batch.size()));
  CHECK(counted.device_to_host.number == 0);
  CHECK(counted.device_to_device.number == 0);
  CHECK(counted.scalars == 0);
  const Tensors here = train(cluster[0], net, options, c10::kCPU);
  CHECK(difference(there, here) <= near_of(here));
  cluster.shutdown();
}

TEST_CASE("a distributed optimizer updates and clips parameters of two devices") {
  Cluster cluster(1, expose_nets);
  at::manual_seed(7);
  const Net net = perceptron();
  const auto run = [&](c10::Device first, c10::Device second) {
    Tensors parameters = net.parameters;
    std::vector<rpc::RRef<at::Tensor>> rrefs;
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i] = parameters[i].to(i < 2 ? first : second, false, true).requires_grad_();
      rrefs.push_back(cluster[0].make_rref(parameters[i]));
    }
    optim::DistributedOptimizer optimizer(cluster[0], rrefs, Sgd{.lr = 0.1, .momentum = 0.9});
    for (int step = 0; step < kSteps; ++step) {
      autograd::Context context(cluster[0]);
      const at::Tensor x =
          at::relu(at::linear(net.batch[0].to(first), parameters[0], parameters[1]));
      const at::Tensor loss = at::cross_entropy_loss(
          at::linear(x.to(second), parameters[2], parameters[3]), net.batch[1].to(second));
      autograd::backward(context, {loss});
      optimizer.step(context, 0.5);
    }
    return parameters;
  };
  CHECK(difference(run(fake(1), fake(2)), run(c10::kCPU, c10::kCPU)) <= kNear);
  cluster.shutdown();
}

TEST_CASE("the state is that of the last step, on whatever streams it is read and set") {
  Cluster cluster(1, expose_nets);
  const c10::Device device = fake(2);
  const at::Tensor parameter = at::zeros({100}, at::TensorOptions(device)).requires_grad_();
  optim::DistributedOptimizer optimizer(cluster[0], {}, {parameter},
                                        optim::Rule{Sgd{.lr = 0.1, .momentum = 1}, {}, 0});
  const auto momentum = [&] {
    const c10::StreamGuard guard(rpc::side_stream(device));
    return optimizer.own_state().at(0).begin()->second;
  };
  for (int step = 1; step <= 10; ++step) {
    autograd::Context context(cluster[0]);
    {
      const c10::StreamGuard guard(rpc::side_stream(device));
      autograd::backward(context, {parameter.sum()});
      optimizer.step(context);
    }
    CHECK(at::equal(momentum(), at::full({100}, double(step))));
  }
  for (int round = 0; round < 10; ++round) {
    autograd::Context context(cluster[0]);
    {
      const c10::StreamGuard guard(rpc::side_stream(device));
      autograd::backward(context, {parameter.sum()});
      optimizer.step(context);
    }
    auto state = optimizer.own_state();
    state.at(0).begin()->second.fill_(7);
    {
      const c10::StreamGuard guard(rpc::side_stream(device));
      optimizer.load_own_state(state);
    }
    CHECK(at::equal(momentum(), at::full({100}, 7.0)));
  }
  cluster.shutdown();
}

}  // namespace
}  // namespace distrain::testing
