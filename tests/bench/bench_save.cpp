// Measures saves of a table on servers while two trainers make steps. Rank 0 saves, the next ranks
// are servers, and the last ones trainers; all are processes of this host. Prints a JSON line.
// Usage: bench_save [log2 of the rows [servers]]
#include <cstdio>
#include <filesystem>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/app/process/process_setup.h"
#include "../src/job/host/table_parts.h"
#include "distrain/autograd/context.h"
#include "distrain/net/socket.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/store/hash.h"
#include "distrain/table/sharded_embedding.h"

using namespace distrain;

namespace {

constexpr int kTrainers = 2, kTurns = 5;
constexpr int64_t kDim = 16, kIds = 1000;
int log2_rows = 20, servers = 4;
const std::string folder =
    std::filesystem::temp_directory_path() / ("bench-save-" + std::to_string(getpid()));
std::vector<int> server_ranks;
std::atomic<bool> is_over = false;

struct SilentSink final : job::EventSink {
  void emit(std::string_view, const job::Json&) override {}
  void joined(std::string_view, const job::OptionMap&) override {}
};

double now() { return 1e-9 * static_cast<double>(base::Clock::now().time_since_epoch().count()); }
auto open_table(rpc::Agent& agent) {
  const std::vector<table::TableOptions> tables = {
      {.name = "rows", .dim = kDim, .range = 0.01, .optimizer = {"adagrad", {{"lr", 0.01}}}}};
  return std::make_shared<table::ShardedEmbedding>(agent, server_ranks, tables, optim::Sharing{});
}

// Copies, hashes and writes `bytes` bytes in pieces. Returns the seconds.
double copy(rpc::CallContext& call, uint64_t bytes) {
  const std::string name = "copy" + std::to_string(call.agent.rank());
  const std::vector<uint8_t> source(bytes, 1);
  std::vector<uint8_t> piece(store::kPieceBytes);
  std::filesystem::remove(folder + "/" + name);
  const double start = now();
  const store::Disk disk;
  store::OutputFile file = store::OpenFolder::at(disk, folder)->create(name);
  store::ContentHasher hasher;
  for (uint64_t first = 0; first < bytes; first += piece.size()) {
    piece.resize(std::min<uint64_t>(piece.size(), bytes - first));
    std::copy_n(source.data() + first, piece.size(), piece.data());
    hasher.add(piece);
    file.write(piece);
  }
  file.finish();
  return now() - start;
}

// Makes steps until stop() is called. Returns when each step began and ended.
at::Tensor train(rpc::CallContext& call) {
  const auto table = open_table(call.agent);
  optim::DistributedOptimizer optimizer(call.agent, std::vector<optim::ParameterGroup>{},
                                        optim::Sharing{});
  optimizer.add(table);
  at::manual_seed(static_cast<uint64_t>(call.agent.rank()));
  std::vector<double> times;
  while (!is_over) {
    const at::Tensor ids = at::randint(int64_t{1} << log2_rows, {kIds}, at::kLong);
    times.push_back(now());
    autograd::Context context(call.agent);
    autograd::backward(context, table->look_up({{0, ids}}));
    optimizer.step(context);
    times.push_back(now());
  }
  table->settle();
  return at::tensor(times, at::kDouble).view({-1, 2});
}
void stop() { is_over = true; }

at::Tensor on_servers(const std::function<base::Future<double>(int rank)>& call) {
  std::vector<base::Future<double>> replies;
  for (const int rank : server_ranks) replies.push_back(call(rank));
  std::vector<double> results;
  for (const auto& reply : replies) results.push_back(reply.wait());
  return at::tensor(results, at::kDouble);
}

void measure(rpc::Agent& agent, job::TableParts& parts) {
  const auto memories = [&] {
    return on_servers([&](int rank) { return agent.rpc_async<&base::peak_rss_mb>(rank); });
  };
  const int64_t rows = int64_t{1} << log2_rows, chunk = std::min<int64_t>(rows, 16'384);
  const auto table = open_table(agent);
  const at::Tensor empty = memories();
  for (int64_t first = 0; first < rows; first += chunk) {
    autograd::Context context(agent);
    table->look_up({{0, at::arange(first, first + chunk)}});
  }
  std::vector<base::Future<at::Tensor>> training;
  for (int i = 1; i <= kTrainers; ++i) {
    training.push_back(agent.rpc_async<&train>(rpc::To(servers + i).without_deadline()));
  }
  sleep(2);  // until the trainers' buffers exist
  const at::Tensor before = memories();
  parts.set({"rows"}, server_ranks);
  store::CheckpointStore checkpoints(folder);
  checkpoints.prepare();
  // Rows: begin and end of a save, its stalled_s, begin and seconds of a copy.
  at::Tensor turns = at::empty({5, kTurns}, at::kDouble), growth;
  uint64_t bytes = 0;  // of a checkpoint
  for (int i = 0; i < kTurns; ++i) {
    sleep(1);
    turns[0][i] = now();
    const auto saving = checkpoints.begin(i, job::Json::object());
    saving->state()["tables"] = parts.begin(*saving, i);
    turns[2][i] = parts.finish(*saving);
    const std::string path = saving->commit();
    turns[1][i] = now();
    if (i == 0) growth = (memories() - before).max();
    bytes = 0;
    for (const auto& file : std::filesystem::directory_iterator(path)) bytes += file.file_size();
    sleep(1);
    turns[3][i] = now();
    const uint64_t part = bytes / server_ranks.size();
    turns[4][i] = on_servers([&](int rank) { return agent.rpc_async<&copy>(rank, part); }).max();
  }
  for (int i = 1; i <= kTrainers; ++i) agent.rpc_sync<&stop>(servers + i);
  std::vector<at::Tensor> all;
  for (const auto& each : training) all.push_back(each.wait());
  const at::Tensor times = at::cat(all), ms = (times.select(1, 1) - times.select(1, 0)) * 1000;
  const auto overlaps = [&](const at::Tensor& from, const at::Tensor& to) {
    return ((times.slice(1, 1) > from) & (times.slice(1, 0, 1) < to)).any(1);
  };
  const at::Tensor is_during = overlaps(turns[0], turns[1]);
  const at::Tensor is_copying = overlaps(turns[3], turns[3] + turns[4]);
  const at::Tensor during = ms.index({is_during}), outside = ms.index({~(is_during | is_copying)});
  job::Json line{
      {"event", "bench"}, {"name", "save"}, {"rows", rows}, {"servers", servers}, {"bytes", bytes}};
  const auto add = [&](const char* name, const at::Tensor& value) {
    line[name] = std::round(value.item<double>() * 1000) / 1000;
  };
  add("outside_p50_ms", at::quantile(outside, 0.5));
  add("outside_p99_ms", at::quantile(outside, 0.99));
  add("during_p50_ms", at::quantile(during, 0.5));
  add("during_p99_ms", at::quantile(during, 0.99));
  add("lost_s", (during - outside.mean()).sum() / kTrainers / kTurns / 1000);
  add("stalled_s", turns[2].median());
  add("save_s", (turns[1] - turns[0]).median());
  add("copy_s", turns[4].median());
  add("growth_mb", growth);
  add("memory_ratio", (before - empty).sum() * 1e6 / (rows * kDim * 2 * sizeof(float)));
  std::printf("%s\n", line.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) log2_rows = std::atoi(argv[1]);
  if (argc > 2) servers = std::atoi(argv[2]);
  for (int i = 1; i <= servers; ++i) server_ranks.push_back(i);
  app::set_up_process();  // as jobs do
  const net::Fd listening = std::move(net::listen_tcp("localhost", 0).value());
  rpc::AgentOptions options;
  options.master_port = net::local_name(listening.get()).port;
  options.world_size = 1 + servers + kTrainers;
  for (int i = 0; i < options.world_size; ++i) options.names.push_back("w" + std::to_string(i));
  for (int rank = options.world_size - 1; rank >= 0; --rank) {
    if (fork() != 0) continue;  // this process has no other threads
    at::set_num_threads(1);
    options.rank = rank;
    if (rank == 0) options.listen_fd = listening.get();
    SilentSink sink;
    rpc::Agent agent(options);
    autograd::install(agent);
    optim::install(agent);
    table::install(agent);
    job::TableParts::expose(agent);
    agent.expose<&base::peak_rss_mb>("peak_rss_mb");
    agent.expose<&copy>("copy");
    agent.expose<&train>("train");
    agent.expose<&stop>("stop");
    agent.provide(std::make_shared<job::TablePart>(&agent, sink, job::TablePart::Options{}));
    agent.provide(std::make_shared<job::TableParts>(&agent, sink));
    agent.join();
    if (rank == 0) measure(agent, agent.local<job::TableParts>());
    agent.shutdown();
    std::fflush(stdout);
    _exit(0);
  }
  int failed = 0;
  for (int status = 0; wait(&status) > 0;) failed += status != 0;
  std::filesystem::remove_all(folder);
  return failed == 0 ? 0 : 1;
}
