// Tests servers that change parameters by functions of the test, and parameters without a gradient.
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/optim/sgd.h>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "remote_layers.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using rpc::Agent;
using rpc::RRef;
using testing::Cluster;
using testing::Weight;

// A namespace of its own, because a unity build joins this file with others.
namespace batch_update {

namespace {

constexpr int kTrainers = 3, kBatches = 4;

at::Tensor gradient_at(const at::Tensor& weight, int trainer, int batch) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(10 * trainer + batch));
  const at::Tensor w = weight.detach().clone().requires_grad_();
  at::randn({20, 100}, generator).matmul(w).abs().mean().backward();
  return w.grad();
}

/// Updates its model when each trainer has sent a gradient, and then answers all of them.
class BatchServer {
 public:
  using Constructor = BatchServer(int trainers);
  explicit BatchServer(int trainers) : trainers_(trainers) {}
  at::Tensor model() {
    std::lock_guard lock(mutex_);
    return model_.detach().clone();
  }
  base::Future<at::Tensor> update_and_fetch(const at::Tensor& gradient) {
    std::vector<base::Promise<at::Tensor>> waiting;
    base::Future<at::Tensor> updated;
    at::Tensor model;
    {
      std::lock_guard lock(mutex_);
      at::Tensor& sum = model_.mutable_grad();
      sum = sum.defined() ? sum + gradient : gradient;
      updated = waiting_.emplace_back().future();
      if (static_cast<int>(waiting_.size()) < trainers_) return updated;
      sum = sum / trainers_;
      optimizer_.step();
      optimizer_.zero_grad();
      waiting.swap(waiting_);
      model = model_.detach().clone();
    }
    for (auto& promise : waiting) promise.set(model);
    return updated;
  }

 private:
  const int trainers_;
  std::mutex mutex_;
  at::Tensor model_ = at::ones({100, 30}).requires_grad_();
  torch::optim::SGD optimizer_{{model_}, torch::optim::SGDOptions(0.001).momentum(0.9)};
  std::vector<base::Promise<at::Tensor>> waiting_;
};

at::Tensor train(rpc::CallContext& call, const RRef<BatchServer>& server) {
  at::Tensor model = server.rpc_sync<&BatchServer::model>();
  for (int batch = 0; batch < kBatches; ++batch) {
    model = server.rpc_sync<&BatchServer::update_and_fetch>(
        gradient_at(model, call.agent.rank(), batch));
  }
  return model;
}

}  // namespace

TEST_CASE("a function may answer all trainers when the last of them has called it") {
  Cluster cluster(kTrainers + 1, [](Agent& agent) {
    agent.expose_class<BatchServer>("BatchServer");
    agent.expose<&BatchServer::model>("BatchServer.model");
    agent.expose<&BatchServer::update_and_fetch>("BatchServer.update_and_fetch");
    agent.expose<&train>("train");
  });
  const RRef<BatchServer> server = cluster[0].make_rref(std::make_shared<BatchServer>(kTrainers));
  std::vector<base::Future<at::Tensor>> trained;
  for (int rank = 1; rank <= kTrainers; ++rank) {
    trained.push_back(cluster[0].rpc_async<&train>(rank, server));
  }
  const at::Tensor alone = at::ones({100, 30}).requires_grad_();
  torch::optim::SGD optimizer({alone}, torch::optim::SGDOptions(0.001).momentum(0.9));
  for (int batch = 0; batch < kBatches; ++batch) {
    at::Tensor sum = at::zeros({100, 30});
    for (int rank = 1; rank <= kTrainers; ++rank) sum += gradient_at(alone, rank, batch);
    alone.mutable_grad() = sum / kTrainers;
    optimizer.step();
  }
  for (auto& model : trained) CHECK(at::allclose(model.wait(), alone, 1e-5, 1e-6));
}

TEST_CASE("a parameter without a gradient stays as it is, with every rule") {
  Cluster cluster(3, testing::set_up_weights);
  Agent& agent = cluster[0];
  struct Case {
    optim::OptimizerOptions options;
    double updated;  // what PyTorch 2.11 makes of a parameter 1 with the gradient 9
  };
  const Case each =
      GENERATE(Case{optim::Sgd{.lr = 0.05}, 0.55}, Case{optim::Adagrad{}, 0.9900000000001111},
               Case{optim::Adam{}, 0.9990000000011111}, Case{optim::AdamW{}, 0.9989900000011112},
               Case{optim::RmsProp{.lr = 0.05}, 0.5000000055555557},
               Case{optim::Adadelta{.rho = 0.95}, 0.9955278645971158},
               Case{optim::Adamax{}, 0.9980000000022222}, Case{optim::Rprop{.lr = 0.05}, 0.95});
  CAPTURE(each.options.index());
  const at::Tensor ones = at::ones({3, 3}, at::kDouble);
  const auto make = [&](int owner) { return agent.remote_new<Weight>(owner, ones); };
  const RRef<Weight> used = make(1), frozen = make(2), unused = make(2);
  frozen.rpc_sync<&Weight::freeze>();
  optim::DistributedOptimizer optimizer(
      agent,
      {used.rpc_sync<&Weight::parameter>(), frozen.rpc_sync<&Weight::parameter>(),
       unused.rpc_sync<&Weight::parameter>()},
      each.options);
  autograd::Context context(agent);
  const at::Tensor hidden = used.rpc_sync<&Weight::forward>(ones * 9);
  autograd::backward(context, {frozen.rpc_sync<&Weight::forward>(hidden).sum()});
  optimizer.step(context);
  CHECK(at::allclose(used.rpc_sync<&Weight::value>(), ones * each.updated, 1e-14, 1e-14));
  CHECK(at::equal(frozen.rpc_sync<&Weight::value>(), ones));
  CHECK(at::equal(unused.rpc_sync<&Weight::value>(), ones));
}

}  // namespace batch_update
