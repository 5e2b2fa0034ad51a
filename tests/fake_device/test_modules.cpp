// Tests ordinary torch modules on the fake device: they behave as on the CPU, whichever streams
// read and change their parameters.
#include <thread>

#include <c10/core/StreamGuard.h>
#include <torch/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "distrain/autograd/context.h"
#include "distrain/nn/module.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/device.h"
#include "scenario/hybrid/hybrid.h"
#include "scenario/rnn/rnn.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/test_device.h"

namespace distrain::testing {
namespace {

using autograd::Context;
using nn::RemoteModule;

struct ShiftedImpl : torch::nn::Module {
  ShiftedImpl() {
    linear = register_module("linear", torch::nn::Linear(4, 3));
    shift = register_buffer("shift", at::arange(3, at::kFloat));
  }
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x).tanh() + shift; }
  torch::nn::Linear linear{nullptr};
  at::Tensor shift;
};
TORCH_MODULE(Shifted);

// Changes its buffer without incrementing the buffer's version counter, as some torch kernels do.
struct UncountedImpl : torch::nn::Module {
  UncountedImpl() { passes = register_buffer("passes", at::zeros({3})); }
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) passes.variable_data().add_(1);
    return x + passes;
  }
  at::Tensor passes;
};
TORCH_MODULE(Uncounted);

at::Tensor gradient_of(rpc::CallContext& call, const rpc::RRef<at::Tensor>& parameter,
                       uint64_t context) {
  const at::Tensor gradient = autograd::gradient(call.agent, context, parameter.local_value());
  return rpc::to_host({gradient})[0];
}

void expose_modules(rpc::Agent& agent) {
  autograd::install(agent);
  optim::install(agent);
  agent.expose<&gradient_of>("gradient_of");
  nn::expose_module(agent, "net", [] { return Shifted(); });
  nn::expose_module(agent, "uncounted", [] { return Uncounted(); });
}

at::Tensor loss_of(const at::Tensor& y) { return y.pow(2).sum(); }

}  // namespace

TEST_CASE("passes over a module on a device have the gradients of the parameters that they used") {
  at::manual_seed(1);
  const bool trainer_has_device = GENERATE(false, true);
  Cluster cluster(2, expose_modules, {}, [&](rpc::AgentOptions& options) {
    if (options.rank == 1 || trainer_has_device) options.device = test_device(options.rank);
  });
  rpc::Agent& agent = cluster[0];
  const RemoteModule net(agent, 1, "net");
  const auto parameters = net.remote_parameters();
  optim::DistributedOptimizer optimizer(agent, parameters, optim::Sgd{.lr = 0.1});
  const at::Tensor x = at::rand({5, 4});
  const at::Tensor input = x.to(agent.device());

  const auto check = [&](const Context& context, const rpc::NamedTensors& values) {
    Shifted oracle;
    {
      const at::NoGradGuard no_grad;
      for (auto& item : oracle->named_parameters()) item.value().copy_(values.at(item.key()));
      oracle->shift.copy_(values.at("shift"));
    }
    const auto expected =
        torch::autograd::grad({loss_of(oracle->forward(x))}, oracle->parameters());
    const rpc::ContextScope outside(0);
    for (size_t i = 0; i < expected.size(); ++i) {
      const at::Tensor found = agent.rpc_sync<&gradient_of>(1, parameters[i], context.id());
      CHECK(at::allclose(found, expected[i], 1e-5, 1e-6));
    }
  };
  for (int round = 0; round < 5; ++round) {
    CAPTURE(round);
    rpc::NamedTensors before = net.state();
    if (round == 3) {
      before.at("shift") = before.at("shift") * -2;
      net.load_state(before);
    }
    Context slow(agent, Context::Scope::kExplicit);
    at::Tensor early;
    {
      const rpc::ContextScope inside(slow.id());
      early = net.forward(input);
    }
    {
      Context quick(agent);
      autograd::backward(quick, {loss_of(net.forward(input))});
      check(quick, before);
      optimizer.step(quick);
    }
    autograd::backward(slow, {loss_of(early)});
    check(slow, before);
    CHECK_FALSE(at::equal(net.state().at("linear.weight"), before.at("linear.weight")));
  }
}

