// RPC echo of a tensor: compares LibTorch's TensorPipeAgent, distrain and a raw socket.
//
// Each implementation is a pair of processes, a caller and a server. The pairs are measured in
// short turns, so that other load on the machine affects all of them equally. During a turn all
// other pairs are stopped, because TensorPipe's shared memory transport polls even when idle.
// Prints one JSON line for each implementation and size. With --add both sides add 1 to what they
// receive and the caller checks each sum. With --beside a second thread of the caller sends large
// tensors all the time, and the calls of the first are measured.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#include "bench/echo_distrain.h"
#include "bench/echo_raw.h"
#include "bench/echo_torch.h"

namespace distrain::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  int64_t iterations = 4000;
  int64_t rounds = 20;
  int64_t in_flight = 64;
  std::vector<int64_t> sizes = {4};
  std::vector<std::string> only;
  int64_t beside = 0;  // bytes of the tensors that a second thread sends
  bool add = false;
  bool pin = false;
};

struct Implementation {
  std::string name;
  std::string transport;
  std::function<std::unique_ptr<EchoPeer>(const EchoSetup&)> make;
};

template <class Peer>
std::unique_ptr<EchoPeer> make_peer(const EchoSetup& setup) {
  return std::make_unique<Peer>(setup);
}

std::vector<Implementation> implementations() {
  return {{"raw-unix", "unix", make_peer<RawEcho>},
          {"raw-tcp", "tcp", make_peer<RawEcho>},
          {"torch-shm", "shm", make_peer<TorchEcho>},
          {"torch-tcp", "tcp", make_peer<TorchEcho>},
          {"distrain-unix", "unix", make_peer<DistrainEcho>},
          {"distrain-tcp", "tcp", make_peer<DistrainEcho>}};
}

// The parameters of one turn of an implementation, which the parent sends to the caller process.
struct Turn {
  int64_t bytes;
  int64_t calls;
  int64_t flood_calls;
  int64_t in_flight;
  int64_t beside;
  bool add;
};

// Sends tensors of `bytes` in a thread of its own while it exists.
class Transfer {
 public:
  Transfer(EchoPeer& peer, int64_t bytes)
      : thread_([this, &peer, tensor = at::ones({bytes}, at::kByte)] {
          while (!stop_) peer.take(tensor);
        }) {}
  ~Transfer() {
    stop_ = true;
    thread_.join();
  }
  Transfer(const Transfer&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Returns whether all elements are `expected`. The constant trip count lets -O2 vectorise, as
// mpicxx -O3 does the same check in peers/mpi.cpp.
bool all_equal(const at::Tensor& tensor, float expected) {
  constexpr int64_t kBlock = 1024;
  const float* const values = tensor.const_data_ptr<float>();
  const int64_t blocks = tensor.numel() / kBlock * kBlock;
  int different = 0;
  for (int64_t i = 0; i < blocks; i += kBlock) {
    for (int64_t j = 0; j < kBlock; ++j) different += values[i + j] != expected;
  }
  for (int64_t i = blocks; i < tensor.numel(); ++i) different += values[i] != expected;
  return different == 0;
}

// Sends `tensor`, a floating-point tensor with equal elements, and returns what the caller has
// after both sides have added 1.
at::Tensor add_on_both(EchoPeer& peer, const at::Tensor& tensor) {
  const at::Tensor sum = peer.add_one(tensor).add_(1);
  const float expected = *tensor.const_data_ptr<float>() + 2;
  const bool right = sum.numel() == tensor.numel() && all_equal(sum, expected);
  if (!right) throw std::runtime_error("a sum is wrong");
  return sum;
}

// Runs the caller process: measures each requested turn until the parent closes `control`.
void run_caller(EchoPeer& peer, int control) {
  constexpr double kWarmUpUs = 20'000;
  const char ready = 1;
  write_all(control, &ready, 1);
  Turn turn{};
  while (read_all(control, &turn, sizeof turn)) {
    at::Tensor tensor = turn.bytes % 4 == 0 ? at::arange(turn.bytes / 4, at::kFloat)
                                            : at::zeros({turn.bytes}, at::kByte);
    if (!at::equal(peer.echo(tensor), tensor)) throw std::runtime_error("the echo is not the call");
    if (turn.add) tensor = at::zeros({turn.bytes / 4});
    const auto call = [&] {
      // The last reply becomes the next call's tensor, so that no value is sent twice.
      const at::Tensor reply = turn.add ? add_on_both(peer, tensor) : peer.echo(tensor);
      if (turn.add) tensor = reply;
    };
    std::optional<Transfer> transfer;
    if (turn.beside > 0) transfer.emplace(peer, turn.beside);
    for (const double end = now_us() + kWarmUpUs; now_us() < end;) call();
    std::vector<double> result;
    for (int64_t i = 0; i < turn.calls; ++i) {
      const double start = now_us();
      call();
      result.push_back(now_us() - start);
    }
    transfer.reset();
    result.push_back(turn.flood_calls > 0 ? peer.flood(tensor, turn.flood_calls, turn.in_flight)
                                          : 0);
    write_all(control, result.data(), result.size() * sizeof(double));
  }
}

int listen_on_localhost(uint16_t& port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(fd, 8) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw std::runtime_error("cannot listen on localhost");
  }
  port = ntohs(address.sin_port);
  return fd;
}

// The two processes of an implementation. The parent has no threads, so forking them is safe.
class Pair {
 public:
  Pair(Implementation implementation, const std::string& folder)
      : implementation_(std::move(implementation)) {
    EchoSetup setup;
    setup.transport = implementation_.transport;
    setup.folder = folder + "/" + implementation_.name;
    std::filesystem::create_directory(setup.folder);
    setup.listen_fd = listen_on_localhost(setup.port);
    int data[2], control[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, data) != 0 ||
        socketpair(AF_UNIX, SOCK_STREAM, 0, control) != 0) {
      throw std::runtime_error("no socket pair");
    }
    for (const int rank : {0, 1}) {
      setup.rank = rank;
      setup.pair_fd = data[rank];
      processes_[rank] = start(setup, control[1]);
    }
    close(setup.listen_fd);
    close(data[0]);
    close(data[1]);
    close(control[1]);
    control_ = control[0];
    char ready = 0;
    if (!read_all(control_, &ready, 1)) throw std::runtime_error(name() + " did not start");
    signal_both(SIGSTOP);
  }

