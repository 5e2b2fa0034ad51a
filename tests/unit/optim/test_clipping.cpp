// Tests clipping if several participants train the same parameters.
#include <algorithm>
#include <chrono>
#include <future>
#include <limits>
#include <thread>

#include <ATen/Functions.h>
#include <torch/nn/utils/clip_grad.h>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "remote_layers.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;
using base::ErrorKind;
using optim::DistributedOptimizer;
using optim::Sharing;
using rpc::Agent;
using rpc::RRef;
using testing::Cluster;
using testing::error_of;
using testing::set_up_weights;
using testing::Weight;
using Mode = optim::Sharing::Mode;

namespace {

at::Tensor row(std::vector<double> values) { return at::tensor(values, at::kDouble); }

// Two weights, owned by rank 1 and rank 2. All participants are threads of rank 0.
struct Shared {
  explicit Shared(Cluster& cluster)
      : agent(cluster[0]),
        first(agent.remote_new<Weight>(1, at::zeros({2}, at::kDouble))),
        second(agent.remote_new<Weight>(2, at::zeros({2}, at::kDouble))),
        parameters{first.rpc_sync<&Weight::parameter>(), second.rpc_sync<&Weight::parameter>()} {}

  void step(DistributedOptimizer& optimizer, const at::Tensor& of_first,
            const at::Tensor& of_second, double max_norm, const at::Tensor& own = {},
            const at::Tensor& of_own = {}) const {
    autograd::Context context(agent);
    at::Tensor loss = first.rpc_sync<&Weight::forward>(of_first).sum() +
                      second.rpc_sync<&Weight::forward>(of_second).sum();
    if (own.defined()) loss = loss + (own * of_own).sum();
    autograd::backward(context, {loss});
    optimizer.step(context, max_norm);
  }

  Agent& agent;
  const RRef<Weight> first, second;
  const std::vector<RRef<at::Tensor>> parameters;
};

double scale(const std::vector<at::Tensor>& gradients, double max_norm) {
  return std::min(1.0, max_norm / (std::sqrt(optim::norm_squared(gradients)) + 1e-6));
}

}  // namespace

TEST_CASE("a participant that clips does not wait for one that has ended, in async and ssp mode") {
  const Mode mode = GENERATE(Mode::kAsync, Mode::kSsp);
  CAPTURE(static_cast<int>(mode));
  Cluster cluster(3, set_up_weights);
  const Shared shared(cluster);
  constexpr int kSteps = 3;
  DistributedOptimizer ended(shared.agent, shared.parameters, optim::Sgd{.lr = 1},
                             Sharing{mode, 2, 1, kSteps});
  const at::Tensor g1 = row({3, 0}), g2 = row({0, 4});
  auto steps = std::async(std::launch::async, [&] {
    return error_of([&] {
      DistributedOptimizer optimizer(shared.agent, shared.parameters, optim::Sgd{.lr = 1},
                                     Sharing{mode, 2, 0, kSteps});
      for (int i = 0; i < kSteps; ++i) shared.step(optimizer, g1, g2, 1);
    });
  });
  const bool done = steps.wait_for(60s) == std::future_status::ready;
  if (!done) cluster.kill(2);  // ends the steps that still wait
  CHECK(steps.get().message == "(no error)");
  REQUIRE(done);
  CHECK(at::allclose(shared.first.rpc_sync<&Weight::value>(), -kSteps * g1 / 5, 1e-6));
  CHECK(at::allclose(shared.second.rpc_sync<&Weight::value>(), -kSteps * g2 / 5, 1e-6));
}

