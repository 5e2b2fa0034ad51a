#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <optional>
#include <thread>

#include <torch/nn/functional/embedding.h>
#include <torch/optim.h>

#include "distrain/autograd/context.h"
#include "distrain/autograd/parameter_versions.h"
#include "distrain/optim/distributed_optimizer.h"
#include "remote_layers.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;
using base::ErrorKind;
using optim::DistributedOptimizer;
using optim::OptimizerOptions;
using optim::Sharing;
using rpc::Agent;
using rpc::RRef;
using testing::backward_of;
using testing::Cluster;
using testing::error_of;
using testing::Layer;

namespace {

std::vector<optim::UpdateCount> g_counts;  // one per rank of the most recent cluster

struct Table {
  using Constructor = Table(at::Tensor weight);
  explicit Table(at::Tensor w) : weight(w.clone().requires_grad_()) {}
  at::Tensor forward(at::Tensor indices, at::Tensor offsets) {
    return std::get<0>(at::embedding_bag(weight, indices, offsets, false, 0, /*sparse=*/true));
  }
  RRef<at::Tensor> parameter(rpc::CallContext& context) { return context.agent.make_rref(weight); }
  at::Tensor value() { return weight.detach().clone(); }
  at::Tensor weight;
};

std::atomic<bool> g_occupied{false}, g_released{false};
void occupy_worker() {
  g_occupied = true;
  while (!g_released) std::this_thread::yield();
}

void set_up_layers(Agent& agent) {
  if (agent.rank() == 0) g_counts.clear();
  autograd::install(agent);
  g_counts.push_back(optim::install(agent));
  testing::expose_layers(agent);
  agent.expose_class<Table>("Table");
  agent.expose<&occupy_worker>("occupy_worker");
  agent.expose<&Table::forward>("Table.forward");
  agent.expose<&Table::parameter>("Table.parameter");
  agent.expose<&Table::value>("Table.value");
}

at::Tensor numbers(std::vector<int64_t> values) { return at::tensor(values, at::kLong); }

// One of two participants on one rank that train a parameter in sync mode.
struct SyncParticipant : DistributedOptimizer {
  SyncParticipant(Agent& agent, const RRef<at::Tensor>& parameter, int participant)
      : DistributedOptimizer(agent, {parameter}, optim::Sgd{.lr = 1},
                             Sharing{Sharing::Mode::kSync, 2, participant}) {}
};

}  // namespace

