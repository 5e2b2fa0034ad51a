// Tests DDP inside distributed autograd passes: two trainers, and a server that holds a table.
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include "distrain/autograd/context.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/nn/module.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using testing::Cluster;
using testing::expect;
using Dense = ddp::DistributedDataParallel<torch::nn::Linear>;

namespace {

constexpr int kTrainers = 2;

struct Table {
  at::Tensor weight = at::arange(40).to(at::kFloat).view({10, 4}).div(40).set_requires_grad(true);
};

at::Tensor lookup(rpc::CallContext& call, const at::Tensor& indices) {
  return at::embedding(call.agent.local<Table>().weight, indices);
}

void setup(rpc::Agent& agent) {
  autograd::install(agent);
  agent.expose<&lookup>("lookup");
  if (agent.rank() == kTrainers) agent.provide(std::make_shared<Table>());
}

at::Tensor indices_of(int rank, int step) { return (at::arange(3) + rank + step) % 10; }

c10::intrusive_ptr<collective::Backend> trainer_group(rpc::Agent& agent, int trainers = kTrainers) {
  collective::Backend::Settings settings;
  settings.timeout = std::chrono::seconds(60);
  std::vector<int> ranks;
  for (int rank = 0; rank < trainers; ++rank) ranks.push_back(rank);
  return c10::make_intrusive<collective::Backend>(agent.open_channel(2), agent.executor(),
                                                  collective::Group{1, ranks}, settings);
}

constexpr int kFour = 4;  // trainers, beside the server with this rank

// Returns a layer whose weights are 1, but one is -1.
torch::nn::Linear known_linear(int64_t in, int64_t out) {
  torch::nn::Linear layer(torch::nn::LinearOptions(in, out).bias(false));
  const at::NoGradGuard no_grad;
  layer->weight.fill_(1);
  layer->weight[0][0] = -1;
  return layer;
}

/// The server's layers: an embedding, and a net of one layer.
struct Server {
  at::Tensor embedding = at::full({2, 3}, 0.5).requires_grad_();
  torch::nn::Linear net = known_linear(5, 3);
};
at::Tensor embed(rpc::CallContext& call, const at::Tensor& rows) {
  return at::embedding(call.agent.local<Server>().embedding, rows);
}
at::Tensor server_net(rpc::CallContext& call, const at::Tensor& x) {
  return call.agent.local<Server>().net->forward(x).relu();
}

/// Layers of a trainer and, between them, those of the server.
struct HybridImpl : torch::nn::Module {
  HybridImpl(rpc::Agent& agent_in, bool inside) : agent(agent_in) {
    fc1 = register_module("fc1", known_linear(2, 2));
    fc2 = register_module("fc2", known_linear(3, 1));
    if (inside) replica = std::make_unique<Dense>(fc2, trainer_group(agent, kFour));
  }
  at::Tensor forward(const at::Tensor& dense, const at::Tensor& rows) {
    const at::Tensor embedded = agent.rpc_sync<&embed>(kFour, rows);
    const at::Tensor x =
        agent.rpc_sync<&server_net>(kFour, at::cat({fc1->forward(dense), embedded}, 1));
    return replica ? replica->forward(x) : fc2->forward(x);
  }
  rpc::Agent& agent;
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  std::unique_ptr<Dense> replica;
};
TORCH_MODULE(Hybrid);

at::Tensor parameter_gradient(rpc::CallContext& call, const rpc::RRef<at::Tensor>& parameter,
                              uint64_t context) {
  return autograd::gradient(call.agent, context, parameter.local_value());
}

struct Examples {
  at::Tensor dense, rows, values;
};
// Returns four of 16 examples. Each example has another one of the same features and the opposite
// value, so the means of the gradients over all trainers are zero.
Examples examples_of(int rank) {
  std::vector<float> dense, values;
  std::vector<int64_t> rows;
  for (const int value : {-1, 1}) {
    for (const int x : {-value, value}) {
      for (const int y : {value, -value}) {
        for (const int z : {0, 1}) {
          dense.insert(dense.end(), {float(x), float(y)});
          rows.push_back(z);
          values.push_back(float(value));
        }
      }
    }
  }
  const auto part = [rank](const at::Tensor& all) { return all.narrow(0, 4 * rank, 4); };
  return {part(at::tensor(dense).view({16, 2})), part(at::tensor(rows)),
          part(at::tensor(values).view({16, 1}))};
}

void set_up_hybrid(rpc::Agent& agent) {
  autograd::install(agent);
  nn::install(agent);
  agent.expose<&embed>("embed");
  agent.expose<&server_net>("server_net");
  if (agent.rank() == kFour) agent.provide(std::make_shared<Server>());
}

}  // namespace