  ~Pair() {
    signal_both(SIGKILL);
    for (const pid_t process : processes_) waitpid(process, nullptr, 0);
    close(control_);
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  const std::string& name() const { return implementation_.name; }

  /// Returns the CPU time that both processes have used until now, in µs.
  double cpu_us() const {
    double sum = 0;
    for (const pid_t process : processes_) {
      clockid_t clock{};
      timespec time{};
      if (clock_getcpuclockid(process, &clock) == 0) clock_gettime(clock, &time);
      sum += static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
    }
    return sum;
  }

  /// Returns the time of each single call in µs, then the duration of all concurrent calls.
  std::vector<double> measure(const Turn& turn) {
    signal_both(SIGCONT);
    write_all(control_, &turn, sizeof turn);
    std::vector<double> result(static_cast<size_t>(turn.calls) + 1);
    if (!read_all(control_, result.data(), result.size() * sizeof(double))) {
      throw std::runtime_error(name() + " failed");
    }
    signal_both(SIGSTOP);
    return result;
  }

 private:
  pid_t start(const EchoSetup& setup, int control) {
    const pid_t parent = getpid();
    const pid_t process = fork();
    if (process < 0) throw std::runtime_error("cannot fork");
    if (process > 0) return process;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    try {
      at::set_num_threads(1);
      const auto peer = implementation_.make(setup);
      if (setup.rank == 0) {
        run_caller(*peer, control);
      } else {
        close(control);  // so that the parent notices when the caller ends
        peer->serve();
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s, rank %d: %s\n", name().c_str(), setup.rank, error.what());
      _exit(1);
    }
    _exit(0);
  }

  void signal_both(int signal) {
    for (const pid_t process : processes_) kill(process, signal);
  }

  const Implementation implementation_;
  pid_t processes_[2] = {-1, -1};
  int control_ = -1;
};

// Rounds a time in µs to ten nanoseconds.
double rounded(double us) { return std::round(us * 100) / 100; }

double quantile(const std::vector<double>& sorted, double q) {
  const auto last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<size_t>(q * last + 0.5)];
}

struct Samples {
  std::vector<double> call_us;
  double flood_us = 0;
  int64_t flood_calls = 0;
  double cpu_us = 0;  // of both processes, warming up included
  double wall_us = 0;
};

// Adds the times of calls without other transfers, and how many times these take beside them.
void add_alone(Json& line, Samples& alone) {
  std::sort(alone.call_us.begin(), alone.call_us.end());
  for (const auto& [key, q] : {std::pair("p50", 0.5), {"p99", 0.99}}) {
    const double us = rounded(quantile(alone.call_us, q));
    line[std::string("alone_") + key + "_us"] = us;
    line[std::string(key) + "_ratio"] = rounded(line[std::string(key) + "_us"].get<double>() / us);
  }
}

Json summary(const std::string& name, int64_t bytes, const Options& options, Samples& samples) {
  std::sort(samples.call_us.begin(), samples.call_us.end());
  const double p50 = quantile(samples.call_us, 0.5);
  Json line{{"event", "bench"},   {"name", "echo"},           {"impl", name},
            {"bytes", bytes},     {"world_size", 2},          {"pinned", options.pin},
            {"add", options.add}, {"beside", options.beside}, {"verified", true}};
  line["calls"] = samples.call_us.size();
  line["p50_us"] = rounded(p50);
  line["p90_us"] = rounded(quantile(samples.call_us, 0.9));
  line["p99_us"] = rounded(quantile(samples.call_us, 0.99));
  line["per_s"] = nullptr;  // with options.in_flight concurrent calls
  if (samples.flood_us > 0) {
    line["per_s"] = std::round(static_cast<double>(samples.flood_calls) / samples.flood_us * 1e6);
  }
  // Of both processes during a call: their CPU time is proportional to the time that they run.
  line["cpu_us"] = rounded(p50 * samples.cpu_us / samples.wall_us);
  line["gb_per_s"] =
      std::round(2e3 * static_cast<double>(bytes) / p50) / 1e6;  // in both directions
  return line;
}

void print(const Json& line) { std::printf("%s\n", line.dump().c_str()); }

void run_size(std::vector<std::unique_ptr<Pair>>& pairs, int64_t bytes, const Options& options) {
  // Limits the calls to about 1 GiB in each direction, but makes at least 11, enough for a median.
  const int64_t affordable =
      std::max<int64_t>((int64_t{1} << 30) / std::max<int64_t>(bytes, 1), 11);
  const int64_t total = std::min(options.iterations, affordable);
  const int64_t rounds = std::min(options.rounds, total);
  Turn turn{bytes,      (total + rounds - 1) / rounds, 0, options.in_flight, options.beside,
            options.add};
  // Makes no concurrent calls with larger tensors, because memory bandwidth would dominate them.
  if (bytes <= (int64_t{1} << 20) && options.beside == 0 && !options.add)
    turn.flood_calls = std::max(turn.calls, 2 * options.in_flight);
  Turn without_transfer = turn;
  without_transfer.beside = 0;
  std::map<std::string, Samples> all, alone;
  for (int64_t round = 0; round < rounds; ++round) {
    for (auto& pair : pairs) {
      Samples& samples = all[pair->name()];
      if (turn.beside > 0) {
        const std::vector<double> times = pair->measure(without_transfer);
        auto& of_pair = alone[pair->name()].call_us;
        of_pair.insert(of_pair.end(), times.begin(), times.end() - 1);
      }
      const double cpu_before = pair->cpu_us(), before = now_us();
      const std::vector<double> result = pair->measure(turn);
      samples.wall_us += now_us() - before;
      samples.cpu_us += pair->cpu_us() - cpu_before;
      samples.call_us.insert(samples.call_us.end(), result.begin(), result.end() - 1);
      samples.flood_us += result.back();
      samples.flood_calls += turn.flood_calls;
    }
  }
  for (const auto& pair : pairs) {
    Json line = summary(pair->name(), bytes, options, all[pair->name()]);
    if (turn.beside > 0) add_alone(line, alone[pair->name()]);
    print(line);
  }
  std::fflush(stdout);
}

void run(const Options& options) {
  if (options.pin) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(0, &cpus);
    if (sched_setaffinity(0, sizeof cpus, &cpus) != 0) throw std::runtime_error("cannot pin");
  }
  char folder[] = "/tmp/bench_echo_XXXXXX";
  if (mkdtemp(folder) == nullptr) throw std::runtime_error("no folder in /tmp");
  {
    std::vector<std::unique_ptr<Pair>> pairs;
    for (const Implementation& implementation : implementations()) {
      const auto& only = options.only;
      const bool wanted =
          only.empty() || std::find(only.begin(), only.end(), implementation.name) != only.end();
      if (wanted) pairs.push_back(std::make_unique<Pair>(implementation, folder));
    }
    for (const int64_t bytes : options.sizes) run_size(pairs, bytes, options);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace distrain::bench

int main(int argc, char** argv) {
  distrain::bench::Options options;
  CLI::App app("RPC echo: distrain beside LibTorch's TensorPipeAgent and a raw socket");
  app.add_option("--iterations", options.iterations, "calls for each implementation and size")
      ->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds, "turns these are spread over")
      ->check(CLI::PositiveNumber);
  app.add_option("--in-flight", options.in_flight, "calls at a time for per_s")
      ->check(CLI::PositiveNumber);
  app.add_option("--bytes", options.sizes, "tensor sizes")->delimiter(',');
  app.add_flag_callback(
      "--all-sizes", [&] { options.sizes = {4, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26}; },
      "4 bytes to 64 MiB");
  app.add_option("--impl", options.only, "only these")->delimiter(',');
  app.add_flag("--add", options.add, "both sides add 1 and the caller checks the sum");
  app.add_option("--beside", options.beside,
                 "bytes of tensors that another thread sends; also measures without them");
  app.add_flag("--pin", options.pin, "all processes on one CPU");
  CLI11_PARSE(app, argc, argv);
  try {
    distrain::bench::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_echo: %s\n", error.what());
    return 1;
  }
  return 0;
}
