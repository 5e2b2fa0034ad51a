#include <algorithm>
#include <latch>
#include <thread>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>

#include "agent_core.h"
#include "distrain/autograd/context.h"
#include "distrain/autograd/parameter_versions.h"
#include "distrain/base/thread_state.h"
#include "distrain/optim/distributed_optimizer.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;
using optim::DistributedOptimizer;
using optim::Sharing;
using rpc::Agent;
using rpc::RRef;
using testing::Cluster;
using testing::error_of;

namespace {

// Computes (tanh(x · w) · wᵀ)². The backward pass needs w: a version of w or the parameter itself.
struct SquareLayer {
  using Constructor = SquareLayer(at::Tensor weight);
  explicit SquareLayer(at::Tensor w) : weight(w.clone().requires_grad_()) {}
  at::Tensor forward(rpc::CallContext& call, at::Tensor x) {
    return of(x, autograd::current_versions(call.agent, {weight})[0]);
  }
  at::Tensor forward_unversioned(at::Tensor x) { return of(x, weight); }
  static at::Tensor of(const at::Tensor& x, const at::Tensor& w) {
    return x.matmul(w).tanh().matmul(w.t()).pow(2);
  }
  RRef<at::Tensor> parameter(rpc::CallContext& call) { return call.agent.make_rref(weight); }
  at::Tensor value() { return weight.detach().clone(); }
  int64_t address() { return reinterpret_cast<int64_t>(weight.data_ptr()); }
  optim::Progress progress(rpc::CallContext& call, int participant) {
    return optim::progress_of(call.agent, weight, participant);
  }
  // Returns the optimizer state of the weight, read as an onlooker (a rank that makes no steps).
  optim::ParameterState seen(rpc::CallContext& call) {
    const Sharing onlooking{Sharing::Mode::kSync, 1, Sharing::kOnlooker};
    return DistributedOptimizer(call.agent, {parameter(call)}, optim::Adam{}, onlooking).state()[0];
  }
  at::Tensor weight;
};

// read_and_call() holds a read until an update waits for it, then calls read_again().
std::atomic<bool> g_reading{false}, g_may_call{false};
void read_again(rpc::CallContext& call) { const autograd::ParameterRead read(call.agent); }
void read_and_call(rpc::CallContext& call) {
  const autograd::ParameterRead read(call.agent);
  g_reading = true;
  const auto update_waits = [&] {
    const auto waits = call.agent.waits();
    return std::ranges::any_of(
        waits, [](const rpc::Wait& wait) { return wait.what == "an update under way here"; });
  };
  while (!g_may_call || !update_waits()) std::this_thread::yield();
  call.agent.rpc_sync<&read_again>(call.agent.rank());
}
void allow_call() { g_may_call = true; }

void set_up_square_layers(Agent& agent) {
  autograd::install(agent);
  optim::install(agent);
  agent.expose<&read_again>("read_again");
  agent.expose<&read_and_call>("read_and_call");
  agent.expose<&allow_call>("allow_call");
  agent.expose_class<SquareLayer>("SquareLayer");
  agent.expose<&SquareLayer::forward>("SquareLayer.forward");
  agent.expose<&SquareLayer::forward_unversioned>("SquareLayer.forward_unversioned");
  agent.expose<&SquareLayer::parameter>("SquareLayer.parameter");
  agent.expose<&SquareLayer::value>("SquareLayer.value");
  agent.expose<&SquareLayer::address>("SquareLayer.address");
  agent.expose<&SquareLayer::progress>("SquareLayer.progress");
  agent.expose<&SquareLayer::seen>("SquareLayer.seen");
}

at::Tensor gradient_at(const at::Tensor& weight, const at::Tensor& x) {
  const at::Tensor leaf = weight.clone().requires_grad_();
  SquareLayer::of(x, leaf).sum().backward();
  return leaf.grad();
}

}  // namespace

