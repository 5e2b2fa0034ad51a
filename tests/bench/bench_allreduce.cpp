// Measures allreduce and steps of DistributedDataParallel between processes on this host. Prints
// one JSON line for each size, op and transport; see tests/bench/README.md.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include "../src/app/process/process_setup.h"
#include "distrain/collective/backend.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/ddp/reducer.h"
#include "distrain/rpc/agent.h"

using namespace distrain;

namespace {

struct Options {
  std::string transport = "unix";
  int world = 2;
  int rank = -1;  // -1: starts all ranks
  std::string address = "localhost";
  uint16_t port = 29400;
  std::vector<int64_t> sizes = {4, 544, 16 << 10, 64 << 10, 1 << 20, 64 << 20};
  std::vector<std::string> ops = {"allreduce", "bucket", "ddp", "backward"};
};

double cpu_us() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto us = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_usec);
  };
  return us(used.ru_utime) + us(used.ru_stime);
}

class Rank {
 public:
  Rank(rpc::Agent& agent, const Options& options)
      : agent_(agent), options_(options), backend_(open({})) {}

  void run() {
    for (const std::string& op : options_.ops) {
      if (op == "allreduce") {
        for (const int64_t bytes : options_.sizes) allreduce(op, at::empty({bytes / 4}));
      } else if (op == "bucket") {  // as a bucket of DistributedDataParallel
        for (const int64_t bytes : options_.sizes) {
          allreduce(op, backend_->allocate(static_cast<size_t>(bytes)).view(at::kFloat));
        }
      } else if (op == "ddp") {
        ddp_step("ddp_16x1024", 16, 1024, 30);
        ddp_step("ddp_4x64", 4, 64, 1000);
      } else if (op == "ddp_bf16") {
        ddp_step("ddp_16x1024_bf16", 16, 1024, 30, ddp::compress_hook(at::kBFloat16));
      } else if (op == "backward") {
        backward();
      } else {
        throw std::invalid_argument("no op '" + op +
                                    "': must be allreduce, bucket, ddp, ddp_bf16 or backward");
      }
    }
  }

 private:
  c10::intrusive_ptr<collective::Backend> open(std::vector<int> ranks) {
    if (ranks.empty()) {
      for (int rank = 0; rank < options_.world; ++rank) ranks.push_back(rank);
    }
    const auto number = static_cast<uint32_t>(++groups_);
    return c10::make_intrusive<collective::Backend>(agent_.open_channel(2 * groups_),
                                                    agent_.executor(),
                                                    collective::Group{number, std::move(ranks)});
  }

  void measure(const std::string& op, int64_t bytes, int rounds, const std::function<void()>& f) {
    for (int i = 0; i < std::max(rounds / 10, 2); ++i) f();
    std::vector<double> us;
    const double cpu = cpu_us();
    for (int i = 0; i < rounds; ++i) {
      const base::TimePoint start = base::Clock::now();
      f();
      us.push_back(base::seconds_since(start) * 1e6);
    }
    const double used = (cpu_us() - cpu) / rounds;
    if (agent_.rank() != 0) return;
    std::sort(us.begin(), us.end());
    const auto at = [&us](double q) {
      return std::round(us[static_cast<size_t>(q * static_cast<double>(us.size() - 1))] * 100) /
             100;
    };
    nlohmann::ordered_json line{{"event", "bench"},
                                {"name", op},
                                {"impl", "distrain-" + options_.transport},
                                {"world_size", options_.world},
                                {"bytes", bytes},
                                {"calls", rounds}};
    line["p50_us"] = at(0.5);
    line["p90_us"] = at(0.9);
    line["p99_us"] = at(0.99);
    line["cpu_us"] = std::round(used);  // of rank 0
    line["per_s"] = std::round(1e6 / at(0.5));
    line["gb_per_s"] = std::round(static_cast<double>(bytes) / at(0.5)) / 1e3;
    line["verified"] = true;
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
  }

  // Sums numbers that tell ranks apart, and checks the sum before the measurement.
  void allreduce(const std::string& op, const at::Tensor& x) {
    const auto world = static_cast<float>(options_.world);
    x.fill_(1.0F + static_cast<float>(agent_.rank()));
    backend_->allreduce(x).wait();
    if (!at::all(x == world * (world + 1) / 2).item<bool>()) {
      throw std::runtime_error("a sum is wrong");
    }
    x.zero_();
    const auto bytes = static_cast<int64_t>(x.nbytes());
    measure(op, bytes, bytes > (1 << 22) ? 40 : 2000, [&] { backend_->allreduce(x).wait(); });
  }

