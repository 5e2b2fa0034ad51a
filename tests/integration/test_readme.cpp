// The examples of README.md, "The library", run by two agents in one process.
#include <ATen/Functions.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>

#include "distrain/autograd/context.h"
#include "distrain/nn/module.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/agent.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;

namespace {

struct Scale {
  using Constructor = Scale(double start);
  explicit Scale(double start) : weight(at::full({3}, start).requires_grad_()) {}
  at::Tensor forward(at::Tensor x) { return x * weight; }
  rpc::RRef<at::Tensor> parameter(rpc::CallContext& call) { return call.agent.make_rref(weight); }
  at::Tensor weight;
};

}  // namespace

TEST_CASE("the README's example learns") {
  testing::Cluster cluster(2, [](rpc::Agent& agent) {
    autograd::install(agent);
    optim::install(agent);
    agent.expose_class<Scale>("Scale");
    agent.expose<&Scale::forward>("Scale.forward");
    agent.expose<&Scale::parameter>("Scale.parameter");
  });
  rpc::Agent& agent = cluster[0];
  {
    rpc::RRef<Scale> scale = agent.remote_new<Scale>("w1", 1.0);
    optim::DistributedOptimizer optimizer(agent, {scale.rpc_sync<&Scale::parameter>()},
                                          optim::Sgd{.lr = 0.1});
    for (int step = 0; step < 100; ++step) {
      autograd::Context context(agent);
      at::Tensor y = scale.rpc_sync<&Scale::forward>(at::ones({3}));
      autograd::backward(context, {(y - 2).pow(2).sum()});
      optimizer.step(context);
    }
    const at::Tensor weight = scale.rpc_sync<&Scale::parameter>().to_here();
    CHECK(at::allclose(weight.detach(), at::full({3}, 2.0), 1e-4, 1e-4));
  }
  cluster.shutdown();
}

TEST_CASE("the README's module learns") {
  testing::Cluster cluster(2, [](rpc::Agent& agent) {
    autograd::install(agent);
    optim::install(agent);
    if (agent.rank() == 1) {
      nn::expose_module(agent, "net", [](int64_t inputs) {
        return torch::nn::Sequential(torch::nn::Linear(inputs, 8), torch::nn::Tanh(),
                                     torch::nn::Linear(8, 1));
      });
    } else {
      nn::install(agent);
    }
  });
  rpc::Agent& agent = cluster[0];
  {
    nn::RemoteModule net(agent, "w1", "net", int64_t{3});
    optim::DistributedOptimizer optimizer(agent, net.remote_parameters(), optim::AdamW{.lr = 0.02});
    const at::Tensor x = at::ones({4, 3});
    double loss = 1e9;
    for (int step = 0; step < 300; ++step) {
      autograd::Context context(agent);
      const at::Tensor error = (net.forward(x) - 2).pow(2).mean();
      autograd::backward(context, {error});
      optimizer.step(context);
      loss = error.item<double>();
    }
    CHECK(loss < 0.01);
  }
  cluster.shutdown();
}
