// Tests parameter groups that span several ranks, and parameters that several ranks train,
// including the rank that owns them.
#include <condition_variable>
#include <mutex>
#include <thread>

#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/optim/learning_rate_schedule.h"
#include "remote_layers.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using base::ErrorKind;
using optim::DistributedOptimizer;
using optim::OptimizerOptions;
using optim::ParameterGroup;
using optim::Sharing;
using rpc::Agent;
using rpc::RRef;
using testing::backward_of;
using testing::Cluster;
using testing::error_of;
using testing::Layer;
using Mode = optim::Sharing::Mode;

namespace {

// The layer that a rank owns and that all ranks train.
struct Home {
  std::shared_ptr<Layer> layer = std::make_shared<Layer>(at::zeros({2, 1}, at::kDouble));
};
RRef<Layer> home_layer(rpc::CallContext& context) {
  return context.agent.make_rref(context.agent.local<Home>().layer);
}
at::Tensor value_on(Agent& agent) { return agent.local<Home>().layer->value(); }

void set_up_homes(Agent& agent) {
  agent.provide(std::make_shared<Home>());
  agent.expose<&home_layer>("home_layer");
  autograd::install(agent);
  optim::install(agent);
  testing::expose_layers(agent);
}

at::Tensor leaf(const at::Tensor& value) { return value.clone().requires_grad_(); }

// Runs a backward pass with gradients of `scale` and makes one step of a participant.
void step(Agent& agent, DistributedOptimizer& optimizer, const RRef<Layer>& layer, double scale,
          double max_norm = 0) {
  autograd::Context context(agent);
  backward_of(context, layer, scale);
  optimizer.step(context, max_norm);
}

}  // namespace

TEST_CASE("groups over two owners and local parameters equal torch's parameter groups") {
  at::manual_seed(3);
  const at::Tensor w1 = at::rand({4, 3}, at::kDouble), w2 = at::rand({3, 2}, at::kDouble),
                   w3 = at::rand({2}, at::kDouble);
  const std::vector<at::Tensor> local = {leaf(w1), leaf(w2), leaf(w3)};
  using torch::optim::AdamWOptions;
  // The weights have weight decay. The bias has none, and a different learning rate.
  std::vector<torch::optim::OptimizerParamGroup> reference_groups;
  reference_groups.emplace_back(
      std::vector<at::Tensor>{local[0], local[1]},
      std::make_unique<AdamWOptions>(AdamWOptions(0.1).weight_decay(0.3)));
  reference_groups.emplace_back(
      std::vector<at::Tensor>{local[2]},
      std::make_unique<AdamWOptions>(AdamWOptions(0.02).weight_decay(0).betas({0.8, 0.99})));
  torch::optim::AdamW reference(reference_groups);

  Cluster cluster(3, set_up_homes);
  {
    Agent& agent = cluster[0];
    const auto first = agent.remote_new<Layer>(1, w1);
    const auto second = agent.remote_new<Layer>(2, w2);
    const at::Tensor bias = leaf(w3);
    const optim::AdamW decayed{.lr = 0.1, .weight_decay = 0.3};
    const optim::AdamW plain{.lr = 0.02, .beta1 = 0.8, .beta2 = 0.99, .weight_decay = 0};
    const std::vector<ParameterGroup> groups = {
        {{first.rpc_sync<&Layer::parameter>(), second.rpc_sync<&Layer::parameter>()}, {}, decayed},
        {{}, {}, optim::Sgd{}},
        {{}, {bias}, plain}};
    DistributedOptimizer optimizer(agent, groups);
    const optim::LearningRateSchedule schedule =
        optim::LearningRateSchedule::parse("warmup:4+cosine:20,0.1");
    for (int64_t step = 0; step < 20; ++step) {
      const double factor = schedule.factor(step, 0);
      reference.param_groups()[0].options().set_lr(0.1 * factor);
      reference.param_groups()[1].options().set_lr(0.02 * factor);
      optimizer.set_lr_factor(factor);
      const at::Tensor x = at::rand({5, 4}, at::kDouble);
      reference.zero_grad();
      ((x.matmul(local[0]).tanh().matmul(local[1]) + local[2]).tanh()).pow(2).sum().backward();
      reference.step();

      autograd::Context context(agent);
      const at::Tensor hidden = first.rpc_sync<&Layer::forward>(x).tanh();
      const at::Tensor y = second.rpc_sync<&Layer::forward>(hidden) + bias;
      autograd::backward(context, {y.tanh().pow(2).sum()});
      optimizer.step(context);
    }
    CHECK(at::allclose(first.rpc_sync<&Layer::value>(), local[0].detach(), 1e-12, 1e-12));
    CHECK(at::allclose(second.rpc_sync<&Layer::value>(), local[1].detach(), 1e-12, 1e-12));
    CHECK(at::allclose(bias.detach(), local[2].detach(), 1e-12, 1e-12));

    // The state is ordered by group.
    const auto state = optimizer.state();
    REQUIRE(state.size() == 3);
    CHECK(state[0].at("exp_avg").sizes() == w1.sizes());
    CHECK(state[1].at("exp_avg").sizes() == w2.sizes());
    CHECK(state[2].at("exp_avg").sizes() == w3.sizes());
    REQUIRE(optimizer.own_state().size() == 1);
    CHECK(at::equal(optimizer.own_state()[0].at("exp_avg"), state[2].at("exp_avg")));
    optimizer.load_state(state);
    CHECK(error_of([&] { optimizer.load_state({state[0]}); }).kind == ErrorKind::kBadData);
    CHECK(error_of([&] {
            optimizer.load_state({state[1], state[0], state[2]});
          }).kind == ErrorKind::kBadData);
  }
  cluster.shutdown();
}

