// Measures tables whose rows are spread over servers: each step of a trainer looks rows up and
// pushes a gradient for each. Servers and trainers are processes of this host. Prints a JSON
// line with the steps and ids of all trainers per second, the CPU time of all processes, and the
// times of single steps. The steps include no net.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/app/process/process_setup.h"
#include "distrain/autograd/context.h"
#include "distrain/base/clock.h"
#include "distrain/base/random.h"
#include "distrain/net/socket.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/table/sharded_embedding.h"

namespace distrain::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string what = "both";
  std::string optimizer = "rowwise-adagrad";
  std::string wire_dtype = "fp32";
  int64_t rows = 4000;     // ids of a lookup
  int64_t tables = 1;      // lookups in a step, each in a table of its own
  int64_t space = 25'000;  // different ids of a table
  int64_t dim = 32;
  int64_t bag = 0;  // ids of a bag; 0: rows are not pooled
  int servers = 1;
  int trainers = 1;
  int64_t steps = 500;
  int64_t prefetch = 0;
  double zipf = 0;  // exponent of the distribution; 0: uniform

  int world_size() const { return servers + trainers; }
};

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Draws ids of a Zipf distribution by rejection-inversion (Hörmann and Derflinger 1996).
class Zipf {
 public:
  Zipf(double exponent, int64_t count) : s_(exponent), n_(static_cast<double>(count)) {
    low_ = integral(1.5) - 1;
    high_ = integral(n_ + 0.5);
  }
  int64_t draw(base::Random& random) const {
    for (;;) {
      const double u = high_ + random.unit() * (low_ - high_);
      const double x = inverse(u);
      const double k = std::clamp(std::floor(x + 0.5), 1.0, n_);
      if (u >= integral(k + 0.5) - std::pow(k, -s_)) return static_cast<int64_t>(k) - 1;
    }
  }

 private:
  double integral(double x) const { return (std::pow(x, 1 - s_) - 1) / (1 - s_); }
  double inverse(double y) const { return std::pow(1 + y * (1 - s_), 1 / (1 - s_)); }

  double s_, n_, low_, high_;
};

std::vector<table::Query> draw_queries(const Options& options, base::Random& random) {
  std::optional<Zipf> zipf;
  if (options.zipf > 0) zipf.emplace(options.zipf, options.space);
  std::vector<table::Query> queries;
  for (int64_t i = 0; i < options.tables; ++i) {
    table::Query query{.table = static_cast<int>(i), .ids = at::empty({options.rows}, at::kLong)};
    auto* ids = query.ids.mutable_data_ptr<int64_t>();
    for (int64_t k = 0; k < options.rows; ++k) {
      ids[k] = zipf ? zipf->draw(random)
                    : static_cast<int64_t>(random.below(static_cast<uint64_t>(options.space)));
    }
    if (options.bag > 0) {
      query.offsets = at::arange(0, options.rows, options.bag, at::kLong);
      query.pooling = table::Pooling::kSum;
    }
    queries.push_back(std::move(query));
  }
  return queries;
}

std::vector<table::TableOptions> tables_of(const Options& options) {
  std::vector<table::TableOptions> tables;
  for (int64_t i = 0; i < options.tables; ++i) {
    tables.push_back({.name = "table" + std::to_string(i),
                      .dim = options.dim,
                      .seed = static_cast<uint64_t>(i),
                      .range = 0.01,
                      .optimizer = {options.optimizer, {{"lr", 0.01}}}});
  }
  return tables;
}

rpc::AgentOptions agent_options(const Options& options, int rank, int listen_fd, uint16_t port) {
  rpc::AgentOptions agent;
  agent.rank = rank;
  agent.world_size = options.world_size();
  for (int i = 0; i < options.world_size(); ++i) {
    agent.names.push_back((i < options.servers ? "server" : "trainer") + std::to_string(i));
  }
  agent.master_port = port;
  if (rank == 0) agent.listen_fd = listen_fd;
  return agent;
}

struct Measured {
  double cpu_s = 0;   // of this process, during the steps
  double wall_s = 0;  // 0 for a server
  std::vector<double> step_us;
};