TEST_CASE("a context's gradients of a DDP module are means over the trainers") {
  Cluster cluster(kTrainers + 1, setup);
  cluster.on_all([](rpc::Agent& agent) {
    if (agent.rank() == kTrainers) return;
    Dense dense(torch::nn::Linear(4, 3), trainer_group(agent),
                {.bucket_cap_bytes = 1, .first_bucket_bytes = 1});
    const at::Tensor weight = dense.module()->weight;
    const at::Tensor bias = dense.module()->bias;
    const at::Tensor table = Table().weight.detach();
    for (int step = 0; step < 20; ++step) {
      autograd::Context context(agent);
      const at::Tensor embedded =
          agent.rpc_sync<&lookup>(kTrainers, indices_of(agent.rank(), step));
      const at::Tensor loss = dense.forward(embedded).pow(2).sum();
      autograd::backward(context, {loss});

      at::Tensor total;
      const at::Tensor w = weight.detach().clone().set_requires_grad(true);
      const at::Tensor b = bias.detach().clone().set_requires_grad(true);
      for (int rank = 0; rank < kTrainers; ++rank) {
        const at::Tensor x = at::embedding(table, indices_of(rank, step));
        const at::Tensor part = at::linear(x, w, b).pow(2).sum() / kTrainers;
        total = total.defined() ? total + part : part;
      }
      total.backward();
      expect(at::allclose(context.gradient(weight), w.grad(), 1e-5, 1e-5), "weight");
      expect(at::allclose(context.gradient(bias), b.grad(), 1e-5, 1e-5), "bias");
      expect(!weight.grad().defined(), ".grad was touched");
    }
  });
  cluster.shutdown();
}

TEST_CASE("a parameter without gradient in a distributed pass fails it on all trainers") {
  Cluster cluster(kTrainers + 1, setup);
  cluster.on_all([](rpc::Agent& agent) {
    if (agent.rank() == kTrainers) return;
    Dense dense(torch::nn::Linear(4, 3), trainer_group(agent),
                {.bucket_cap_bytes = 1, .first_bucket_bytes = 1});
    for (int step = 0; step < 4; ++step) {
      autograd::Context context(agent);
      const at::Tensor embedded =
          agent.rpc_sync<&lookup>(kTrainers, indices_of(agent.rank(), step));
      const bool lacks = step % 2 == 1 && agent.rank() == 1;
      const at::Tensor scores = dense.forward(embedded);
      const at::Tensor loss =
          lacks ? at::linear(embedded, dense.module()->weight).sum() : scores.sum();
      const base::Error error = testing::error_of([&] { autograd::backward(context, {loss}); });
      if (step % 2 == 0) {
        expect(error.message == "(no error)", error.message);
      } else {
        expect(error.kind == base::ErrorKind::kInvalid, error.message);
        expect(error.message.find("'bias'") != std::string::npos, error.message);
        expect(error.message.find("rank 1") != std::string::npos, error.message);
      }
    }
  });
  cluster.shutdown();
}

TEST_CASE("only the gradients of replicas are averaged in passes through a server's layers") {
  const std::string where = GENERATE("nowhere", "one layer", "the whole model");
  CAPTURE(where);
  Cluster cluster(kFour + 1, set_up_hybrid);
  cluster.on_all([&](rpc::Agent& agent) {
    if (agent.rank() == kFour) return;
    Hybrid net(agent, where == "one layer");
    std::unique_ptr<ddp::DistributedDataParallel<Hybrid>> whole;
    if (where == "the whole model") {
      whole =
          std::make_unique<ddp::DistributedDataParallel<Hybrid>>(net, trainer_group(agent, kFour));
    }
    const Examples examples = examples_of(agent.rank());
    for (int step = 0; step < 3; ++step) {
      autograd::Context context(agent);
      const at::Tensor out = whole ? whole->forward(examples.dense, examples.rows)
                                   : net->forward(examples.dense, examples.rows);
      autograd::backward(context, {(out * examples.values).sum()});
      expect(context.gradients().size() == 2, "number of gradients");
      for (const auto& item : net->named_parameters()) {
        const bool averaged = whole || (net->replica && item.key() == "fc2.weight");
        const bool zero = context.gradient(item.value()).abs().max().item<float>() < 1e-6F;
        expect(zero == averaged, item.key() + (averaged ? " is averaged" : " is not averaged"));
      }
    }
  });
  cluster.shutdown();
}