TEST_CASE("two groups of one owner may have rules of different kinds") {
  Cluster cluster(2, set_up_homes);
  {
    Agent& agent = cluster[0];
    const at::Tensor zeros = at::zeros({2, 1}, at::kDouble);
    const auto fast = agent.remote_new<Layer>(1, zeros), slow = agent.remote_new<Layer>(1, zeros);
    const auto one = fast.rpc_sync<&Layer::parameter>(), other = slow.rpc_sync<&Layer::parameter>();
    DistributedOptimizer optimizer(
        agent, {ParameterGroup{{one}, {}, optim::Sgd{.lr = 1}},
                ParameterGroup{{other}, {}, optim::Sgd{.lr = 0.25, .momentum = 0.5}}});
    const auto both = [&] {
      autograd::Context context(agent);
      const at::Tensor x = at::ones({1, 2}, at::kDouble);
      autograd::backward(context, {fast.rpc_sync<&Layer::forward>(x).sum() +
                                   slow.rpc_sync<&Layer::forward>(x).sum()});
      optimizer.step(context);
    };
    both();
    optimizer.set_lr_factor(0.5);
    both();
    // `fast` sums rate · step: 1 · 1 + 1/2 · 1. `slow` has momentum 1/2: 1/4 · 1 + 1/8 · 3/2.
    CHECK(at::equal(fast.rpc_sync<&Layer::value>(), at::full({2, 1}, -1.5, at::kDouble)));
    CHECK(at::equal(slow.rpc_sync<&Layer::value>(), at::full({2, 1}, -0.4375, at::kDouble)));

    // A DistributedOptimizer that is created later must have the same groups.
    const auto attach = [&](const std::vector<ParameterGroup>& groups) {
      return error_of([&] { DistributedOptimizer again(agent, groups); });
    };
    const OptimizerOptions first = optim::Sgd{.lr = 1};
    const OptimizerOptions second = optim::Sgd{.lr = 0.25, .momentum = 0.5};
    // Additional empty groups make no difference.
    CHECK(attach({{{}, {}, optim::Adam{}}, {{one}, {}, first}, {{other}, {}, second}}).message ==
          "(no error)");
    CHECK(attach({{{one}, {}, first}, {{other}, {}, first}}).message ==
          "these parameters have an optimizer already, with other options");
    CHECK(attach({{{one, other}, {}, first}}).message ==
          "these parameters have an optimizer already, with other groups");
  }
  cluster.shutdown();
}

TEST_CASE("a repeated parameter is refused, naming the groups") {
  Cluster cluster(2, set_up_homes);
  {
    Agent& agent = cluster[0];
    const at::Tensor here = leaf(at::zeros({2, 1}));
    const auto layer = agent.remote_new<Layer>(1, here.detach());
    const auto there = layer.rpc_sync<&Layer::parameter>();
    const auto again = layer.rpc_sync<&Layer::parameter>();  // another RRef to the same parameter
    const OptimizerOptions sgd = optim::Sgd{};
    const auto refused = [&](const std::vector<ParameterGroup>& groups) {
      const base::Error error = error_of([&] { DistributedOptimizer optimizer(agent, groups); });
      CHECK(error.kind == ErrorKind::kInvalid);
      return error.message;
    };
    CHECK(refused({{{there}, {}, sgd}, {{}, {}, sgd}, {{again}, {}, optim::Adam{}}}) ==
          "a parameter of group 2 is in group 0, too");
    CHECK(refused({{{there, again}, {}, sgd}}) ==
          "two of the parameters of group 0 share their memory: give a tied one once");
    CHECK(refused({{{}, {}, sgd}, {{}, {here}, sgd}, {{}, {here}, sgd}}) ==
          "a parameter of group 2 is in group 1, too");
    // A shared parameter of this rank may not be given as a local one, too.
    CHECK(refused({{{agent.make_rref(here)}, {}, sgd}, {{}, {here}, sgd}}) ==
          "a parameter of group 1 is in group 0, too");
    CHECK(refused({{{}, {here, here.view({1, 2})}, sgd}}) ==
          "two of the parameters of group 0 share their memory: give a tied one once");
    CHECK(refused({{{}, {at::Tensor()}, sgd}}) == "a parameter of group 0 is an undefined tensor");
    CHECK(refused({{{}, {}, optim::Sgd{.lr = -1}}}) == "sgd: lr cannot be -1.000000");
    // A refused constructor does not claim its parameters, so a new optimizer can take them.
    DistributedOptimizer optimizer(agent, {ParameterGroup{{there}, {here}, sgd}});
    DistributedOptimizer nothing(agent, std::vector<ParameterGroup>{});
    autograd::Context context(agent);
    CHECK(nothing.step(context) == 0);
  }
  cluster.shutdown();
}