TEST_CASE("SGD, Adagrad and Adam over two owners and local parameters equal torch's") {
  const int which = GENERATE(0, 1, 2, 3);
  CAPTURE(which);
  at::manual_seed(3);
  const at::Tensor w1 = at::rand({4, 3}, at::kDouble), w2 = at::rand({3, 2}, at::kDouble),
                   w3 = at::rand({2}, at::kDouble);
  const OptimizerOptions options =
      which == 0   ? OptimizerOptions(optim::Sgd{.lr = 0.1})
      : which == 1 ? OptimizerOptions(optim::Sgd{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01})
      : which == 2 ? OptimizerOptions(optim::Adagrad{.lr = 0.1})
                   : OptimizerOptions(optim::Adam{.lr = 0.1});

  std::vector<at::Tensor> local = {w1.clone().requires_grad_(), w2.clone().requires_grad_(),
                                   w3.clone().requires_grad_()};
  std::unique_ptr<torch::optim::Optimizer> reference;
  if (which == 0) {
    reference = std::make_unique<torch::optim::SGD>(local, torch::optim::SGDOptions(0.1));
  } else if (which == 1) {
    reference = std::make_unique<torch::optim::SGD>(
        local, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  } else if (which == 2) {
    reference = std::make_unique<torch::optim::Adagrad>(local, torch::optim::AdagradOptions(0.1));
  } else {
    reference = std::make_unique<torch::optim::Adam>(local, torch::optim::AdamOptions(0.1));
  }

  Cluster cluster(3, set_up_layers);
  {
    Agent& agent = cluster[0];
    const auto first = agent.remote_new<Layer>(1, w1);
    const auto second = agent.remote_new<Layer>(2, w2);
    const at::Tensor bias = w3.clone().requires_grad_();
    DistributedOptimizer optimizer(agent,
                                   {first.rpc_sync<&Layer::parameter>(), agent.make_rref(bias),
                                    second.rpc_sync<&Layer::parameter>()},
                                   options);
    for (int step = 0; step < 8; ++step) {
      const at::Tensor x = at::rand({5, 4}, at::kDouble);
      reference->zero_grad();
      ((x.matmul(local[0]).tanh().matmul(local[1]) + local[2]).tanh()).pow(2).sum().backward();
      reference->step();

      autograd::Context context(agent);
      const at::Tensor hidden = first.rpc_sync<&Layer::forward>(x).tanh();
      const at::Tensor y = second.rpc_sync<&Layer::forward>(hidden) + bias;
      autograd::backward(context, {y.tanh().pow(2).sum()});
      optimizer.step(context);
    }
    CHECK(at::allclose(first.rpc_sync<&Layer::value>(), local[0].detach(), 1e-12, 1e-12));
    CHECK(at::allclose(second.rpc_sync<&Layer::value>(), local[1].detach(), 1e-12, 1e-12));
    CHECK(at::allclose(bias.detach(), local[2].detach(), 1e-12, 1e-12));
    CHECK_FALSE(bias.grad().defined());
    for (const auto& count : g_counts) CHECK(*count == 8);
  }
  cluster.shutdown();
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(cluster[rank].live_rrefs() == 0);
    CHECK(cluster[rank].live_contexts() == 0);
  }
}

