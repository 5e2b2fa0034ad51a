// The library without the job kit: a server and two trainers, each a process of its own.
//
//   for rank in 0 1 2; do ./runtime $rank & done; wait
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <distrain/autograd/context.h>
#include <distrain/ddp/distributed_data_parallel.h>
#include <distrain/nn/module.h>
#include <distrain/optim/distributed_optimizer.h>
#include <distrain/rpc/agent.h>

using namespace distrain;
using namespace std::chrono_literals;

at::Tensor scale(at::Tensor x, double factor) {  // a function for other ranks
  if (factor == 0) throw std::runtime_error("the factor is 0");
  return x * factor;
}

struct Weight {  // an object that lives on the rank that creates it
  using Constructor = Weight(double start);
  explicit Weight(double start) : value(at::full({3}, start).requires_grad_()) {}
  at::Tensor multiply(at::Tensor x) { return x * value; }
  rpc::RRef<at::Tensor> parameter(rpc::CallContext& call) { return call.agent.make_rref(value); }
  at::Tensor value;
};

torch::nn::Embedding make_table(int64_t rows, int64_t dim) {
  torch::manual_seed(1);
  return torch::nn::Embedding(torch::nn::EmbeddingOptions(rows, dim).sparse(true));
}

void call_functions(rpc::Agent& agent) {
  const at::Tensor x = at::ones({3});
  const at::Tensor doubled = agent.rpc_sync<&scale>("server", x, 2.0);
  const base::Future<at::Tensor> tripled = agent.rpc_async<&scale>("server", x, 3.0);
  const rpc::RRef<at::Tensor> on_server = agent.remote<&scale>("server", x, 4.0);
  const at::Tensor sum = doubled + tripled.wait() + on_server.to_here();  // 9, 9, 9
  agent.rpc_sync<&scale>(rpc::To("server").timeout(5s), sum, 0.5);
  try {
    agent.rpc_sync<&scale>("server", x, 0.0);
  } catch (const base::Exception& e) {
    std::printf("rank %d: %s\n", e.error().rank, e.what());
  }
}

void train_weight(rpc::Agent& agent) {
  const rpc::RRef<Weight> weight = agent.remote_new<Weight>("server", 1.0);
  const rpc::RRef<at::Tensor> parameter = weight.rpc_sync<&Weight::parameter>();
  optim::DistributedOptimizer optimizer(agent, {parameter}, optim::Sgd{.lr = 0.1});
  for (int step = 0; step < 100; ++step) {
    autograd::Context context(agent);  // the calls below belong to this context
    const at::Tensor y = weight.rpc_sync<&Weight::multiply>(at::ones({3}));
    autograd::backward(context, {(y - 2).pow(2).sum()});
    optimizer.step(context);  // updates the parameter on the server
  }
  std::printf("weight %.3f\n", parameter.to_here().mean().item<double>());
}

void train_table_and_net(rpc::Agent& agent) {  // on both trainers
  const nn::RemoteModule table(agent, "server", "table", 100, 8);
  const auto backend = c10::make_intrusive<collective::Backend>(
      agent.open_channel(16), agent.executor(), collective::Group{.id = 1, .ranks = {1, 2}});
  ddp::DistributedDataParallel net(torch::nn::Linear(8, 2), backend);
  optim::DistributedOptimizer optimizer(
      agent, table.remote_parameters(), net.parameters(), {.options = optim::Adagrad{.lr = 0.1}},
      {.mode = optim::Sharing::Mode::kSync, .participants = 2, .participant = agent.rank() - 1});
  at::Tensor loss;
  for (int step = 0; step < 50; ++step) {
    const at::Tensor ids = at::randint(100, {32}, at::kLong);
    autograd::Context context(agent);
    loss = at::cross_entropy_loss(net.forward(table.forward(ids)), ids.remainder(2));
    autograd::backward(context, {loss});
    optimizer.step(context);
  }
  std::printf("trainer%d: loss %.3f\n", agent.rank(), loss.item<double>());
}

void run(int rank, uint16_t port) {
  rpc::AgentOptions options;
  options.rank = rank;
  options.names = {"server", "trainer1", "trainer2"};  // those of rank 0 count
  options.master_port = port;
  options.on_waiting = [](const std::vector<int>& missing, const std::string& address,
                          const std::string& reason) {  // every 5 s in join()
    std::fprintf(stderr, "waiting for %zu ranks at %s: %s\n", missing.size(), address.c_str(),
                 reason.c_str());
  };
  rpc::Agent agent(options);
  autograd::install(agent);  // on every rank, before join()
  optim::install(agent);
  agent.expose<&scale>("scale");  // other ranks can call what is exposed, and nothing else
  agent.expose_class<Weight>("Weight");
  agent.expose<&Weight::multiply>("Weight.multiply");
  agent.expose<&Weight::parameter>("Weight.parameter");
  nn::expose_module(agent, "table", make_table);
  agent.join();  // returns when all ranks are connected
  if (rank == 1) {
    call_functions(agent);
    train_weight(agent);
  }
  if (rank != 0) train_table_and_net(agent);
  agent.shutdown();  // the server serves until all ranks are here
}

int main(int argc, char** argv) try {
  run(argc > 1 ? std::atoi(argv[1]) : 0,
      static_cast<uint16_t>(argc > 2 ? std::atoi(argv[2]) : 29500));
} catch (const std::exception& e) {
  std::fprintf(stderr, "runtime: %s\n", e.what());
  return 1;
}