TEST_CASE("a replica of DistributedDataParallel is not a shared parameter") {
  struct Replica final : autograd::LeafHook {
    void operator()(const at::Tensor&) override {}
    void on_context_gradient(const autograd::ContextRef&, const at::Tensor&) override {}
  };
  Cluster cluster(1, set_up_homes);
  const at::Tensor parameter = at::zeros({2}).requires_grad_();
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Replica>());
  const base::Error error = error_of([&] {
    DistributedOptimizer refused(cluster[0], {cluster[0].make_rref(parameter)},
                                 optim::Sgd{.lr = 0.1});
  });
  CHECK(error.kind == ErrorKind::kInvalid);
  CHECK(error.message.find("goes among the rank's own parameters") != std::string::npos);
  const DistributedOptimizer taken(cluster[0], {}, {parameter},
                                   optim::Rule{optim::Sgd{.lr = 0.1}, {}, 0});
  cluster.shutdown();
}

TEST_CASE("a rank trains its own parameters together with another rank: async") {
  Cluster cluster(2, set_up_homes);
  {
    constexpr int kSteps = 25;
    cluster.on_all([&](Agent& agent) {
      const auto layer = agent.rpc_sync<&home_layer>(0);
      DistributedOptimizer optimizer(agent, {layer.rpc_sync<&Layer::parameter>()},
                                     optim::Sgd{.lr = 0.5}, Sharing{Mode::kAsync, 2, agent.rank()});
      for (int i = 0; i < kSteps; ++i) {
        // Each participant has its own learning rate factor.
        optimizer.set_lr_factor(agent.rank() == 0 ? 1 : 0.5);
        step(agent, optimizer, layer, 2);
      }
    });
    CHECK(at::equal(value_on(cluster[0]), at::full({2, 1}, -1.5 * kSteps, at::kDouble)));
  }
  cluster.shutdown();
}

TEST_CASE("a rank trains its own parameters together with another rank: sync, clipped or not") {
  // Each rank also has local parameters, which only its own steps update.
  const double max_norm = GENERATE(0.0, 0.5);
  Cluster cluster(2, set_up_homes);
  {
    constexpr int kSteps = 10;
    std::vector<at::Tensor> own = {leaf(at::zeros({3}, at::kDouble)),
                                   leaf(at::zeros({3}, at::kDouble))};
    cluster.on_all([&](Agent& agent) {
      const auto layer = agent.rpc_sync<&home_layer>(0);
      const at::Tensor& mine = own[static_cast<size_t>(agent.rank())];
      DistributedOptimizer optimizer(agent, {layer.rpc_sync<&Layer::parameter>()}, {mine},
                                     optim::Rule{optim::Sgd{.lr = 1}, {}, max_norm},
                                     Sharing{Mode::kSync, 2, agent.rank()});
      for (int i = 0; i < kSteps; ++i) {
        optimizer.set_lr_factor(1.0 / (i + 1));
        autograd::Context context(agent);
        const at::Tensor x = at::full({1, 2}, agent.rank() + 1.0, at::kDouble);
        // The owner needs no remote call.
        const at::Tensor y =
            layer.is_owner() ? layer.local_value().forward(x) : layer.rpc_sync<&Layer::forward>(x);
        autograd::backward(context, {y.sum() + mine.sum() * 2});
        optimizer.step(context);
      }
    });
    // Clipping sees two shared elements with the mean gradient 1.5, and three local ones with 2.
    const double norm = std::sqrt(2 * 1.5 * 1.5 + 3 * 4);
    const double scale = max_norm > 0 ? max_norm / (norm + 1e-6) : 1;
    double rates = 0;
    for (int i = 0; i < kSteps; ++i) rates += 1.0 / (i + 1);
    CHECK(at::allclose(value_on(cluster[0]), at::full({2, 1}, -1.5 * scale * rates, at::kDouble),
                       1e-12));
    for (const at::Tensor& mine : own) {
      CHECK(at::allclose(mine.detach(), at::full({3}, -2 * scale * rates, at::kDouble), 1e-12));
    }
  }
  cluster.shutdown();
}