TEST_CASE("trainers with uneven data make passes through a server's layers together") {
  Cluster cluster(kFour + 1, set_up_hybrid);
  cluster.on_all([&](rpc::Agent& agent) {
    if (agent.rank() == kFour) return;
    ddp::DistributedDataParallel<Hybrid> model(Hybrid(agent, false), trainer_group(agent, kFour));
    const Examples all = examples_of(agent.rank());
    const int batches = agent.rank() < kFour / 2 ? 1 : 2;  // of two examples each
    for (int step = 0; step < 3; ++step) {
      int batch = 0, ranks = 0;
      for (; (ranks = model.ranks_with_data(batch < batches)) > 0; ++batch) {
        expect(ranks == (batch == 0 ? kFour : kFour / 2), "number of trainers with data");
        autograd::Context context(agent);
        if (batch < batches) {
          const auto part = [&](const at::Tensor& x) { return x.narrow(0, 2 * batch, 2); };
          const at::Tensor out = model.forward(part(all.dense), part(all.rows));
          autograd::backward(context, {(out * part(all.values)).sum()});
        } else {
          autograd::backward(context, {model.forward_without_data()});
        }
        expect(context.gradients().size() == 2, "number of gradients");
      }
      expect(batch == 2, "number of batches");
    }
  });
  cluster.shutdown();
}

TEST_CASE("with uneven data, passes of contexts and plain passes have the same gradients") {
  Cluster cluster(kFour, [](rpc::Agent& agent) { autograd::install(agent); });
  cluster.on_all([](rpc::Agent& agent) {
    Dense model(torch::nn::Linear(2, 3), trainer_group(agent, kFour));
    const int inputs = agent.rank() % 2 == 0 ? 3 : 1;
    for (int i = 0; model.ranks_with_data(i < inputs) > 0; ++i) {
      const at::Tensor x = at::full({3, 2}, 1.0 + agent.rank() + i);
      const auto loss = [&] {
        return i < inputs ? model.forward(x).norm() : model.forward_without_data();
      };
      autograd::Context context(agent);
      autograd::backward(context, {loss()});
      model.module()->zero_grad();
      const rpc::ContextScope outside(0);
      loss().backward();
      for (const at::Tensor& p : model.parameters()) {
        expect(at::equal(context.gradient(p), p.grad()), "gradients");
      }
    }
  });
  cluster.shutdown();
}

TEST_CASE("a replica behind a remote module has the gradients of one behind a local module") {
  Cluster cluster(kFour, [](rpc::Agent& agent) {
    autograd::install(agent);
    nn::install(agent);
    agent.expose<&parameter_gradient>("parameter_gradient");
    if (agent.rank() != 0) return;
    nn::expose_module(agent, "layer", [](int64_t in, int64_t out) {
      return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
    });
  });
  cluster.on_all([](rpc::Agent& agent) {
    const nn::RemoteModule remote(agent, 0, "layer", 10, 5);
    torch::nn::Linear local(torch::nn::LinearOptions(10, 5).bias(false));
    {
      const at::NoGradGuard no_grad;
      local->weight.copy_(remote.state().at("weight"));
    }
    Dense model(torch::nn::Linear(5, 1), trainer_group(agent, kFour));
    const at::Tensor x = at::full({10, 10}, 1.0 + agent.rank());
    model.forward(local->forward(x)).sum().backward();
    autograd::Context context(agent);
    autograd::backward(context, {model.forward(remote.forward(x)).sum()});
    expect(at::allclose(context.gradient(model.module()->weight), model.module()->weight.grad()),
           "gradient of the replica");
    const rpc::ContextScope outside(0);
    const at::Tensor there =
        agent.rpc_sync<&parameter_gradient>(0, remote.remote_parameters().at(0), context.id());
    expect(at::allclose(there, local->weight.grad()), "gradient of the remote module");
  });
  cluster.shutdown();
}