TEST_CASE("in sync mode the means have one norm and one scale, whoever arrives last") {
  const int with_data = GENERATE(3, 2);  // the gradients of participants without data are 0
  const double last = with_data == 3 ? 1 : 0;
  const at::Tensor g1[3] = {row({3, 1}), row({-1, 7}), last * row({0.1, 0.2})};
  const at::Tensor g2[3] = {row({0.3, 2}), row({5, -2}), last * row({-0.7, 0})};
  const at::Tensor own_gradient = row({0.3, 0.7});  // equal for all participants, as under DDP
  const double max_norm = GENERATE(0.5, 100.0);
  at::Tensor l1 = at::zeros({2}, at::kDouble).requires_grad_(), l2 = l1.clone().detach(),
             l3 = l1.clone().detach();
  l2.requires_grad_();
  l3.requires_grad_();
  l1.mutable_grad() = (g1[0] + g1[1] + g1[2]) / with_data;
  l2.mutable_grad() = (g2[0] + g2[1] + g2[2]) / with_data;
  l3.mutable_grad() = own_gradient.clone();
  torch::nn::utils::clip_grad_norm_({l1, l2, l3}, max_norm);
  std::vector<int> order = {0, 1, 2};
  do {
    Cluster cluster(3, set_up_weights);
    const Shared shared(cluster);
    std::vector<at::Tensor> own;
    for (int p = 0; p < 3; ++p) own.push_back(at::zeros({2}, at::kDouble).requires_grad_());
    std::vector<std::thread> threads;
    for (const int p : order) {
      threads.emplace_back([&, p] {
        const auto at = static_cast<size_t>(p);
        DistributedOptimizer optimizer(shared.agent, shared.parameters, {own[at]},
                                       optim::Rule{optim::Sgd{.lr = 1}, {}, max_norm},
                                       Sharing{Mode::kSync, 3, p});
        optimizer.begin_steps(3.0 / with_data, p < with_data);
        shared.step(optimizer, g1[p], g2[p], max_norm, own[at], own_gradient);
      });
      if (threads.size() == 3) break;
      // To enforce the order of arrival, waits until both owners have this participant's norm.
      std::string wanted;
      for (int other = 0; other < 3; ++other) {
        const auto end = order.begin() + static_cast<std::ptrdiff_t>(threads.size());
        if (std::find(order.begin(), end, other) != end) continue;
        wanted += (wanted.empty() ? "" : ", ") + std::to_string(other);
      }
      for (const int owner : {1, 2}) {
        const auto has_come = [&] {
          const auto waits = cluster[owner].waits();
          return !waits.empty() &&
                 waits[0].what == "a gradient norm here that wants participant " + wanted;
        };
        while (!has_come()) std::this_thread::yield();
      }
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(at::allclose(shared.first.rpc_sync<&Weight::value>(), -l1.grad(), 1e-12));
    CHECK(at::allclose(shared.second.rpc_sync<&Weight::value>(), -l2.grad(), 1e-12));
    for (const at::Tensor& replica : own) {
      CHECK(at::allclose(replica.detach(), -l3.grad(), 1e-12));
      CHECK(at::equal(replica.detach(), own[0].detach()));
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("replicas stay equal though each participant's shared gradients have another norm") {
  const Mode mode = GENERATE(Mode::kAsync, Mode::kSsp);
  Cluster cluster(3, set_up_weights);
  const Shared shared(cluster);
  const at::Tensor g1[2] = {row({3, 1}), row({-1, 70})}, g2 = row({0, 0});
  const at::Tensor own_gradient = row({3, 4});
  at::Tensor own[2];
  at::Tensor expected = at::zeros({2}, at::kDouble);
  for (int p = 0; p < 2; ++p) {
    own[p] = at::zeros({2}, at::kDouble).requires_grad_();
    DistributedOptimizer optimizer(shared.agent, shared.parameters, {own[p]},
                                   optim::Rule{optim::Sgd{.lr = 1}, {}, 1}, Sharing{mode, 2, p, 1});
    shared.step(optimizer, g1[p], g2, 1, own[p], own_gradient);
    expected -= g1[p] * scale({g1[p], own_gradient}, 1);
  }
  CHECK(at::allclose(shared.first.rpc_sync<&Weight::value>(), expected, 1e-12));
  CHECK(at::allclose(own[0].detach(), -own_gradient * scale({own_gradient}, 1), 1e-12));
  CHECK(at::equal(own[0].detach(), own[1].detach()));
}

TEST_CASE("gradients without a finite norm are not clipped, and no parameter is updated") {
  const Mode mode = GENERATE(Mode::kAsync, Mode::kSync);
  const double bad =
      GENERATE(std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN());
  Cluster cluster(3, set_up_weights);
  const Shared shared(cluster);
  DistributedOptimizer optimizer(shared.agent, shared.parameters, optim::Sgd{.lr = 1},
                                 Sharing{mode, 1, 0});
  const base::Error error = error_of([&] {
    shared.step(optimizer, row({1, bad}), row({1, 1}), 0.5);
  });
  CHECK(error.kind == ErrorKind::kNotFinite);
  CHECK(at::equal(shared.first.rpc_sync<&Weight::value>(), row({0, 0})));
  CHECK(at::equal(shared.second.rpc_sync<&Weight::value>(), row({0, 0})));
}

TEST_CASE("in sync mode all participants must clip or none: a mix is an error") {
  const bool clips_first = GENERATE(true, false);
  Cluster cluster(3, set_up_weights);
  const Shared shared(cluster);
  base::Error errors[2];
  std::vector<std::thread> threads;
  for (int p = 0; p < 2; ++p) {
    threads.emplace_back([&, p] {
      DistributedOptimizer optimizer(shared.agent, shared.parameters, optim::Sgd{.lr = 1},
                                     Sharing{Mode::kSync, 2, p});
      const bool clips = (p == 0) == clips_first;
      errors[p] = error_of([&] {
        shared.step(optimizer, row({1, 1}), row({1, 1}), clips ? 1.0 : 0.0);
      });
    });
    while (p == 0 && (cluster[1].waits().empty() || cluster[2].waits().empty())) {
      std::this_thread::yield();
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const base::Error& error : errors) {
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(error.message.find("participants 0 and 1 step together, but only one of them clips its "
                             "gradients") == 0);
  }
}