TEST_CASE("an update keeps the version that a pass in flight was built on") {
  Cluster cluster(2, set_up_square_layers);
  Agent& agent = cluster[0];
  at::manual_seed(5);
  const at::Tensor w = at::rand({3, 2}, at::kDouble), x = at::rand({4, 3}, at::kDouble);
  const auto layer = agent.remote_new<SquareLayer>(1, w);
  DistributedOptimizer optimizer(agent, {layer.rpc_sync<&SquareLayer::parameter>()},
                                 optim::Sgd{.lr = 0.5});
  const int64_t first = layer.rpc_sync<&SquareLayer::address>();
  {
    auto slow = std::make_unique<autograd::Context>(agent);
    const at::Tensor early = layer.rpc_sync<&SquareLayer::forward>(x);
    {
      autograd::Context quick(agent);
      autograd::backward(quick, {layer.rpc_sync<&SquareLayer::forward>(x).sum()});
      optimizer.step(quick);
    }
    const at::Tensor between = w - 0.5 * gradient_at(w, x);
    CHECK(at::allclose(layer.rpc_sync<&SquareLayer::value>(), between, 1e-12, 1e-12));
    CHECK(layer.rpc_sync<&SquareLayer::address>() != first);
    autograd::backward(*slow, {early.sum()});
    optimizer.step(*slow);
    // The slow pass used the first weights. Its step changes the weights that the quick pass left.
    CHECK(at::allclose(layer.rpc_sync<&SquareLayer::value>(), between - 0.5 * gradient_at(w, x),
                       1e-12, 1e-12));
  }
  // With no pass in flight the parameter is updated in place.
  const int64_t last = layer.rpc_sync<&SquareLayer::address>();
  for (int step = 0; step < 5; ++step) {
    autograd::Context context(agent);
    autograd::backward(context, {layer.rpc_sync<&SquareLayer::forward>(x).sum()});
    optimizer.step(context);
  }
  CHECK(layer.rpc_sync<&SquareLayer::address>() == last);
}

TEST_CASE("a pass that saved the parameter itself fails instead of using another version") {
  Cluster cluster(2, set_up_square_layers);
  Agent& agent = cluster[0];
  const at::Tensor w = at::rand({3, 2}, at::kDouble), x = at::rand({4, 3}, at::kDouble);
  const auto layer = agent.remote_new<SquareLayer>(1, w);
  DistributedOptimizer optimizer(agent, {layer.rpc_sync<&SquareLayer::parameter>()},
                                 optim::Sgd{.lr = 0.5});
  const bool also_a_version = GENERATE(false, true);
  autograd::Context slow(agent);
  const at::Tensor early = layer.rpc_sync<&SquareLayer::forward_unversioned>(x);
  const at::Tensor other = layer.rpc_sync<&SquareLayer::forward>(x);
  {
    const rpc::ContextScope outside(0);
    autograd::Context quick(agent);
    autograd::backward(quick, {layer.rpc_sync<&SquareLayer::forward>(x).sum()});
    optimizer.step(quick);
  }
  const auto error = error_of([&] {
    autograd::backward(slow, {also_a_version ? early.sum() + other.sum() : early.sum()});
  });
  CHECK(error.message.find("modified by an inplace operation") != std::string::npos);
}

namespace {

struct Blocked final : base::BlockObserver {
  void on_block() override { is_blocked = true; }
  void on_unblock() override { is_blocked = false; }
  std::atomic<bool> is_blocked{false};
};

}  // namespace