TEST_CASE("a rank trains its own parameters together with another rank: ssp limits the lead") {
  const int fast = GENERATE(0, 1);  // the faster rank; rank 0 owns the layer
  CAPTURE(fast);
  Cluster cluster(2, set_up_homes);
  {
    constexpr int kSteps = 6;
    constexpr int64_t kStaleness = 2;
    std::mutex mutex;
    std::condition_variable changed;
    int begun = 0;       // begun steps of the fast rank
    int64_t slow = 0;    // steps of the slow rank, counted before they run
    bool ahead = false;  // true if the fast rank exceeded the limit
    cluster.on_all([&](Agent& agent) {
      const auto layer = agent.rpc_sync<&home_layer>(0);
      DistributedOptimizer optimizer(agent, {layer.rpc_sync<&Layer::parameter>()},
                                     optim::Sgd{.lr = 1},
                                     Sharing{Mode::kSsp, 2, agent.rank(), kStaleness});
      for (int i = 0; i < kSteps; ++i) {
        {
          std::unique_lock lock(mutex);
          if (agent.rank() == fast) {
            ++begun;
            ahead = ahead || i > slow + kStaleness;
            changed.notify_all();
          } else {
            // Waits until the fast rank is as far ahead as allowed.
            const int limit = std::min<int>(kSteps, i + static_cast<int>(kStaleness) + 1);
            changed.wait(lock, [&] { return begun >= limit; });
            ++slow;  // before step(), because step() may release the fast rank
          }
        }
        step(agent, optimizer, layer, 1);
      }
    });
    CHECK_FALSE(ahead);
    CHECK(at::equal(value_on(cluster[0]), at::full({2, 1}, -2.0 * kSteps, at::kDouble)));
  }
  cluster.shutdown();
}

TEST_CASE("in sync mode all participants have the same learning rate") {
  Cluster cluster(2, set_up_homes);
  {
    std::vector<base::Error> errors(2);
    cluster.on_all([&](Agent& agent) {
      const auto layer = agent.rpc_sync<&home_layer>(0);
      DistributedOptimizer optimizer(agent, {layer.rpc_sync<&Layer::parameter>()},
                                     optim::Sgd{.lr = 1}, Sharing{Mode::kSync, 2, agent.rank()});
      optimizer.set_lr_factor(agent.rank() == 0 ? 1 : 0.5);
      errors[static_cast<size_t>(agent.rank())] =
          error_of([&] { step(agent, optimizer, layer, 1); });
    });
    for (const base::Error& error : errors) {
      CHECK(error.kind == ErrorKind::kInvalid);
      CHECK(error.message ==
            "participants 0 and 1 step with different learning rates: 1 and 0.5 of the groups' "
            "own");
    }
    CHECK(at::equal(value_on(cluster[0]), at::zeros({2, 1}, at::kDouble)));
  }
  cluster.shutdown();
}

TEST_CASE("a wait for a lost rank fails with that rank's error, on the owner, too") {
  const auto [mode, max_norm] = GENERATE(std::pair(Mode::kSync, 0.0), std::pair(Mode::kSync, 1.0),
                                         std::pair(Mode::kSsp, 0.0), std::pair(Mode::kSsp, 1.0));
  CAPTURE(static_cast<int>(mode), max_norm);
  Cluster cluster(3, set_up_homes);
  std::vector<base::Error> errors(2);
  std::vector<std::thread> threads;
  std::atomic<int> attached{0};
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank, mode = mode, max_norm = max_norm] {
      Agent& agent = cluster[rank];
      const auto layer = agent.rpc_sync<&home_layer>(0);
      DistributedOptimizer optimizer(agent, {layer.rpc_sync<&Layer::parameter>()},
                                     optim::Sgd{.lr = 1}, Sharing{mode, 3, rank, 0});
      ++attached;
      errors[static_cast<size_t>(rank)] =
          error_of([&] { step(agent, optimizer, layer, 1, max_norm); });
    });
  }
  while (attached < 2) std::this_thread::yield();
  cluster.kill(2);  // the third participant never steps
  for (std::thread& thread : threads) thread.join();
  for (const base::Error& error : errors) {
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == 2);
  }
}
