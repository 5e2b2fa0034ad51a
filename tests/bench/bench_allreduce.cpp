// Measures the latency of allreduce and of a whole DDP backward pass between two processes, over
// unix sockets or, with the argument `tcp`, over TCP. Usage: bench_allreduce [tcp]
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sys/wait.h>
#include <unistd.h>

#include "distrain/collective/backend.h"
#include "distrain/ddp/reducer.h"
#include "distrain/rpc/agent.h"

using namespace distrain;

namespace {

template <class F>
void measure(bool print, const std::string& name, int rounds, F f) {
  std::vector<double> us;
  for (int i = 0; i < rounds; ++i) {
    const base::TimePoint start = base::Clock::now();
    f();
    us.push_back(base::seconds_since(start) * 1e6);
  }
  std::sort(us.begin(), us.end());
  if (print) {
    std::printf("%-34s p50 %9.1f us   p90 %9.1f us\n", name.c_str(), us[us.size() / 2],
                us[us.size() * 9 / 10]);
  }
}

void run(rpc::Agent& agent) {
  agent.join();
  const bool print = agent.rank() == 0;
  {
    auto backend = c10::make_intrusive<collective::Backend>(agent.open_channel(2), agent.executor(),
                                                            collective::Group{1, {0, 1}});
    for (int64_t bytes : {4, 544, 16 << 10, 64 << 10, 128 << 10, 1 << 20, 64 << 20}) {
      const at::Tensor x = at::zeros({bytes / 4});
      measure(print, "allreduce " + std::to_string(bytes), bytes > (1 << 22) ? 20 : 2000,
              [&] { backend->allreduce(x).wait(); });
    }
    const at::Tensor weight = at::zeros({8, 16}).set_requires_grad(true);
    const at::Tensor bias = at::zeros({8}).set_requires_grad(true);
    const at::Tensor x = at::ones({4, 16});
    const auto backward = [&] { at::linear(x, weight, bias).sum().backward(); };
    measure(print, "forward and backward, 136 floats", 2000, backward);
    {
      auto alone = c10::make_intrusive<collective::Backend>(agent.open_channel(4), agent.executor(),
                                                            collective::Group{2, {agent.rank()}});
      ddp::Reducer reducer({{"weight", weight}, {"bias", bias}}, alone);
      measure(print, "the same with a Reducer, one rank", 2000, backward);
    }
    ddp::Reducer reducer({{"weight", weight}, {"bias", bias}}, backend);
    measure(print, "the same with a Reducer", 2000, backward);
  }
  agent.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  rpc::AgentOptions options;
  options.names = {"a", "b"};
  if (argc > 1) options.transport = argv[1];
  int port[2];
  if (pipe(port) != 0) return 1;
  const pid_t child = fork();
  // Set after the fork, because a child cannot safely use a thread pool that its parent created.
  at::set_num_threads(1);
  if (child == 0) {
    options.rank = 1;
    if (read(port[0], &options.master_port, sizeof options.master_port) <= 0) _exit(1);
    rpc::Agent agent(options);
    run(agent);
    _exit(0);
  }
  rpc::Agent agent(options);
  const uint16_t number = agent.port();
  if (write(port[1], &number, sizeof number) != sizeof number) return 1;
  run(agent);
  return waitpid(child, nullptr, 0) == child ? 0 : 1;
}
