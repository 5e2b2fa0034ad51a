// Tests which values have changed after a failed step or a failed load of the optimizer's state.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "remote_layers.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using base::ErrorKind;
using optim::DistributedOptimizer;
using rpc::Agent;
using rpc::RRef;
using testing::Cluster;
using testing::error_of;
using testing::set_up_weights;
using testing::Weight;

namespace {

at::Tensor zeros_leaf() { return at::zeros({2, 2}, at::kDouble).requires_grad_(); }
at::Tensor ones() { return at::ones({2, 2}, at::kDouble); }
at::Tensor zeros() { return at::zeros({2, 2}, at::kDouble); }

// Returns a parameter that passes every check but cannot be updated, because torch has no
// arithmetic for its type.
at::Tensor leaf_without_arithmetic() {
  return at::zeros({2, 2}, at::kFloat8_e4m3fn).requires_grad_();
}

}  // namespace

TEST_CASE("an update that fails halfway reports the parameters that it has updated") {
  Cluster cluster(1, set_up_weights);
  const std::vector<at::Tensor> own = {zeros_leaf(), leaf_without_arithmetic(), zeros_leaf()};
  DistributedOptimizer optimizer(cluster[0], {}, own, optim::Rule{optim::Adagrad{.lr = 1}, {}, 0});
  autograd::Context context(cluster[0]);
  for (const at::Tensor& parameter : own)
    context.set_gradient(parameter, ones().to(parameter.dtype()));
  const base::Error error = error_of([&] { optimizer.step(context); });
  CHECK(error.message.find("the update of rank 0's parameters is half made: it failed at parameter "
                           "1 of 3, those before it are updated: ") == 0);
  CHECK_FALSE(at::equal(own[0].detach(), zeros()));
  CHECK(at::equal(own[2].detach(), zeros()));
}

TEST_CASE("if one of several owners fails, the others' updates remain, and the error names them") {
  Cluster cluster(3, set_up_weights);
  Agent& agent = cluster[0];
  const auto first = agent.remote_new<Weight>(1, zeros()),
             second = agent.remote_new<Weight>(2, zeros());
  const at::Tensor own = zeros_leaf();
  DistributedOptimizer optimizer(
      agent, {first.rpc_sync<&Weight::parameter>(), second.rpc_sync<&Weight::parameter>()}, {own},
      optim::Rule{optim::Sgd{.lr = 1, .momentum = 0.9}, {}, 0});
  autograd::Context context(agent);
  autograd::backward(context, {first.rpc_sync<&Weight::rows>(at::zeros({1}, at::kLong)).sum() +
                               second.rpc_sync<&Weight::forward>(ones()).sum() + own.sum()});
  const base::Error error = error_of([&] { optimizer.step(context); });
  CHECK(error.kind == ErrorKind::kInvalid);
  CHECK(error.rank == 1);
  CHECK(
      error.message.find("sgd with momentum cannot take sparse gradients; the step failed on rank "
                         "1, is made on rank 2, rank 0 (its own)") != std::string::npos);
  CHECK(at::equal(first.rpc_sync<&Weight::value>(), zeros()));
  CHECK(at::equal(second.rpc_sync<&Weight::value>(), -ones()));
  CHECK(at::equal(own.detach(), -ones()));
}

TEST_CASE("a state with a part that does not fit is not loaded at all") {
  Cluster cluster(1, set_up_weights);
  const std::vector<at::Tensor> own = {zeros_leaf(), zeros_leaf()};
  DistributedOptimizer optimizer(cluster[0], {}, own, optim::Rule{optim::Adagrad{.lr = 1}, {}, 0});
  {
    autograd::Context context(cluster[0]);
    autograd::backward(context, {(own[0] + own[1]).sum()});
    optimizer.step(context);
  }
  auto state = optimizer.state();
  for (auto& of_parameter : state) of_parameter["sum"].fill_(7);
  state[1]["sum"] = at::zeros({5}, at::kDouble);
  CHECK(error_of([&] { optimizer.load_state(state); }).kind == ErrorKind::kBadData);
  CHECK(at::equal(optimizer.state()[0].at("sum"), ones()));
}

TEST_CASE("one context's gradient may be sparse and another's dense") {
  const bool sparse_first = GENERATE(true, false);
  Cluster cluster(2, set_up_weights);
  Agent& agent = cluster[0];
  const auto remote = agent.remote_new<Weight>(1, zeros());
  const at::Tensor own = zeros_leaf();
  DistributedOptimizer optimizer(agent, {remote.rpc_sync<&Weight::parameter>()}, {own},
                                 optim::Rule{optim::Sgd{.lr = 1}, {}, 0});
  std::vector<uint64_t> ids;
  std::vector<std::unique_ptr<autograd::Context>> contexts;
  const at::Tensor second_row = at::ones({1}, at::kLong);
  for (const bool sparse : {sparse_first, !sparse_first}) {
    contexts.push_back(std::make_unique<autograd::Context>(agent));
    const at::Tensor loss = sparse ? remote.rpc_sync<&Weight::rows>(second_row).sum() +
                                         at::embedding(own, second_row, -1, false, true).sum()
                                   : remote.rpc_sync<&Weight::forward>(ones()).sum() + own.sum();
    autograd::backward(*contexts.back(), {loss});
    ids.push_back(contexts.back()->id());
  }
  optimizer.step(ids);
  const at::Tensor expected = at::tensor({-1.0, -1.0, -2.0, -2.0}, at::kDouble).view({2, 2});
  CAPTURE(own);
  CHECK(at::equal(remote.rpc_sync<&Weight::value>(), expected));
  CHECK(at::equal(own.detach(), expected));
  while (!contexts.empty()) contexts.pop_back();
}
