// Measures a distributed backward pass over one hop beside the same pass in one process and beside
// a call with 4 bytes. Prints one JSON line for each.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/echo_distrain.h"
#include "distrain/autograd/context.h"

using namespace distrain;

namespace {

at::Tensor& weight() {
  static at::Tensor tensor = at::ones({64}).set_requires_grad(true);
  return tensor;
}

at::Tensor scale(const at::Tensor& x) { return x * weight(); }

std::vector<double> times_of(int rounds, const std::function<double()>& f) {
  for (int i = 0; i < rounds / 10; ++i) f();
  std::vector<double> us;
  for (int i = 0; i < rounds; ++i) us.push_back(f());
  std::sort(us.begin(), us.end());
  return us;
}

void print(const char* impl, const std::vector<double>& us) {
  const auto at = [&us](double q) {
    return std::round(us[static_cast<size_t>(q * static_cast<double>(us.size() - 1))] * 100) / 100;
  };
  const nlohmann::ordered_json line{
      {"event", "bench"},  {"name", "backward"}, {"impl", impl},
      {"world_size", 2},   {"calls", us.size()}, {"p50_us", at(0.5)},
      {"p90_us", at(0.9)}, {"p99_us", at(0.99)}, {"per_s", std::round(1e6 / at(0.5))},
      {"verified", true}};
  std::printf("%s\n", line.dump().c_str());
}

void run_caller(rpc::Agent& agent) {
  const at::Tensor x = at::full({64}, 3.0F).set_requires_grad(true);
  const auto check = [](const at::Tensor& gradient) {
    if (!at::all(gradient == 1).item<bool>()) throw std::runtime_error("a gradient is wrong");
  };
  constexpr int kRounds = 2000;
  // In turns, so that other load affects all of them equally.
  std::vector<double> local, remote, echo;
  const auto add = [](std::vector<double>& to, const std::vector<double>& more) {
    to.insert(to.end(), more.begin(), more.end());
  };
  for (int turn = 0; turn < 5; ++turn) {
    add(local, times_of(kRounds / 5, [&] {
          x.mutable_grad() = at::Tensor();
          const at::Tensor loss = scale(x).sum();
          const double start = bench::now_us();
          loss.backward();
          const double us = bench::now_us() - start;
          check(x.grad());
          return us;
        }));
    add(remote, times_of(kRounds / 5, [&] {
          autograd::Context context(agent);
          const at::Tensor loss = agent.rpc_sync<&scale>(1, x).sum();
          const double start = bench::now_us();
          autograd::backward(context, {loss});
          const double us = bench::now_us() - start;
          check(context.gradient(x));
          return us;
        }));
    const at::Tensor small = at::zeros({1});
    add(echo, times_of(kRounds / 5, [&] {
          const double start = bench::now_us();
          agent.rpc_sync<&bench::echo_tensor>(1, small);
          return bench::now_us() - start;
        }));
  }
  for (auto* us : {&local, &remote, &echo}) std::sort(us->begin(), us->end());
  print("local", local);
  print("distrain-unix", remote);
  print("echo", echo);
  // The part of the distributed pass beyond the local one, as a time.
  std::vector<double> beyond;
  for (size_t i = 0; i < remote.size(); ++i) beyond.push_back(remote[i] - local[local.size() / 2]);
  print("beyond-local", beyond);
}

void run(rpc::Agent& agent) {
  at::set_num_threads(1);
  autograd::install(agent);
  agent.expose<&scale>("scale");
  agent.expose<&bench::echo_tensor>("echo");
  agent.join();
  if (agent.rank() == 0) run_caller(agent);
  agent.shutdown();
}

}  // namespace

int main() {
  rpc::AgentOptions options;
  options.names = {"caller", "server"};
  int port[2];
  if (pipe(port) != 0) return 1;
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    options.rank = 1;
    if (read(port[0], &options.master_port, sizeof options.master_port) <= 0) _exit(1);
    rpc::Agent agent(options);
    run(agent);
    _exit(0);
  }
  try {
    rpc::Agent agent(options);
    const uint16_t number = agent.port();
    if (write(port[1], &number, sizeof number) != sizeof number) return 1;
    run(agent);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_backward: %s\n", error.what());
    return 1;
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
