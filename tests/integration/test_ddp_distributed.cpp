// Tests DDP inside distributed autograd passes: two trainers, and a server that holds a table.
#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include "distrain/autograd/context.h"
#include "distrain/ddp/distributed_data_parallel.h"
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

c10::intrusive_ptr<collective::Backend> join_group(rpc::Agent& agent) {
  collective::Backend::Settings settings;
  settings.timeout = std::chrono::seconds(60);
  return c10::make_intrusive<collective::Backend>(agent.open_channel(2), agent.executor(),
                                                  collective::Group{1, {0, 1}}, settings);
}

}  // namespace

TEST_CASE("a context's gradients of a DDP module are means over the trainers") {
  Cluster cluster(kTrainers + 1, setup);
  cluster.on_all([](rpc::Agent& agent) {
    if (agent.rank() == kTrainers) return;
    Dense dense(torch::nn::Linear(4, 3), join_group(agent),
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
    Dense dense(torch::nn::Linear(4, 3), join_group(agent),
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
