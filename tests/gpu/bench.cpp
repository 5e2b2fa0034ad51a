// Measures the echo of a 64 MiB tensor in GPU memory between two processes that share the GPU, for
// distrain and for LibTorch's TensorPipe with its CUDA channels. Also measures parts of an echo:
// the copies to pinned memory and back, and distrain's echo of a CPU tensor. Prints a JSON line for
// each, then ratios of their medians. The exit code does not depend on the ratios.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>

#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <nlohmann/json.hpp>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "bench/echo_peer.h"
#include "distrain/cuda/load.h"
#include "distrain/rpc/agent.h"
#include "oracle/official_agent.h"

namespace distrain::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kBytes = int64_t{64} << 20;
constexpr int kWarmUp = 5;
constexpr int kCalls = 25;
const c10::Device kGpu(c10::kCUDA, 0);

using Echo = std::function<at::Tensor(const at::Tensor&)>;

at::Tensor give_back(at::Tensor tensor) { return tensor; }

/// Returns the sorted times of the echoes in µs. An echo ends when the GPU has the result.
std::vector<double> measure(const Echo& echo, c10::Device device) {
  const at::Tensor tensor = at::arange(kBytes / 4, at::device(device).dtype(at::kFloat));
  if (!at::equal(echo(tensor), tensor)) throw std::runtime_error("the echo is not the call");
  std::vector<double> times;
  for (int i = -kWarmUp; i < kCalls; ++i) {
    rpc::StreamPoint::mark(device).wait_on_host();
    const double start = now_us();
    const at::Tensor back = echo(tensor);
    rpc::StreamPoint::mark(device).wait_on_host();
    if (i >= 0) times.push_back(now_us() - start);
  }
  std::sort(times.begin(), times.end());
  return times;
}

/// Runs as rank `setup.rank` of two. Rank 0 returns its times; rank 1 does not return.
using Role = std::vector<double> (*)(const EchoSetup& setup);

std::vector<double> run_distrain(const EchoSetup& setup, c10::Device device) {
  rpc::AgentOptions options;
  options.rank = setup.rank;
  options.world_size = 2;
  options.names = {"caller", "server"};
  options.transport = "unix";
  options.master_port = setup.port;
  options.device = device;
  if (setup.rank == 0) options.listen_fd = setup.listen_fd;
  rpc::Agent agent(options);
  agent.expose<&give_back>("echo");
  agent.join();
  if (setup.rank != 0) {
    for (;;) pause();
  }
  return measure([&](const at::Tensor& tensor) { return agent.rpc_sync<&give_back>(1, tensor); },
                 device);
}

std::vector<double> run_distrain_gpu(const EchoSetup& setup) { return run_distrain(setup, kGpu); }
std::vector<double> run_distrain_cpu(const EchoSetup& setup) {
  return run_distrain(setup, c10::kCPU);
}

std::vector<double> run_torch(const EchoSetup& setup) {
  at::empty({1}, kGpu);  // the agent takes GPU memory, but does not initialize LibTorch's allocator
  const oracle::OfficialAgent agent = oracle::start_official_agent(
      c10::make_intrusive<c10d::FileStore>(setup.folder + "/store", 2), setup.rank, 2, "", kGpu);
  if (setup.rank != 0) {
    for (;;) pause();
  }
  const auto op = oracle::find_operator("aten::positive", "");
  const auto& peer = agent->getWorkerInfo(oracle::official_name(1));
  const std::unordered_map<c10::Device, c10::Device> map = {{kGpu, kGpu}};
  return measure(
      [&](const at::Tensor& tensor) {
        return oracle::reply_value(
                   agent->send(peer, oracle::script_call(op, {tensor}), /*rpcTimeout=*/60, map))
            .toTensor();
      },
      kGpu);
}

/// Makes the copies of an echo sequentially: to host memory, to the GPU, and both again.
std::vector<double> run_pinned(const EchoSetup& setup) {
  if (setup.rank != 0) return {};
  const at::Tensor host = at::empty(
      {kBytes / 4}, at::TensorOptions().dtype(at::kFloat).device(at::kCPU).pinned_memory(true));
  return measure(
      [&](const at::Tensor& tensor) {
        host.copy_(tensor, /*non_blocking=*/true);
        at::Tensor there = at::empty_like(tensor).copy_(host, /*non_blocking=*/true);
        host.copy_(there, /*non_blocking=*/true);
        return there.copy_(host, /*non_blocking=*/true);
      },
      kGpu);
}