// Makes the steps of a trainer. `meet` waits for all trainers.
Measured train(rpc::Agent& agent, const Options& options, int trainer,
               const std::function<void()>& meet) {
  constexpr int64_t kWarmUp = 20;
  constexpr int kBatches = 20;
  std::vector<int> servers;
  for (int i = 0; i < options.servers; ++i) servers.push_back(i);
  const optim::Sharing sharing{.mode = optim::Sharing::Mode::kAsync,
                               .participants = options.trainers,
                               .participant = trainer};
  table::LookupSettings settings;
  if (options.wire_dtype == "bf16") settings.wire_dtype = at::kBFloat16;
  const auto tables = std::make_shared<table::ShardedEmbedding>(agent, servers, tables_of(options),
                                                                sharing, settings);
  optim::DistributedOptimizer optimizer(agent, {}, {}, optim::Rule{optim::Sgd{.lr = 0.01}, {}, 0},
                                        sharing);
  optimizer.add(tables);
  base::Random random({7, static_cast<uint64_t>(trainer)});
  std::vector<std::vector<table::Query>> batches;
  for (int i = 0; i < kBatches; ++i) batches.push_back(draw_queries(options, random));
  std::deque<table::ShardedEmbedding::Pending> ahead;
  int64_t next = 0;
  const auto send = [&] {
    while (next < options.steps + kWarmUp &&
           static_cast<int64_t>(ahead.size()) <= options.prefetch) {
      ahead.push_back(tables->start(batches[static_cast<size_t>(next++ % kBatches)]));
    }
  };
  Measured measured;
  double cpu = 0;
  base::TimePoint begin{};
  for (int64_t step = 0; step < options.steps + kWarmUp; ++step) {
    if (step == kWarmUp) {
      tables->settle();
      meet();
      cpu = cpu_seconds();
      begin = base::Clock::now();
    }
    const base::TimePoint start = base::Clock::now();
    if (options.what == "pull" && step >= kWarmUp) {  // the rows exist now
      const at::NoGradGuard no_grad;
      tables->look_up(batches[static_cast<size_t>(step % kBatches)]);
    } else {
      autograd::Context context(agent);
      send();
      table::ShardedEmbedding::Pending pending = std::move(ahead.front());
      ahead.pop_front();
      const std::vector<at::Tensor> rows = tables->finish(std::move(pending));
      autograd::backward(context, rows);  // each number's gradient is 1
      optimizer.step(context);
    }
    if (step >= kWarmUp) measured.step_us.push_back(base::seconds_since(start) * 1e6);
  }
  tables->settle();
  measured.wall_s = base::seconds_since(begin);
  measured.cpu_s = cpu_seconds() - cpu;
  return measured;
}

// The pipes between the parent and a rank: a rank writes 0 when it is ready and its figures at the
// end; the parent writes one byte to start the measured steps, or to end a server.
struct Pipes {
  int to_parent[2], to_rank[2];
};

void write_all(int fd, const void* data, size_t size) {
  const auto* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = write(fd, at, size);
    if (n <= 0) throw std::runtime_error("a process has ended");
    at += n;
    size -= static_cast<size_t>(n);
  }
}

