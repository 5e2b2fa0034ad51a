// ctest: timeout=240
#include <thread>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>

#include "module_support.h"
#include "support/plain_net.h"

using namespace distrain;
using nn::RemoteModule;
using optim::DistributedOptimizer;
using optim::Sharing;
using testing::Cluster;
using testing::cluster_with;
using testing::error_of;

namespace {

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(8, 32), torch::nn::Tanh(),
                               torch::nn::Linear(32, 3));
}

torch::nn::Sequential make_dropping_net() {
  return torch::nn::Sequential(torch::nn::Linear(8, 64), torch::nn::Dropout(0.5), torch::nn::ReLU(),
                               torch::nn::Linear(64, 64), torch::nn::AlphaDropout(0.2),
                               torch::nn::Linear(64, 3));
}

// Returns the difference of two lookups of the same rows: 0 unless the table changes in between.
struct TwoLookupsImpl : torch::nn::Module {
  torch::nn::Embedding table = register_module(
      "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)));
  at::Tensor forward(const at::Tensor& rows) {
    const at::Tensor first = table->forward(rows).detach().clone();
    for (int i = 0; i < 100; ++i) std::this_thread::yield();
    return table->forward(rows) - first;
  }
};
TORCH_MODULE(TwoLookups);

void on_threads(int count, const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  std::vector<std::string> errors(static_cast<size_t>(count));
  for (int t = 0; t < count; ++t) {
    threads.emplace_back(
        [&, t] { errors[static_cast<size_t>(t)] = error_of([&] { run(t); }).message; });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) CHECK(error == "(no error)");
}

}  // namespace

TEST_CASE("four async trainers over a plain Sequential have right gradients and a falling loss") {
  constexpr int kTrainers = 4, kSteps = 500;
  torch::manual_seed(1);
  std::atomic<int> made{0};
  Cluster cluster(1 + kTrainers, [&made](rpc::Agent& agent) {
    testing::setup_modules(agent);
    if (agent.rank() != 0) return;
    nn::expose_module(agent, "net", [&made] {
      ++made;
      return make_net();
    });
  });
  // The targets are the classes that a separate net predicts for the same inputs.
  const at::Tensor inputs = at::rand({64, 8});
  const at::Tensor targets = make_net()->forward(inputs).detach().argmax(1);
  const auto loss_at = [&](const RemoteModule<>& net, const at::Tensor& x, const at::Tensor& y) {
    return at::cross_entropy_loss(net.forward(x), y);
  };
  RemoteModule judge(cluster[0], 0, "net");
  judge.eval();
  const double before = loss_at(judge, inputs, targets).item<double>();
  const DistributedOptimizer keeper(cluster[0], judge.remote_parameters(), optim::Adam{.lr = 1e-3},
                                    Sharing{Sharing::Mode::kAsync, kTrainers, Sharing::kOnlooker});
  std::atomic<uint64_t> updates{0};
  on_threads(kTrainers, [&](int t) {
    rpc::Agent& agent = cluster[1 + t];
    const RemoteModule net(agent, "w0", "net");
    DistributedOptimizer optimizer(agent, net.remote_parameters(), optim::Adam{.lr = 1e-3},
                                   Sharing{Sharing::Mode::kAsync, kTrainers, t});
    const at::Tensor x = inputs.slice(0, t, 64, kTrainers), y = targets.slice(0, t, 64, kTrainers);
    for (int step = 0; step < kSteps; ++step) {
      autograd::Context context(agent);
      autograd::backward(context, {loss_at(net, x, y)});
      uint64_t now = optimizer.step(context), known = updates.load();
      while (known < now && !updates.compare_exchange_weak(known, now)) {
      }
    }
  });
  CHECK(updates == kTrainers * kSteps);
  CHECK(loss_at(judge, inputs, targets).item<double>() < before / 2);
  CHECK(made <= 1 + kTrainers);  // the module, and a replica for each pass in flight
  cluster.shutdown();
  CHECK(cluster[0].live_contexts() == 0);
  CHECK(cluster[0].live_rrefs() > 0);  // `judge` and `keeper` hold references
}

TEST_CASE("each of many concurrent passes has the gradients of the parameters that it used") {
  constexpr int kTrainers = 4, kSteps = 40;
  torch::manual_seed(2);
  Cluster cluster = cluster_with([] { return torch::nn::Linear(4, 1); });
  rpc::Agent& agent = cluster[0];
  const RemoteModule net(agent, 1, "net");
  const auto parameters = net.remote_parameters();
  on_threads(kTrainers, [&](int t) {
    DistributedOptimizer optimizer(agent, parameters, optim::Sgd{.lr = 1e-3},
                                   Sharing{Sharing::Mode::kAsync, kTrainers, t});
    for (int step = 0; step < kSteps; ++step) {
      // `x` is a scaled identity, so the outputs reveal the parameters that the pass used. The
      // gradients of the squared outputs follow from the outputs.
      const at::Tensor x = at::eye(4) * (t + 1);
      autograd::Context context(agent);
      const at::Tensor y = net.forward(x);
      autograd::backward(context, {y.pow(2).sum()});
      const auto gradients = testing::gradients_in(context, parameters);
      const at::Tensor seen = 2 * y.detach();
      if (!at::equal(gradients[0], seen.t() * (t + 1)) ||
          !at::allclose(gradients[1], seen.sum(0), 1e-6, 1e-6)) {
        throw base::Exception(base::ErrorKind::kInternal, "a gradient of other parameters");
      }
      optimizer.step(context);
    }
  });
}