TEST_CASE("sync mode applies the mean of all participants, in any order of arrival") {
  const at::Tensor w = at::zeros({2, 1}, at::kDouble);
  std::vector<int> order = {0, 1, 2};
  do {
    Cluster cluster(4, set_up_layers);
    {
      const auto layer = cluster[3].make_rref(Layer(w));
      std::vector<RRef<Layer>> layers(3);
      std::vector<std::unique_ptr<DistributedOptimizer>> optimizers;
      // The three participants run on rank 0 and train one layer of rank 3.
      const auto shared = cluster[0].remote_new<Layer>(3, w);
      const auto parameter = shared.rpc_sync<&Layer::parameter>();
      std::vector<std::unique_ptr<autograd::Context>> contexts;
      for (int rank = 0; rank < 3; ++rank) {
        optimizers.push_back(std::make_unique<DistributedOptimizer>(
            cluster[0], std::vector<RRef<at::Tensor>>{parameter}, optim::Sgd{.lr = 1},
            Sharing{Sharing::Mode::kSync, 3, rank}));
      }
      // The last bit of 0.1 + 0.2 + 0.3 depends on the order of the sum.
      for (int rank = 0; rank < 3; ++rank) {
        contexts.push_back(std::make_unique<autograd::Context>(cluster[0]));
        backward_of(*contexts.back(), shared, 0.1 * (rank + 1));
      }
      std::vector<std::thread> threads;
      std::atomic<int> done{0};
      for (const int rank : order) {
        threads.emplace_back([&, rank] {
          optimizers[static_cast<size_t>(rank)]->step(*contexts[static_cast<size_t>(rank)]);
          ++done;
        });
        std::this_thread::sleep_for(20ms);
        if (threads.size() < 3) {
          CHECK(done == 0);
          CHECK(at::equal(shared.rpc_sync<&Layer::value>(), w));
        }
      }
      for (std::thread& thread : threads) thread.join();
      while (!contexts.empty()) contexts.pop_back();
      const double mean = (0.1 * 1 + 0.1 * 2 + 0.1 * 3) / 3.0;
      CHECK(at::equal(shared.rpc_sync<&Layer::value>(), at::full({2, 1}, -mean, at::kDouble)));
      CHECK(*g_counts[3] == 1);
    }
    cluster.shutdown();
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("an owner reports which participant's update it waits for") {
  Cluster cluster(2, set_up_layers);
  const auto layer = cluster[0].remote_new<Layer>(1, at::zeros({2, 1}, at::kDouble));
  const RRef<at::Tensor> parameter = layer.rpc_sync<&Layer::parameter>();
  SyncParticipant first(cluster[0], parameter, 0), second(cluster[0], parameter, 1);
  autograd::Context context(cluster[0]);
  backward_of(context, layer, 1);
  std::thread stepping([&] { first.step(context); });
  std::vector<rpc::Wait> waits;
  while (waits.empty()) waits = cluster[1].waits();
  CHECK(waits[0].what == "an update here that wants participant 1");
  CHECK(cluster[0].waits().at(0).what == "distrain.optim.step, called on rank 1");
  second.step(context);
  stepping.join();
  CHECK(cluster[1].waits().empty());
}

TEST_CASE("a long wait for a participant is reported once, while it lasts") {
  std::atomic<int> told{0};
  rpc::AgentOptions options;
  options.long_wait = 1ms;
  options.on_long_wait = [&told](const rpc::Wait& wait) {
    if (wait.what == "an update here that wants participant 1") ++told;
  };
  Cluster cluster(2, set_up_layers, options);
  const auto layer = cluster[0].remote_new<Layer>(1, at::zeros({2, 1}, at::kDouble));
  const auto parameter = layer.rpc_sync<&Layer::parameter>();
  SyncParticipant first(cluster[0], parameter, 0), second(cluster[0], parameter, 1);
  autograd::Context context(cluster[0]);
  backward_of(context, layer, 1);
  std::thread stepping([&] { first.step(context); });
  while (told == 0) std::this_thread::yield();
  second.step(context);
  stepping.join();
  CHECK(told == 1);
}

TEST_CASE("the reason of an owner's wait is also reported during an update") {
  Cluster cluster(2, set_up_layers);
  const auto layer = cluster[0].remote_new<Layer>(1, at::zeros({2, 1}, at::kDouble));
  DistributedOptimizer optimizer(cluster[0],
                                 std::vector<RRef<at::Tensor>>{layer.rpc_sync<&Layer::parameter>()},
                                 optim::Sgd{.lr = 1});
  autograd::Context context(cluster[0]);
  backward_of(context, layer, 1);
  std::optional<autograd::ParameterRead> reading(cluster[1]);  // blocks the update
  std::thread stepping([&] { optimizer.step(context); });
  std::atomic<bool> over{false};
  auto asking = std::async(std::launch::async, [&] {
    std::vector<rpc::Wait> waits;
    while (waits.empty() && !over) waits = cluster[1].waits();
    return waits;
  });
  const bool told = asking.wait_for(20s) == std::future_status::ready;
  reading.reset();
  stepping.join();
  over = true;
  REQUIRE(told);
  CHECK(asking.get().at(0).what == "an update under way here");
  CHECK(cluster[1].waits().empty());
}

TEST_CASE("steps that a lost rank has requested are not applied") {
  rpc::AgentOptions one_worker;
  one_worker.worker_threads = 1;
  Cluster cluster(3, set_up_layers, one_worker);
  const auto layer_of = [&](int rank) {
    return cluster[rank].remote_new<Layer>(1, at::zeros({2, 1}, at::kDouble));
  };
  const auto optimizer_of = [&](int rank, const RRef<Layer>& layer) {
    return std::make_unique<DistributedOptimizer>(
        cluster[rank], std::vector<RRef<at::Tensor>>{layer.rpc_sync<&Layer::parameter>()},
        optim::Sgd{.lr = 1});
  };
  const auto lost_layer = layer_of(2), layer = layer_of(0);
  const auto lost = optimizer_of(2, lost_layer), kept = optimizer_of(0, layer);
  autograd::Context lost_context(cluster[2]);
  backward_of(lost_context, lost_layer, 1);
  autograd::Context context(cluster[0]);
  backward_of(context, layer, 1);

  g_occupied = g_released = false;
  std::thread first([&] { cluster[0].rpc_sync<&occupy_worker>(1); });
  while (!g_occupied) std::this_thread::yield();  // the call occupies the only worker
  base::Error error;
  std::thread second([&] { error = error_of([&] { lost->step(lost_context); }); });
  while (cluster[2].waits().empty()) std::this_thread::yield();
  const auto asked = [&] {
    return error_of([&] { cluster[1].call_raw(2, "unknown", [](rpc::Encoder&) {}).wait(); });
  };
  REQUIRE(asked().kind == ErrorKind::kNotFound);  // the answer arrives after the step
  cluster[2].abort({ErrorKind::kBadData, "no more", -1, {}});
  second.join();
  // The step fails because rank 2's agent ends, or because another rank reports rank 2 as lost.
  CHECK((error.kind == ErrorKind::kCancelled || error.kind == ErrorKind::kPeerLost));
  while (asked().kind == ErrorKind::kNotFound) std::this_thread::yield();
  g_released = true;
  first.join();
  kept->step(context);
  CHECK(at::equal(layer.rpc_sync<&Layer::value>(), at::full({2, 1}, -1, at::kDouble)));
  CHECK(*g_counts[1] == 1);
}

TEST_CASE("async mode applies each update when it arrives") {
  Cluster cluster(4, set_up_layers);
  const auto layer = cluster[0].remote_new<Layer>(3, at::zeros({2, 1}, at::kDouble));
  const auto parameter = layer.rpc_sync<&Layer::parameter>();
  constexpr int kSteps = 25;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      DistributedOptimizer optimizer(cluster[0], {parameter}, optim::Sgd{.lr = 0.5});
      for (int step = 0; step < kSteps; ++step) {
        autograd::Context context(cluster[0]);
        // The gradient does not depend on the weight, so the updates may be applied in any order.
        backward_of(context, layer, 2);
        optimizer.step(context);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(at::equal(layer.rpc_sync<&Layer::value>(), at::full({2, 1}, -3.0 * kSteps, at::kDouble)));
  CHECK(*g_counts[3] == 3 * kSteps);
}

TEST_CASE("several contexts are summed into one update") {
  Cluster cluster(2, set_up_layers);
  Agent& agent = cluster[0];
  const auto layer = agent.remote_new<Layer>(1, at::zeros({2, 1}, at::kDouble));
  const auto unused = agent.remote_new<Layer>(1, at::ones({2, 1}, at::kDouble));
  const at::Tensor here = at::zeros({2}, at::kDouble).requires_grad_();
  DistributedOptimizer optimizer(agent,
                                 {layer.rpc_sync<&Layer::parameter>(),
                                  unused.rpc_sync<&Layer::parameter>(), agent.make_rref(here)},
                                 optim::Sgd{.lr = 1});
  std::vector<uint64_t> ids;
  std::vector<std::unique_ptr<autograd::Context>> contexts;
  for (const double scale : {1.0, 2.0, 4.0}) {
    contexts.push_back(std::make_unique<autograd::Context>(agent));
    const at::Tensor x = at::full({1, 2}, scale, at::kDouble);
    autograd::backward(*contexts.back(),
                       {layer.rpc_sync<&Layer::forward>(x).sum() + (here * scale).sum()});
    ids.push_back(contexts.back()->id());
  }
  optimizer.step(ids);
  CHECK(at::equal(layer.rpc_sync<&Layer::value>(), at::full({2, 1}, -7.0, at::kDouble)));
  CHECK(at::equal(here.detach(), at::full({2}, -7.0, at::kDouble)));
  CHECK(at::equal(unused.rpc_sync<&Layer::value>(), at::ones({2, 1}, at::kDouble)));
  CHECK(*g_counts[1] == 1);
  while (!contexts.empty()) contexts.pop_back();
  // Contexts that have ended have no gradients to apply.
  optimizer.step(ids);
  CHECK(at::equal(layer.rpc_sync<&Layer::value>(), at::full({2, 1}, -7.0, at::kDouble)));
}

TEST_CASE("a step that one parameter cannot make changes none") {
  Cluster cluster(2, set_up_layers);
  Agent& agent = cluster[0];
  const auto layer = agent.remote_new<Layer>(1, at::zeros({2, 1}, at::kDouble));
  const auto table = agent.remote_new<Table>(1, at::zeros({2, 1}, at::kDouble));
  // SGD with momentum refuses sparse gradients.
  DistributedOptimizer optimizer(
      agent, {layer.rpc_sync<&Layer::parameter>(), table.rpc_sync<&Table::parameter>()},
      optim::Sgd{.lr = 0.1, .momentum = 0.9});
  autograd::Context context(agent);
  const at::Tensor out = layer.rpc_sync<&Layer::forward>(at::ones({1, 2}, at::kDouble)) +
                         table.rpc_sync<&Table::forward>(numbers({1}), numbers({0}));
  autograd::backward(context, {out.sum()});
  CHECK(error_of([&] { optimizer.step(context); }).kind == ErrorKind::kInvalid);
  CHECK(at::equal(layer.rpc_sync<&Layer::value>(), at::zeros({2, 1}, at::kDouble)));
}

TEST_CASE("parameters have one optimizer; later ones must have the same options") {
  Cluster cluster(2, set_up_layers);
  Agent& agent = cluster[0];
  std::vector<RRef<at::Tensor>> parameters;
  std::vector<RRef<Layer>> layers;
  for (int i = 0; i < 4; ++i) {
    layers.push_back(agent.remote_new<Layer>(1, at::zeros({2, 1}, at::kDouble)));
    parameters.push_back(layers.back().rpc_sync<&Layer::parameter>());
  }
  const std::vector<RRef<at::Tensor>> two = {parameters[0], parameters[1]};
  const optim::Sgd sgd{.lr = 0.1};
  const Sharing sync{Sharing::Mode::kSync, 2, 0};
  DistributedOptimizer first(agent, two, sgd);
  const auto attach = [&](const std::vector<RRef<at::Tensor>>& which,
                          const OptimizerOptions& options, Sharing sharing = {}) {
    return error_of([&] { DistributedOptimizer again(agent, which, options, sharing); });
  };
  CHECK(attach(two, sgd).message == "(no error)");
  CHECK(attach(two, optim::Sgd{.lr = 0.2}).kind == ErrorKind::kInvalid);
  CHECK(attach(two, optim::Adam{}).kind == ErrorKind::kInvalid);
  CHECK(attach(two, sgd, sync).kind == ErrorKind::kInvalid);
  CHECK(attach({parameters[0]}, sgd).kind == ErrorKind::kInvalid);
  CHECK(attach({parameters[1]}, sgd).kind == ErrorKind::kInvalid);
  CHECK(attach({parameters[1], parameters[0]}, sgd).kind == ErrorKind::kInvalid);
  CHECK(attach({parameters[0], parameters[1], parameters[2]}, sgd).kind == ErrorKind::kInvalid);
  CHECK(attach({parameters[2], parameters[0]}, sgd).kind == ErrorKind::kInvalid);
  CHECK(attach({parameters[2]}, optim::Adam{}).message == "(no error)");
  CHECK(attach(two, optim::Sgd{.lr = -1}).kind == ErrorKind::kInvalid);
  // A step of a participant whose number is out of range is refused.
  DistributedOptimizer odd(agent, {parameters[3]}, sgd, Sharing{Sharing::Mode::kSync, 2, 5});
  autograd::Context context(agent);
  CHECK(error_of([&] { odd.step(context); }).kind == ErrorKind::kInvalid);
}

TEST_CASE("rows of a sparse embedding are updated while another context's pass is in flight") {
  Cluster cluster(2, set_up_layers);
  Agent& agent = cluster[0];
  const at::Tensor w = at::rand({10, 3}, at::kDouble);
  const auto table = agent.remote_new<Table>(1, w);
  const int which = GENERATE(0, 1, 2);
  const OptimizerOptions options = which == 0   ? OptimizerOptions(optim::Sgd{.lr = 0.5})
                                   : which == 1 ? OptimizerOptions(optim::Adagrad{.lr = 0.5})
                                                : OptimizerOptions(optim::Adam{.lr = 0.5});
  const auto parameter = table.rpc_sync<&Table::parameter>();
  DistributedOptimizer optimizer(agent, {parameter}, options);
  const at::Tensor indices = numbers({1, 3, 3, 0, 9, 2}), offsets = numbers({0, 4, 6});

  auto slow = std::make_unique<autograd::Context>(agent);
  const at::Tensor early = table.rpc_sync<&Table::forward>(indices, offsets);
  {
    // Another context updates the same rows between forward and backward of the first context.
    autograd::Context quick(agent);
    const at::Tensor y = table.rpc_sync<&Table::forward>(indices, offsets);
    autograd::backward(quick, {y.pow(2).sum()});
    optimizer.step(quick);
  }
  const at::Tensor between = table.rpc_sync<&Table::value>();
  CHECK_FALSE(at::allclose(between, w));
  autograd::backward(*slow, {early.pow(2).sum()});  // no error "modified by an inplace operation"
  optimizer.step(*slow);
  slow.reset();

  // Both passes used the initial weights: the second gradient equals the first.
  const at::Tensor leaf = w.clone().requires_grad_();
  std::get<0>(at::embedding_bag(leaf, indices, offsets, false, 0, true)).pow(2).sum().backward();
  at::Tensor expected = w.clone();
  const auto rule = std::make_unique<optim::UpdateRule>(options);
  rule->apply(0, expected, leaf.grad());
  CHECK(at::allclose(between, expected, 1e-12, 1e-12));
  rule->apply(0, expected, leaf.grad());
  CHECK(at::allclose(table.rpc_sync<&Table::value>(), expected, 1e-12, 1e-12));
  // Rows that no lookup used do not change.
  CHECK(at::equal(table.rpc_sync<&Table::value>().slice(0, 4, 9), w.slice(0, 4, 9)));
}

TEST_CASE("several trainers share one sparse table at full speed") {
  Cluster cluster(4, set_up_layers);
  const at::Tensor w = at::zeros({10, 3}, at::kDouble);
  const auto table = cluster[0].remote_new<Table>(3, w);
  const auto parameter = table.rpc_sync<&Table::parameter>();
  const at::Tensor indices = numbers({1, 3, 3, 0}), offsets = numbers({0, 2, 4});
  constexpr int kSteps = 30;
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      try {
        DistributedOptimizer optimizer(cluster[0], {parameter}, optim::Sgd{.lr = 1});
        for (int step = 0; step < kSteps; ++step) {
          autograd::Context context(cluster[0]);
          const at::Tensor y = table.rpc_sync<&Table::forward>(indices, offsets);
          autograd::backward(context, {y.sum()});
          optimizer.step(context);
        }
      } catch (const base::Exception& e) {
        ++failures;
        UNSCOPED_INFO(e.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  at::Tensor expected = w.clone();
  for (const int64_t row : {1, 3, 3, 0}) expected[row] -= 3.0 * kSteps;
  CHECK(at::equal(table.rpc_sync<&Table::value>(), expected));
  CHECK(*g_counts[3] == 3 * kSteps);
}