TEST_CASE("overlapping reads do not starve an update") {
  Cluster cluster(1, set_up_square_layers);
  std::atomic<bool> updated{false};
  std::atomic<int> reads[2] = {0, 0};
  Blocked readers[2];
  std::vector<std::thread> threads;
  for (int own : {0, 1}) {
    threads.emplace_back([&, own, other = 1 - own] {
      base::thread_state().observer = &readers[own];
      while (!updated) {
        const autograd::ParameterRead read(cluster[0]);
        const int before = reads[other];
        ++reads[own];
        // Keeps this read until the other thread begins its next read, so the reads always overlap.
        while (reads[other] == before && !readers[other].is_blocked && !updated) {
          std::this_thread::yield();
        }
      }
    });
  }
  while (reads[0] == 0 || reads[1] == 0) std::this_thread::yield();
  {
    const autograd::ParameterUpdate update(cluster[0]);
    updated = true;
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("updates that wait for a read leave threads and reads for its nested call") {
  rpc::AgentOptions two_workers;
  two_workers.worker_threads = 2;
  Cluster cluster(2, set_up_square_layers, two_workers);
  Agent& agent = cluster[0];
  const auto layer = agent.remote_new<SquareLayer>(1, at::rand({3, 2}, at::kDouble));
  const auto parameter = layer.rpc_sync<&SquareLayer::parameter>();
  DistributedOptimizer optimizer(agent, {parameter}, optim::Sgd{.lr = 0.5});
  autograd::Context context(agent);
  autograd::backward(context,
                     {layer.rpc_sync<&SquareLayer::forward>(at::rand({4, 3}, at::kDouble)).sum()});
  g_reading = g_may_call = false;
  const rpc::ContextScope outside(0);
  const auto reading = agent.rpc_async<&read_and_call>(1);
  while (!g_reading) std::this_thread::yield();
  std::vector<std::thread> steps;
  for (int i = 0; i < 4; ++i) steps.emplace_back([&] { optimizer.step(context); });
  while (agent.waits().size() < 5) std::this_thread::yield();  // all updates have been sent
  agent.rpc_sync<&allow_call>(1);
  reading.wait();
  for (std::thread& step : steps) step.join();
  CHECK(layer.rpc_sync<&SquareLayer::progress>(0).updates == 4);
}

TEST_CASE("async trainers on a dense layer complete every pass") {
  Cluster cluster(4, set_up_square_layers);
  const at::Tensor w = at::rand({16, 8}, at::kDouble) * 0.01;
  const auto layer = cluster[0].remote_new<SquareLayer>(3, w);
  const auto parameter = layer.rpc_sync<&SquareLayer::parameter>();
  constexpr int kSteps = 60;
  std::vector<std::string> errors(3);
  const DistributedOptimizer keeper(cluster[0], {parameter}, optim::Adam{.lr = 1e-3},
                                    Sharing{Sharing::Mode::kAsync, 3, 0});
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      errors[static_cast<size_t>(t)] =
          error_of([&] {
            DistributedOptimizer optimizer(cluster[0], {parameter}, optim::Adam{.lr = 1e-3},
                                           Sharing{Sharing::Mode::kAsync, 3, t});
            const at::Tensor x = at::full({8, 16}, 0.1 * (t + 1), at::kDouble);
            for (int step = 0; step < kSteps; ++step) {
              autograd::Context context(cluster[0]);
              autograd::backward(context, {layer.rpc_sync<&SquareLayer::forward>(x).sum()});
              optimizer.step(context);
            }
          }).message;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) CHECK(error == "(no error)");
  CHECK(layer.rpc_sync<&SquareLayer::progress>(0).updates == 3 * kSteps);
  CHECK(layer.rpc_sync<&SquareLayer::progress>(0).lead == 0);
}

TEST_CASE("in ssp no trainer runs more than the staleness ahead of the slowest") {
  const int64_t staleness = GENERATE(0, 1, 3);
  Cluster cluster(2, set_up_square_layers);
  const auto layer = cluster[0].remote_new<SquareLayer>(1, at::rand({3, 2}, at::kDouble));
  const auto parameter = layer.rpc_sync<&SquareLayer::parameter>();
  const at::Tensor x = at::rand({2, 3}, at::kDouble);
  std::atomic<int64_t> done[2] = {0, 0};
  const auto step_of = [&](int participant) {
    DistributedOptimizer optimizer(cluster[0], {parameter}, optim::Sgd{.lr = 0.01},
                                   Sharing{Sharing::Mode::kSsp, 2, participant, staleness});
    return [&, participant, optimizer]() mutable {
      autograd::Context context(cluster[0]);
      autograd::backward(context, {layer.rpc_sync<&SquareLayer::forward>(x).sum()});
      optimizer.step(context);
      ++done[participant];
    };
  };
  constexpr int64_t kSteps = 12;
  auto slow = step_of(1);
  std::thread fast([&, step = step_of(0)]() mutable {
    for (int64_t i = 0; i < kSteps; ++i) step();
  });
  for (int64_t i = 0; i < kSteps; ++i) {
    // The fast trainer goes as far ahead as allowed and no further.
    const int64_t expected = std::min(kSteps, i + staleness);
    while (done[0] < expected) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(10ms);
    CHECK(done[0] == expected);
    const auto progress = layer.rpc_sync<&SquareLayer::progress>(0);
    CHECK(progress.lead <= staleness + 1);  // includes a step that waits for the slow trainer
    slow();
  }
  fast.join();
  CHECK(layer.rpc_sync<&SquareLayer::progress>(1).updates == 2 * kSteps);
}

TEST_CASE("clipping uses the norm over all owners, as torch does over one model") {
  const auto mode = GENERATE(Sharing::Mode::kSync, Sharing::Mode::kAsync);
  const double max_norm = GENERATE(0.25, 1e6);
  Cluster cluster(4, set_up_square_layers);
  at::manual_seed(6);
  const at::Tensor w1 = at::rand({3, 2}, at::kDouble), w2 = at::rand({3, 2}, at::kDouble);
  const at::Tensor x[2] = {at::rand({4, 3}, at::kDouble), at::rand({4, 3}, at::kDouble)};
  const auto first = cluster[0].remote_new<SquareLayer>(2, w1),
             second = cluster[0].remote_new<SquareLayer>(3, w2);
  // Both participants run on rank 0; ranks 2 and 3 each own one parameter.
  const RRef<at::Tensor> parameters[2] = {first.rpc_sync<&SquareLayer::parameter>(),
                                          second.rpc_sync<&SquareLayer::parameter>()};
  std::latch have_gradients(2);  // both participants have gradients at w1 and w2
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      DistributedOptimizer optimizer(cluster[0], {parameters[0], parameters[1]},
                                     optim::Sgd{.lr = 0.5}, Sharing{mode, 2, t});
      autograd::Context context(cluster[0]);
      const at::Tensor sum = first.rpc_sync<&SquareLayer::forward>(x[t]).sum() +
                             second.rpc_sync<&SquareLayer::forward>(x[t]).sum();
      autograd::backward(context, {sum});
      have_gradients.arrive_and_wait();
      optimizer.step(context, max_norm);
    });
  }
  for (std::thread& thread : threads) thread.join();

  const at::Tensor g1[2] = {gradient_at(w1, x[0]), gradient_at(w1, x[1])};
  const at::Tensor g2[2] = {gradient_at(w2, x[0]), gradient_at(w2, x[1])};
  const auto norm = [](const at::Tensor& a, const at::Tensor& b) {
    return std::sqrt(optim::norm_squared({a, b}));
  };
  at::Tensor e1, e2;
  if (mode == Sharing::Mode::kSync) {
    at::Tensor l1 = w1.clone().requires_grad_(), l2 = w2.clone().requires_grad_();
    l1.mutable_grad() = (g1[0] + g1[1]) / 2;
    l2.mutable_grad() = (g2[0] + g2[1]) / 2;
    torch::nn::utils::clip_grad_norm_({l1, l2}, max_norm);
    e1 = w1 - 0.5 * l1.grad();
    e2 = w2 - 0.5 * l2.grad();
  } else {
    e1 = w1.clone();
    e2 = w2.clone();
    for (const int t : {0, 1}) {  // each participant clips with its own norm
      const double scale = std::min(1.0, max_norm / (norm(g1[t], g2[t]) + 1e-6));
      e1 -= 0.5 * scale * g1[t];
      e2 -= 0.5 * scale * g2[t];
    }
  }
  CHECK(at::allclose(first.rpc_sync<&SquareLayer::value>(), e1, 1e-10, 1e-12));
  CHECK(at::allclose(second.rpc_sync<&SquareLayer::value>(), e2, 1e-10, 1e-12));
}