TEST_CASE("dropout depends only on the pass's key, even with concurrent random draws") {
  Cluster cluster = cluster_with(&make_dropping_net);
  RemoteModule net(cluster[0], 1, "net");
  const at::Tensor x = at::rand({16, 8});
  std::vector<at::Tensor> alone;
  for (uint64_t key = 0; key < 16; ++key) {
    net.seed(key);
    alone.push_back(net.forward(x));
    CHECK_FALSE(at::equal(net.forward(x), alone.back()));  // the second pass with the key
    if (key > 0) CHECK_FALSE(at::equal(alone[key], alone[key - 1]));
  }
  std::atomic<int> different{0};
  on_threads(4, [&](int t) {
    RemoteModule mine = net;
    for (int round = 0; round < 10; ++round) {
      for (uint64_t key = static_cast<uint64_t>(t); key < 16; key += 4) {
        mine.seed(key);
        if (!at::equal(mine.forward(x), alone[key])) ++different;
        at::rand({3});  // draws from torch's generator, which all ranks share
      }
    }
  });
  CHECK(different == 0);

  net.eval();
  const at::Tensor judged = net.forward(x);
  CHECK(at::equal(net.forward(x), judged));
  auto oracle = make_dropping_net();
  testing::give_values(oracle, net.state());
  oracle->eval();
  CHECK(at::equal(oracle->forward(x), judged));
}

TEST_CASE("passes and replicas do not advance torch's generator; its seed gives the first key") {
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::Dropout(0.5));
  };
  Cluster cluster = cluster_with(make);
  const RemoteModule first(cluster[0], 1, "net");  // draws its weights from torch's generator
  const at::Tensor x = at::ones({100, 64});
  torch::manual_seed(7);
  const at::Tensor expected = at::rand({4});
  torch::manual_seed(7);
  const RemoteModule one(cluster[0], 1, "net");
  const at::Tensor y = one.forward(x);
  CHECK(at::equal(at::rand({4}), expected));
  torch::manual_seed(7);
  const RemoteModule again(cluster[0], 1, "net");
  CHECK(at::equal(again.forward(x), y));
  torch::manual_seed(8);
  const RemoteModule other(cluster[0], 1, "net");
  CHECK_FALSE(at::equal(other.forward(x), y));

  // Dropout sets half of the elements to 0 and doubles the others.
  RemoteModule judge = one;
  judge.eval();
  const at::Tensor whole = judge.forward(x);
  CHECK(at::equal(at::where(y == 0, y, whole * 2), y));
  const double dropped = (y == 0).to(at::kDouble).mean().item<double>();
  CHECK(dropped > 0.45);
  CHECK(dropped < 0.55);
}

TEST_CASE("a copy of a handle on another rank has its own random numbers, the same in every run") {
  Cluster cluster = cluster_with(
      [] { return torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::Dropout(0.5)); });
  const at::Tensor x = at::ones({50, 8});
  const auto run = [&] {
    RemoteModule net(cluster[0], 1, "net");
    net.seed(5);
    std::vector<at::Tensor> drawn;
    for (int i = 0; i < 2; ++i) {
      drawn.push_back(cluster[0].rpc_sync<&testing::forward_of>(1, net, x));
      drawn.push_back(net.forward(x));
    }
    return drawn;
  };
  const std::vector<at::Tensor> drawn = run();
  testing::check_equal(run(), drawn);
  for (size_t i = 0; i < drawn.size(); ++i) {
    for (size_t j = 0; j < i; ++j) CHECK_FALSE(at::equal(drawn[i], drawn[j]));
  }
}

namespace {

void move_states(const RemoteModule<>& net) {
  for (int i = 0; i < 20; ++i) {
    net.load_state(net.state());
    net.snapshot("net.");
  }
}

}  // namespace

TEST_CASE("transferring a module's whole state has no deadline") {
  const auto setup = [](rpc::Agent& agent) {
    testing::setup_modules(agent);
    agent.expose<&move_states>("move_states");
    nn::expose_module(agent, "net", [] { return torch::nn::Linear(8, 8); });
  };
  // The default deadline of a call by rank 2 is 1 ns, so a call that has a deadline fails.
  Cluster cluster(3, setup, {}, [](rpc::AgentOptions& options) {
    options.rpc_timeout = std::chrono::nanoseconds(options.rank == 2 ? 1 : 60'000'000'000);
  });
  cluster[0].rpc_sync<&move_states>(2, RemoteModule(cluster[0], 1, "net"));
  cluster.shutdown();
}

TEST_CASE("a row of a table does not change while a pass looks it up") {
  constexpr int kTrainers = 3, kPasses = 200;
  Cluster cluster(1 + kTrainers, [](rpc::Agent& agent) {
    testing::setup_modules(agent);
    if (agent.rank() == 0) nn::expose_module(agent, "net", [] { return TwoLookups(); });
  });
  const at::Tensor rows = at::arange(4, at::kLong);
  std::atomic<int> changed{0};
  on_threads(kTrainers, [&](int t) {
    rpc::Agent& agent = cluster[1 + t];
    const RemoteModule net(agent, "w0", "net");
    DistributedOptimizer optimizer(agent, net.remote_parameters(), optim::Sgd{.lr = 0.1},
                                   Sharing{Sharing::Mode::kAsync, kTrainers, t});
    for (int pass = 0; pass < kPasses; ++pass) {
      autograd::Context context(agent);
      const at::Tensor apart = net.forward(rows);
      if (apart.abs().max().item<float>() != 0) ++changed;
      autograd::backward(context, {apart.sum()});
      optimizer.step(context);
    }
  });
  CHECK(changed == 0);
}