pid_t start(Role role, const EchoSetup& setup, int result) {
  const pid_t parent = getpid();
  const pid_t process = fork();
  if (process != 0) return process;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  try {
    cuda::load().device_count();
    const std::vector<double> times = role(setup);
    write_all(result, times.data(), times.size() * sizeof(double));
  } catch (const base::Exception& error) {
    std::fprintf(stderr, "gpu_bench: %s\n", error.what());
    _exit(base::exit_code(error.kind()));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_bench: %s\n", error.what());
    _exit(1);
  }
  _exit(0);
}

/// Runs `role` in two processes and returns rank 0's times, or throws its exit code if not 0.
std::vector<double> run_pair(Role role, const std::string& folder) {
  EchoSetup setup;
  setup.folder = folder;
  std::filesystem::create_directory(folder);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  int result[2];
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener, 8) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      pipe(result) != 0) {
    throw 1;
  }
  setup.listen_fd = listener;
  setup.port = ntohs(address.sin_port);
  setup.rank = 1;
  const pid_t server = start(role, setup, result[1]);
  setup.rank = 0;
  const pid_t caller = start(role, setup, result[1]);
  close(listener);
  int status = 0;
  waitpid(caller, &status, 0);
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
  close(result[1]);
  std::vector<double> times(kCalls);
  const bool whole = read_all(result[0], times.data(), times.size() * sizeof(double));
  close(result[0]);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || !whole) {
    throw WIFEXITED(status) && WEXITSTATUS(status) != 0 ? WEXITSTATUS(status) : 1;
  }
  return times;
}

double rounded(double value) { return std::round(value * 1000) / 1000; }

int run() {
  const std::vector<std::pair<std::string, Role>> implementations = {
      {"pinned-copies", run_pinned},
      {"distrain-cpu", run_distrain_cpu},
      {"distrain-cuda", run_distrain_gpu},
      {"torch-cuda", run_torch}};
  char folder[] = "/tmp/gpu_bench_XXXXXX";
  if (mkdtemp(folder) == nullptr) throw std::runtime_error("no folder in /tmp");
  std::map<std::string, double> medians;
  int code = 0;
  for (const auto& [name, role] : implementations) {
    try {
      const std::vector<double> times = run_pair(role, std::string(folder) + "/" + name);
      const double median = times[kCalls / 2];
      medians[name] = median;
      const Json line{{"event", "bench"},
                      {"name", "echo-gpu"},
                      {"impl", name},
                      {"bytes", kBytes},
                      {"world_size", 2},
                      {"p50_us", std::round(median)},
                      {"p90_us", std::round(times[kCalls * 9 / 10])},
                      {"gb_per_s", rounded(2e-3 * double(kBytes) / median)}};
      std::printf("%s\n", line.dump().c_str());
      std::fflush(stdout);
    } catch (int failed) {
      std::fprintf(stderr, "gpu_bench: %s failed with exit code %d\n", name.c_str(), failed);
      code = failed;
      if (failed == base::exit_code(base::ErrorKind::kResources)) break;
    }
  }
  std::filesystem::remove_all(folder);
  const std::vector<std::pair<std::string, std::optional<double>>> ratios = {
      {"pinned-copies", 0.6}, {"distrain-cpu", std::nullopt}, {"torch-cuda", 1.5}};
  for (const auto& [other, wanted] : ratios) {
    if (!medians.contains("distrain-cuda") || !medians.contains(other)) continue;
    const double speed = medians[other] / medians["distrain-cuda"];
    const Json line{{"event", "ratio"},        {"name", "echo-gpu"},
                    {"impl", "distrain-cuda"}, {"of", other},
                    {"speed", rounded(speed)}, {"wanted", wanted ? Json(*wanted) : Json()}};
    std::printf("%s\n", line.dump().c_str());
  }
  return code;
}

}  // namespace
}  // namespace distrain::bench

int main() {
  try {
    return distrain::bench::run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_bench: %s\n", error.what());
    return 1;
  }
}