  // Makes the step of tests/bench/ddp_torch.py: forward, backward, SGD, on a batch of 8.
  void ddp_step(const std::string& op, int layers, int64_t width, int rounds,
                ddp::CommHook hook = {}) {
    at::manual_seed(1);
    torch::nn::Sequential net;
    for (int i = 0; i < layers; ++i) net->push_back(torch::nn::Linear(width, width));
    ddp::DistributedDataParallel<torch::nn::Sequential> replicated(net, open({}),
                                                                   {.hook = std::move(hook)});
    torch::optim::SGD optimizer(net->parameters(), 1e-4);
    const at::Tensor x = at::randn({8, width});
    measure(op, layers * (width * width + width) * 4, rounds, [&] {
      optimizer.zero_grad();
      replicated.forward(x).pow(2).mean().backward();
      optimizer.step();
    });
    const at::Tensor weight = net->parameters()[0].detach().clone();
    backend_->broadcast(weight, 0).wait();
    if (!at::equal(weight, net->parameters()[0])) throw std::runtime_error("replicas differ");
  }

  // The cost of a Reducer beside a small backward pass.
  void backward() {
    const at::Tensor weight = at::zeros({8, 16}).set_requires_grad(true);
    const at::Tensor bias = at::zeros({8}).set_requires_grad(true);
    const at::Tensor x = at::ones({4, 16});
    const auto pass = [&] { at::linear(x, weight, bias).sum().backward(); };
    measure("backward", 544, 2000, pass);
    {
      ddp::Reducer reducer({{"weight", weight}, {"bias", bias}}, open({agent_.rank()}));
      measure("backward_reducer_alone", 544, 2000, pass);
    }
    ddp::Reducer reducer({{"weight", weight}, {"bias", bias}}, open({}));
    measure("backward_reducer", 544, 2000, pass);
  }

  rpc::Agent& agent_;
  const Options& options_;
  int groups_ = 0;
  c10::intrusive_ptr<collective::Backend> backend_;
};

// Joins the job, and runs the benchmark.
void run_rank(rpc::Agent& agent, const Options& options) {
  agent.join();
  {
    Rank rank(agent, options);
    rank.run();
  }
  agent.shutdown();
}

// Binds a rank to its own CPU if there are enough, as mpirun does.
void bind(const Options& bench, int rank) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (sched_getaffinity(0, sizeof cpus, &cpus) != 0 || CPU_COUNT(&cpus) < bench.world) return;
  int left = rank;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &cpus) || left-- == 0) continue;
    CPU_CLR(cpu, &cpus);
  }
  if (sched_setaffinity(0, sizeof cpus, &cpus) != 0) throw std::runtime_error("cannot bind");
}

// Runs one rank to its end. Returns the exit code.
int run_one(const rpc::AgentOptions& options, const Options& bench) {
  app::set_up_process();  // as jobs do
  at::set_num_threads(1);
  try {
    rpc::Agent agent(options);
    run_rank(agent, bench);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_allreduce, rank %d: %s\n", options.rank, error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options bench;
  CLI::App app("allreduce and DistributedDataParallel between processes on this host");
  app.add_option("--transport", bench.transport, "unix or tcp");
  app.add_option("--world", bench.world, "number of ranks")->check(CLI::Range(2, 256));
  app.add_option("--rank", bench.rank, "run this rank alone, over TCP; rank 0 is at --address");
  app.add_option("--address", bench.address, "rank 0's host");
  app.add_option("--port", bench.port, "rank 0's port");
  app.add_option("--bytes", bench.sizes, "sizes of allreduce")->delimiter(',');
  app.add_option("--ops", bench.ops, "allreduce, bucket, ddp, ddp_bf16, backward")->delimiter(',');
  CLI11_PARSE(app, argc, argv);
  rpc::AgentOptions options;
  options.transport = bench.transport;
  for (int rank = 0; rank < bench.world; ++rank)
    options.names.push_back("r" + std::to_string(rank));
  options.world_size = bench.world;
  if (bench.rank >= 0) {
    options.rank = bench.rank;
    options.master_addr = bench.address;
    options.master_port = bench.port;
    options.insecure = true;  // the hosts of tests/bench/network.sh are on this machine
    return run_one(options, bench);
  }
  int port[2];
  if (pipe(port) != 0) return 1;
  std::vector<pid_t> children;
  const pid_t parent = getpid();
  for (int rank = 1; rank < bench.world; ++rank) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    options.rank = rank;
    bind(bench, rank);
    if (read(port[0], &options.master_port, sizeof options.master_port) <= 0) _exit(1);
    _exit(run_one(options, bench));
  }
  // Set after the fork, because a child cannot safely use a thread pool that its parent created.
  at::set_num_threads(1);
  try {
    app::set_up_process();
    bind(bench, 0);
    rpc::Agent agent(options);
    const uint16_t number = agent.port();
    for (int rank = 1; rank < bench.world; ++rank) {
      if (write(port[1], &number, sizeof number) != sizeof number) return 1;
    }
    run_rank(agent, bench);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_allreduce: %s\n", error.what());
    return 1;
  }
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed |= status;
  }
  return failed == 0 ? 0 : 1;
}