TEST_CASE("an optimizer that loads the state of another continues as that one would") {
  const int which = GENERATE(0, 1, 2, 3);
  const optim::OptimizerOptions options =
      which == 0   ? optim::OptimizerOptions(optim::Sgd{.lr = 0.1})
      : which == 1 ? optim::OptimizerOptions(optim::Sgd{.lr = 0.1, .momentum = 0.9})
      : which == 2 ? optim::OptimizerOptions(optim::Adagrad{.lr = 0.1})
                   : optim::OptimizerOptions(optim::Adam{.lr = 0.1, .amsgrad = true});
  Cluster cluster(2, set_up_square_layers);
  Agent& agent = cluster[0];
  const at::Tensor w = at::rand({3, 2}, at::kDouble), x = at::rand({2, 3}, at::kDouble);
  at::Tensor here = at::rand({4}, at::kDouble).requires_grad_();
  const at::Tensor here_start = here.detach().clone();

  const auto train = [&](const RRef<SquareLayer>& layer, const at::Tensor& local,
                         DistributedOptimizer& optimizer, int steps) {
    for (int step = 0; step < steps; ++step) {
      autograd::Context context(agent);
      autograd::backward(context,
                         {layer.rpc_sync<&SquareLayer::forward>(x).sum() + local.pow(2).sum()});
      optimizer.step(context);
    }
  };
  const auto whole = agent.remote_new<SquareLayer>(1, w);
  DistributedOptimizer all(
      agent, {agent.make_rref(here), whole.rpc_sync<&SquareLayer::parameter>()}, options);
  train(whole, here, all, 3);
  const std::vector<optim::ParameterState> state = all.state();
  const at::Tensor remote_middle = whole.rpc_sync<&SquareLayer::value>();
  at::Tensor here_again = here.detach().clone().requires_grad_();
  train(whole, here, all, 3);

  const auto resumed = agent.remote_new<SquareLayer>(1, remote_middle);
  DistributedOptimizer more(
      agent, {agent.make_rref(here_again), resumed.rpc_sync<&SquareLayer::parameter>()}, options);
  more.load_state(state);
  train(resumed, here_again, more, 3);
  CHECK(at::equal(resumed.rpc_sync<&SquareLayer::value>(), whole.rpc_sync<&SquareLayer::value>()));
  CHECK(at::equal(here_again, here));
  CHECK(state[0].at("step").item<int64_t>() == 3);

  // A state that does not match the parameters is refused.
  CHECK(error_of([&] { more.load_state({state[0]}); }).kind == base::ErrorKind::kBadData);
  CHECK(error_of([&] {
          more.load_state({state[1], state[0]});
        }).kind == (which == 0 ? base::ErrorKind::kInternal : base::ErrorKind::kBadData));
  auto other = state;
  other[0]["surplus"] = at::zeros({4}, at::kDouble);
  CHECK(error_of([&] { more.load_state(other); }).kind == base::ErrorKind::kBadData);
  other = state;
  other[1].erase("step");  // torch.optim.SGD has none
  CHECK(error_of([&] { more.load_state(other); }).kind ==
        (which < 2 ? base::ErrorKind::kInternal : base::ErrorKind::kBadData));
}

