// ctest: timeout=120
#include <cstdio>
#include <fstream>
#include <mutex>
#include <thread>

#include <ATen/Functions.h>

#include "distrain/net/socket.h"
#include "distrain/scenario/hybrid.h"
#include "support/catch.h"

using namespace distrain;
using scenario::HybridOptions;
using scenario::Job;
using scenario::Json;
using scenario::NamedTensors;
using scenario::Outcome;

namespace {

class NoSink final : public scenario::EventSink {
 public:
  void emit(std::string_view event, const Json& fields) override {
    std::lock_guard lock(mutex_);
    events.emplace_back(std::string(event), fields);
  }
  void set_role(std::string_view) override {}
  std::vector<std::pair<std::string, Json>> events;

 private:
  std::mutex mutex_;
};

struct Finished {
  NamedTensors parameters;
  std::map<int, Outcome> outcomes;  // by rank
};

// All ranks of the job as threads of this process.
Finished run_job(HybridOptions options) {
  Finished finished;
  options.on_finished = [&](const NamedTensors& parameters) { finished.parameters = parameters; };
  net::Fd socket = std::move(net::listen_tcp("localhost", 0).value());
  const uint16_t port = net::local_name(socket.get()).port;
  std::vector<std::thread> ranks;
  std::vector<std::string> errors(static_cast<size_t>(scenario::hybrid_world_size(options)));
  std::mutex mutex;
  for (int rank = 0; rank < scenario::hybrid_world_size(options); ++rank) {
    Job job;
    job.rank = rank;
    job.master_port = port;
    job.started = std::chrono::steady_clock::now();
    job.peer_timeout_s = 0;
    if (rank == 0) job.listen_fd = socket.release();
    ranks.emplace_back([&, job, rank] {
      NoSink sink;
      try {
        Outcome outcome = scenario::run_hybrid(
            options, job, [&](const scenario::OptionMap&) { return options; }, sink);
        std::lock_guard lock(mutex);
        finished.outcomes[rank] = std::move(outcome);
      } catch (const std::exception& e) {
        errors[static_cast<size_t>(rank)] = e.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& error : errors) {
    CAPTURE(error);
    REQUIRE(error.empty());
  }
  return finished;
}

NamedTensors run_local(HybridOptions options) {
  NamedTensors parameters;
  options.on_finished = [&](const NamedTensors& p) {
    for (const auto& [name, tensor] : p) parameters[name] = tensor.detach().clone();
  };
  NoSink sink;
  scenario::run_hybrid_local(options, Job{}, sink);
  return parameters;
}

// One reduction order differs at most: the sum over trainers. 1e-5 is the bound.
void check_equal(const NamedTensors& distributed, const NamedTensors& local) {
  REQUIRE(distributed.size() == 3);
  REQUIRE(local.size() == 3);
  for (const auto& [name, tensor] : local) {
    CAPTURE(name);
    const at::Tensor& other = distributed.at(name);
    REQUIRE(other.sizes() == tensor.sizes());
    CHECK((other - tensor).abs().max().item<double>() <= 1e-5);
  }
}

// Sixty examples over eighty words, some empty; the last bag of a batch may be.
std::string write_corpus() {
  std::string path = "/tmp/distrain-hybrid-test-XXXXXX";
  const int fd = mkstemp(path.data());
  REQUIRE(fd >= 0);
  close(fd);
  std::ofstream file(path);
  for (int i = 0; i < 60; ++i) {
    file << "__label__"
         << "abc"[i % 3];
    for (int k = 0; k < i % 7; ++k) file << " w" << (i * 13 + k * 29 + (i % 3) * 7) % 80;
    file << "\n";
  }
  return path;
}

}  // namespace

TEST_CASE("sync training equals the one-process run in every parameter") {
  HybridOptions options;
  options.mode = "sync";
  options.epochs = 5;  // 50 steps
  options.trainers = GENERATE(1, 2, 3);
  options.optimizer = GENERATE("sgd", "adagrad", "adam");
  options.seed = 7;
  CAPTURE(options.trainers, options.optimizer);
  const Finished finished = run_job(options);
  check_equal(finished.parameters, run_local(options));
  const int ps = scenario::hybrid_world_size(options) - 1;
  CHECK(finished.outcomes.at(ps).fields["updates"] == 50);
  for (const auto& [rank, outcome] : finished.outcomes) {
    CHECK(outcome.fields["live_rrefs"] == 0);
    CHECK(outcome.fields["live_contexts"] == 0);
  }
}

TEST_CASE("async training applies one update for each trainer and step") {
  HybridOptions options;
  options.epochs = 5;
  options.trainers = GENERATE(1, 2, 4);
  const Finished finished = run_job(options);
  const int ps = scenario::hybrid_world_size(options) - 1;
  CHECK(finished.outcomes.at(ps).fields["updates"] == 50 * options.trainers);
  CHECK(finished.outcomes.at(0).fields["steps"] == 50);
  // Lookup, backward, update: at least three calls for each step.
  CHECK(finished.outcomes.at(0).fields["rpc"]["calls"] >= 150);
  if (options.trainers == 1) check_equal(finished.parameters, run_local(options));
}

TEST_CASE(
    "training on a file equals the one-process run, and is evaluated on all of the test file") {
  HybridOptions options;
  options.mode = "sync";
  options.epochs = 4;
  options.batch_size = 4;
  options.data = options.test_data = write_corpus();
  options.optimizer = "adagrad";
  const Finished finished = run_job(options);
  check_equal(finished.parameters, run_local(options));
  NoSink sink;
  const Outcome local = scenario::run_hybrid_local(options, Job{}, sink);
  const int master = options.trainers;
  CHECK(finished.outcomes.at(master).fields["accuracy"] == local.fields["accuracy"]);
  CHECK(finished.outcomes.at(master).fields["loss"].get<double>() ==
        Approx(local.fields["loss"].get<double>()).margin(1e-5));
  std::remove(options.data.c_str());
}