TEST_CASE("a write to a buffer on a device that is not counted as a version is detected") {
  rpc::AgentOptions options;
  options.device = test_device(1);
  Cluster cluster(1, expose_modules, options);
  RemoteModule net(cluster[0], 0, "uncounted");
  const at::Tensor x = at::rand({2, 3});
  const base::Error error = error_of([&] { net.forward(x.to(test_device(1))); });
  CHECK(error.kind == base::ErrorKind::kInvalid);
  CHECK(error.message.find("writes its buffer passes in forward()") != std::string::npos);
  net.eval();
  CHECK(at::equal(rpc::to_host({net.forward(x.to(test_device(1)))})[0], x));
}

TEST_CASE("trainers with their own streams share the module of their rank") {
  at::manual_seed(2);
  constexpr int kTrainers = 3, kSteps = 20;
  rpc::AgentOptions options;
  options.device = test_device(0);
  Cluster cluster(1, expose_modules, options);
  const RemoteModule net(cluster[0], 0, "net");
  const at::Tensor x = at::rand({5, 4});
  const double before = loss_of(net.forward(x.to(test_device(0)))).item<double>();
  std::vector<std::thread> threads;
  std::vector<std::string> errors(kTrainers);
  for (int t = 0; t < kTrainers; ++t) {
    threads.emplace_back([&, t] {
      errors[static_cast<size_t>(t)] =
          error_of([&] {
            const c10::StreamGuard guard(rpc::side_stream(test_device(0)));
            const at::Tensor input = x.to(test_device(0));
            optim::DistributedOptimizer optimizer(cluster[0], net.remote_parameters(),
                                                  optim::Sgd{.lr = 1e-3});
            for (int step = 0; step < kSteps; ++step) {
              Context context(cluster[0]);
              autograd::backward(context, {loss_of(net.forward(input))});
              optimizer.step(context);
            }
          }).message;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) CHECK(error == "(no error)");
  const double after = loss_of(net.forward(x.to(test_device(0)))).item<double>();
  CHECK(std::isfinite(after));
  CHECK(after < before);
}

TEST_CASE("a row index out of the range of a table on a device is reported to the caller") {
  rpc::AgentOptions options;
  options.device = test_device(1);
  Cluster cluster(
      2,
      [](rpc::Agent& agent) {
        expose_modules(agent);
        nn::expose_module(agent, "table", [] { return torch::nn::Embedding(10, 3); });
        nn::expose_module(agent, "bags", [] {
          return torch::nn::Sequential(torch::nn::EmbeddingBag(10, 3), torch::nn::Linear(3, 2));
        });
      },
      options);
  for (const char* name : {"table", "bags"}) {
    const RemoteModule net(cluster[0], 1, name);
    for (const int64_t row : {int64_t{10}, int64_t{-1}}) {
      const at::Tensor rows = at::tensor({int64_t{2}, row}).view({1, 2});
      for (const at::Tensor& given : {rows, rows.to(test_device(1))}) {
        const base::Error error = error_of([&] { net.forward(given); });
        CHECK(error.kind == base::ErrorKind::kRemoteFailed);
        CHECK_THAT(error.message, ContainsSubstring("index " + std::to_string(row) +
                                                    " is out of range, the table has 10 rows"));
      }
    }
    CHECK(net.forward(at::tensor({int64_t{0}, int64_t{9}}).view({1, 2}))
              .isfinite()
              .all()
              .item<bool>());
  }
  cluster.shutdown();
  const scenario::EmbeddingTable table(10, 3, 0, 1, test_device(1).str());
  const at::Tensor bag = at::zeros({1}, at::kLong);
  CHECK_THROWS_WITH(table.lookup(at::full({2}, 10, at::kLong), bag),
                    ContainsSubstring("index 10 is out of range, the table has 10 rows"));
  const scenario::WordEmbedding words(10, 3, 1, test_device(1));
  CHECK_THROWS_WITH(words.lookup(at::full({2}, 12, at::kLong)),
                    ContainsSubstring("index 12 is out of range, the table has 10 rows"));
  CHECK(words.lookup(bag).isfinite().all().item<bool>());
}

}  // namespace distrain::testing