bool read_all(int fd, void* data, size_t size) {
  auto* at = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t n = read(fd, at, size);
    if (n <= 0) return false;
    at += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

void run_rank(const Options& options, int rank, int listen_fd, uint16_t port, const Pipes& pipes) {
  app::set_up_process();  // as jobs do
  at::set_num_threads(1);
  rpc::Agent agent(agent_options(options, rank, listen_fd, port));
  autograd::install(agent);
  optim::install(agent);
  table::install(agent);
  agent.join();
  const auto meet = [&] {
    const char ready = 0;
    char go = 0;
    write_all(pipes.to_parent[1], &ready, 1);
    if (!read_all(pipes.to_rank[0], &go, 1)) _exit(1);
  };
  Measured measured;
  if (rank < options.servers) {
    meet();
    const double cpu = cpu_seconds();
    char end = 0;
    if (!read_all(pipes.to_rank[0], &end, 1)) _exit(1);
    measured.cpu_s = cpu_seconds() - cpu;
  } else {
    measured = train(agent, options, rank - options.servers, meet);
  }
  const uint64_t count = measured.step_us.size();
  write_all(pipes.to_parent[1], &measured.cpu_s, sizeof(double));
  write_all(pipes.to_parent[1], &measured.wall_s, sizeof(double));
  write_all(pipes.to_parent[1], &count, sizeof count);
  write_all(pipes.to_parent[1], measured.step_us.data(), count * sizeof(double));
  agent.shutdown();
}

template <class T>
T received(const Pipes& pipes) {
  T value{};
  if (!read_all(pipes.to_parent[0], &value, sizeof value)) {
    throw std::runtime_error("a rank has failed");
  }
  return value;
}

void run(const Options& options) {
  const net::Fd listening = std::move(net::listen_tcp("localhost", 0).value());
  const uint16_t port = net::local_name(listening.get()).port;
  std::vector<Pipes> ranks(static_cast<size_t>(options.world_size()));
  for (int rank = 0; rank < options.world_size(); ++rank) {
    Pipes& pipes = ranks[static_cast<size_t>(rank)];
    if (pipe(pipes.to_parent) != 0 || pipe(pipes.to_rank) != 0) {
      throw std::runtime_error("no pipe");
    }
    const pid_t parent = getpid();
    const pid_t process = fork();  // this process has no other threads
    if (process < 0) throw std::runtime_error("cannot fork");
    if (process > 0) {
      close(pipes.to_parent[1]);
      continue;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    try {
      run_rank(options, rank, listening.get(), port, pipes);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      _exit(1);
    }
    _exit(0);
  }
  const char go = 0;
  for (const Pipes& pipes : ranks) received<char>(pipes);
  for (const Pipes& pipes : ranks) write_all(pipes.to_rank[1], &go, 1);
  double trainers_cpu = 0, servers_cpu = 0, wall = 0;
  std::vector<double> step_us;
  for (int i = options.world_size() - 1; i >= 0; --i) {  // trainers first
    const Pipes& pipes = ranks[static_cast<size_t>(i)];
    if (i < options.servers) write_all(pipes.to_rank[1], &go, 1);
    (i < options.servers ? servers_cpu : trainers_cpu) += received<double>(pipes);
    wall = std::max(wall, received<double>(pipes));
    for (auto count = received<uint64_t>(pipes); count > 0; --count) {
      step_us.push_back(received<double>(pipes));
    }
  }
  for (int i = 0; i < options.world_size(); ++i) wait(nullptr);
  std::sort(step_us.begin(), step_us.end());
  const auto steps = static_cast<double>(step_us.size());
  const auto quantile = [&](double q) {
    return std::round(step_us[static_cast<size_t>(q * (steps - 1))]);
  };
  const Json line{
      {"event", "bench"},
      {"name", "table"},
      {"what", options.what},
      {"optimizer", options.optimizer},
      {"ids", options.rows * options.tables},
      {"tables", options.tables},
      {"dim", options.dim},
      {"bag", options.bag},
      {"space", options.space},
      {"zipf", options.zipf},
      {"servers", options.servers},
      {"trainers", options.trainers},
      {"prefetch", options.prefetch},
      {"steps_per_s", std::round(steps / wall * 10) / 10},
      {"ids_per_s", std::round(steps * static_cast<double>(options.rows * options.tables) / wall)},
      {"trainers_cpu_us", std::round(trainers_cpu / steps * 1e6)},
      {"servers_cpu_us", std::round(servers_cpu / steps * 1e6)},
      {"p50_us", quantile(0.5)},
      {"p99_us", quantile(0.99)}};
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

int main_(int argc, char** argv) {
  Options options;
  CLI::App app("Measures lookups and updates of tables on servers.");
  app.add_option("--what", options.what, "pull: lookups; both: lookups and updates")
      ->check(CLI::IsMember({"pull", "both"}));
  app.add_option("--optimizer", options.optimizer, "the servers' update rule");
  app.add_option("--wire-dtype", options.wire_dtype, "fp32 or bf16");
  app.add_option("--rows", options.rows, "ids of a lookup");
  app.add_option("--tables", options.tables, "lookups of a step, each in its own table");
  app.add_option("--space", options.space, "different ids of a table");
  app.add_option("--zipf", options.zipf, "exponent of the ids' distribution, above 1; 0: uniform");
  app.add_option("--dim", options.dim, "numbers of a row");
  app.add_option("--bag", options.bag, "ids of a bag; 0: no pooling");
  app.add_option("--servers", options.servers, "processes that hold the rows");
  app.add_option("--trainers", options.trainers, "processes that look rows up");
  app.add_option("--prefetch", options.prefetch, "lookups that are sent ahead");
  app.add_option("--steps", options.steps, "measured steps of a trainer");
  CLI11_PARSE(app, argc, argv);
  try {
    run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_table: %s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace distrain::bench

int main(int argc, char** argv) { return distrain::bench::main_(argc, argv); }