TEST_CASE("transferring an optimizer's whole state has no deadline") {
  Cluster cluster(2, set_up_square_layers);
  Agent& agent = cluster[0];
  const auto layer = agent.remote_new<SquareLayer>(1, at::rand({3, 2}, at::kDouble));
  DistributedOptimizer optimizer(agent, {layer.rpc_sync<&SquareLayer::parameter>()}, optim::Adam{});
  // From now on, every call with the default deadline times out.
  const auto timeout = agent.rpc_timeout();
  agent.set_rpc_timeout(1ns);
  // Retries, because a reply may arrive before the loop checks the deadline.
  while (error_of([&] { layer.rpc_sync<&SquareLayer::value>(); }).kind !=
         base::ErrorKind::kDeadline) {
  }
  for (int i = 0; i < 20; ++i) {
    optimizer.load_state(optimizer.state());
    optimizer.snapshot({"weight"});
  }
  agent.set_rpc_timeout(timeout);
  cluster.shutdown();
}

TEST_CASE("an onlooker shares the optimizer of its own parameters and makes no steps") {
  Cluster cluster(2, set_up_square_layers);
  const auto layer = cluster[0].remote_new<SquareLayer>(1, at::rand({3, 2}, at::kDouble));
  const auto parameter = layer.rpc_sync<&SquareLayer::parameter>();
  const Sharing sharing{Sharing::Mode::kSync, 1, 0};
  DistributedOptimizer trainer(cluster[0], {parameter}, optim::Adam{}, sharing);
  {
    autograd::Context context(cluster[0]);
    autograd::backward(
        context, {layer.rpc_sync<&SquareLayer::forward>(at::rand({4, 3}, at::kDouble)).sum()});
    trainer.step(context);
  }
  const optim::ParameterState kept = trainer.state()[0];
  const optim::ParameterState seen = layer.rpc_sync<&SquareLayer::seen>();
  REQUIRE(seen.size() == kept.size());
  CHECK(seen.contains("exp_avg"));
  for (const auto& [name, value] : kept) CHECK(at::equal(seen.at(name), value));
  CHECK(seen.at("exp_avg").abs().sum().item<double>() > 0);

  Sharing onlooking = sharing;
  onlooking.participant = Sharing::kOnlooker;
  CHECK(error_of([&] {
          autograd::Context context(cluster[0]);
          DistributedOptimizer onlooker(cluster[0], {parameter}, optim::Adam{}, onlooking);
          onlooker.step(context);
        }).kind == base::ErrorKind::kInvalid);
}
