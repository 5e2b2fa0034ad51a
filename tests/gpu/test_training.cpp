// ctest: timeout=120
// Compares a pass over two ranks on a GPU with the same pass on the CPU in one process.
#include <ATen/ATen.h>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "gpu/gpu.h"
#include "support/catch.h"

using namespace distrain;
using rpc::Agent;
using rpc::CallContext;
using rpc::RRef;
using testing::gpu;
using testing::gpu_cluster;
using testing::keep_busy;

namespace {

at::Tensor leaf(at::Tensor value, c10::Device device) {
  return value.detach()
      .to(device, at::kDouble, /*non_blocking=*/false, /*copy=*/true)
      .requires_grad_();
}

/// A table with sparse gradients, followed by a dense layer, on the device of its rank.
struct Model {
  using Constructor = Model(at::Tensor table, at::Tensor weight);
  Model(at::Tensor table, at::Tensor weight)
      : table(leaf(table, table.device())), weight(leaf(weight, weight.device())) {}
  at::Tensor forward(at::Tensor indices) {
    keep_busy(indices.device());
    return at::embedding(table, indices, -1, false, /*sparse=*/true).matmul(weight).tanh();
  }
  RRef<at::Tensor> parameter(CallContext& call, int which) {
    return call.agent.make_rref(which == 0 ? table : weight);
  }
  at::Tensor value(int which) { return which == 0 ? table.detach() : weight.detach(); }
  at::Tensor table, weight;
};

void expose_nets(Agent& agent) {
  autograd::install(agent);
  optim::install(agent);
  agent.expose_class<Model>("Model");
  agent.expose<&Model::forward>("Model.forward");
  agent.expose<&Model::parameter>("Model.parameter");
  agent.expose<&Model::value>("Model.value");
}

struct Result {
  std::vector<double> losses;
  at::Tensor table, weight, local;
};

/// Trains the model, which is on rank 1, and a layer on rank 0 that takes the model's output.
Result train(testing::Cluster& cluster, c10::Device device,
             const optim::OptimizerOptions& options) {
  at::manual_seed(7);
  const at::Tensor table = at::rand({50, 8}, at::kDouble);
  const at::Tensor weight = at::rand({8, 6}, at::kDouble);
  const at::Tensor local = leaf(at::rand({6, 3}, at::kDouble), device);
  const at::Tensor indices = at::randint(50, {20, 16}).to(device);
  Agent& agent = cluster[0];
  Result result;
  {
    RRef<Model> model = agent.remote_new<Model>("w1", table.to(device), weight.to(device));
    optim::DistributedOptimizer optimizer(
        agent,
        {model.rpc_sync<&Model::parameter>(0), model.rpc_sync<&Model::parameter>(1),
         agent.make_rref(local)},
        options);
    for (int step = 0; step < 20; ++step) {
      autograd::Context context(agent);
      const at::Tensor out = model.rpc_sync<&Model::forward>(indices[step]);
      REQUIRE(out.device() == device);
      const at::Tensor loss = (out.matmul(local) - 1).pow(2).mean();
      autograd::backward(context, {loss});
      optimizer.step(context);
      result.losses.push_back(loss.item<double>());
    }
    result.table = model.rpc_sync<&Model::value>(0).cpu();
    result.weight = model.rpc_sync<&Model::value>(1).cpu();
    result.local = local.detach().cpu();
  }
  return result;
}

}  // namespace

TEST_CASE("twenty steps of a model on two ranks equal the CPU's", "[memcheck]") {
  const std::vector<optim::OptimizerOptions> optimizers = {optim::Sgd{.lr = 0.1},
                                                           optim::Adagrad{.lr = 0.1}};
  auto on_gpu = gpu_cluster(2, expose_nets);
  testing::Cluster on_cpu(2, expose_nets);
  for (const optim::OptimizerOptions& options : optimizers) {
    const Result expected = train(on_cpu, c10::kCPU, options);
    const Result actual = train(on_gpu, gpu(), options);
    REQUIRE(expected.losses.size() == actual.losses.size());
    for (size_t i = 0; i < expected.losses.size(); ++i) {
      CHECK(actual.losses[i] == Approx(expected.losses[i]).epsilon(1e-6));
    }
    CHECK(expected.losses.back() < expected.losses.front());
    CHECK(at::allclose(actual.table, expected.table, 1e-6, 1e-6));
    CHECK(at::allclose(actual.weight, expected.weight, 1e-6, 1e-6));
    CHECK(at::allclose(actual.local, expected.local, 1e-6, 1e-6));
  }
  on_gpu.shutdown();
  on_cpu.shutdown();
}
