// ctest: timeout=120
// Tests a user-defined job on the job kit: rows of a table on a server, and a net under DDP.
#include <cmath>
#include <future>
#include <memory>
#include <mutex>

#include <ATen/Functions.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "distrain/autograd/context.h"
#include "distrain/base/random.h"
#include "distrain/membership/slot.h"
#include "distrain/nn/module.h"
#include "support/scenario_job.h"

namespace distrain::testing {

struct OwnOptions : job::TrainerOptions {
  int64_t dim = 4;
  std::string fault;  ///< a mistake in the job's code; empty: none
  OwnOptions() {
    optimizer = "adam";
    lr = 0.05;
    mode = "sync";
  }
  static void describe(job::OptionList<OwnOptions>& list) {
    list.integer("dim", &OwnOptions::dim, "numbers in a row").range(1, 64);
    list.text("fault", &OwnOptions::fault, "NAME", "what is forgotten");
  }
};

namespace {

constexpr int64_t kRows = 20, kStepsPerEpoch = 10, kBatch = 16;

struct Rows {
  at::Tensor ids, labels;
};

// Returns random rows for a step. A row is labelled 1 ("liked") if its ID is even.
Rows rows_of(const job::Step& step) {
  base::Random random({static_cast<uint64_t>(step.epoch), static_cast<uint64_t>(step.shard),
                       static_cast<uint64_t>(step.number)});
  const at::Tensor ids = at::empty({kBatch}, at::kLong);
  for (int64_t i = 0; i < kBatch; ++i) ids[i] = static_cast<int64_t>(random.below(kRows));
  return {ids, ids.remainder(2).eq(0).to(at::kFloat)};
}

std::mutex g_seed;  // the seed is global to the process, and all ranks are threads of this process

/// Seeds torch's global generator, and returns the result of `make()`.
template <class F>
auto seeded(uint64_t seed, F make) {
  const std::lock_guard lock(g_seed);
  torch::manual_seed(seed);
  return make();
}

torch::nn::Sequential make_net(const OwnOptions& options) {
  return seeded(options.seed, [&] {
    // Separate statements fix the order of creation. Arguments may be evaluated in any order.
    const torch::nn::Linear out(8, 1), hidden(options.dim, 8);
    torch::nn::Sequential net(hidden, torch::nn::ReLU(), out);
    net->register_buffer("mask", at::full({2}, -INFINITY));  // saved unchanged
    return net;
  });
}

void train_own(job::Rank& rank, const OwnOptions& options) {
  const char* const module = options.fault == "buffers" ? "normalised" : "table";
  nn::RemoteModule table(rank.agent(), "server", module, kRows, options.dim);
  ddp::DistributedDataParallel net(make_net(options), rank.group("trainer"));
  const auto timeout = rank.group("trainer").backend->getBackendOptions()->timeout;
  expect(timeout.count() == std::llround(rank.job().collective_timeout_s * 1000),
         "collectives have another deadline than the one that the user asked for");
  optim::DistributedOptimizer optimizer(
      rank.agent(),
      {{table.remote_parameters(), net.parameters(), options.rule().options},
       {{},
        options.fault == "twice" ? std::vector<at::Tensor>(net.parameters())
                                 : std::vector<at::Tensor>(),
        options.rule().options}},
      options.sharing(rank.index()));

  job::Training training(rank, options, kStepsPerEpoch);
  training.agree("rows", kRows);
  training.keep("table", table);
  training.keep("net", net);
  if (options.fault != "optimizer") training.keep(optimizer);
  const auto evaluate = [&](const job::Share& share) {
    const at::Tensor ids = at::arange(share.first(kRows), share.end(kRows), at::kLong);
    const at::Tensor scores = net.module()->forward(table.forward(ids)).squeeze(1);
    const at::Tensor labels = ids.remainder(2).eq(0).to(at::kFloat);
    const at::Tensor loss =
        at::binary_cross_entropy_with_logits(scores, labels, {}, {}, at::Reduction::Sum);
    job::Evaluation evaluation{ids.numel(), (scores > 0).eq(labels > 0).sum().item<int64_t>(),
                               loss.item<double>()};
    evaluation.sums["liked"] = labels.sum().item<double>();
    evaluation.means["mean_id"] = ids.sum().item<double>();
    return evaluation;
  };
  // Skips evaluations if the fault makes parameters NaN or infinite, because an evaluation would
  // fail before the save that the test checks.
  if (!options.fault.ends_with(".weight")) training.evaluate_epochs(evaluate);
  training.run([&](const job::Step& step) {
    const Rows rows = rows_of(step);
    autograd::Context context(rank.agent());
    const at::Tensor embedded = table.forward(rows.ids);
    const at::Tensor scores =
        options.fault == "forward" ? net.module()->forward(embedded) : net.forward(embedded);
    const at::Tensor loss = at::binary_cross_entropy_with_logits(scores.squeeze(1), rows.labels);
    if (options.fault == "backward") {
      loss.backward();
    } else {
      autograd::backward(context, {loss});
    }
    optimizer.step(context);
    const at::NoGradGuard no_grad;
    if (options.fault == "net.0.weight") at::Tensor(net.parameters()[0]).fill_(INFINITY);
    if (options.fault == "table.weight") {
      table.load_state(
          {{"weight", at::full({kRows, options.dim}, NAN)}, {"mask", at::full({2}, -INFINITY)}});
    }
    return job::Result{loss, kBatch};
  });
}

}  // namespace

const job::Definition<OwnOptions>& job_of(const OwnOptions&) {
  static const auto kJob =
      job::define<OwnOptions>("own", "a job of somebody else's")
          .metric("liked", "rows that are liked")
          .metric("mean_id", "mean number of a row")
          .role("server", 1)
          .role("trainer", &OwnOptions::trainers, train_own)
          .expose([](rpc::Agent& agent) {
            nn::expose_module(agent, "table", [](int64_t rows, int64_t dim) {
              return seeded(3, [&] {
                torch::nn::Embedding table(rows, dim);
                table->register_buffer("mask", at::full({2}, -INFINITY));
                return table;
              });
            });
            nn::expose_module(agent, "normalised", [](int64_t rows, int64_t dim) {
              return torch::nn::Sequential(torch::nn::Embedding(rows, dim),
                                           torch::nn::BatchNorm1d(dim));
            });
          });
  return kJob;
}

TEST_CASE("the ranks of a role are numbered if the role has, or may have, several") {
  const auto job = job::define<OwnOptions>("towers", "two roles")
                       .role("server", 3)
                       .role("master", 1)
                       .role("trainer", &OwnOptions::trainers);
  OwnOptions options;
  options.trainers = 1;
  CHECK(job.roles(options).names() ==
        std::vector<std::string>{"server0", "server1", "server2", "master", "trainer4"});
}

struct ServerOptions : job::TrainerOptions {
  int servers = 1;
  static void describe(job::OptionList<ServerOptions>& list) {
    list.integer("servers", &ServerOptions::servers, "start N servers").range(1, 8);
  }
};

TEST_CASE("a second option that counts ranks does not number a single rank") {
  const auto job = job::define<ServerOptions>("towers", "two counted roles")
                       .role("trainer", &ServerOptions::trainers)
                       .role("server", &ServerOptions::servers);
  CHECK(job.info().count_option == "trainers");
  ServerOptions options;
  options.trainers = 1;
  CHECK(job.roles(options).names() == std::vector<std::string>{"trainer0", "server"});
  options.servers = 2;
  CHECK(job.roles(options).names() == std::vector<std::string>{"trainer0", "server1", "server2"});
}

TEST_CASE("--world-size sets the first option that counts ranks with a function") {
  const auto job = job::define<ServerOptions>("towers", "two counted roles")
                       .role("server", &ServerOptions::servers)
                       .role("trainer", &ServerOptions::trainers, [](auto&, const auto&) {});
  CHECK(job.info().count_option == "trainers");
  ServerOptions options;
  options.trainers = 1;
  CHECK(job.roles(options).names() == std::vector<std::string>{"server", "trainer1"});
  options.servers = 2;
  CHECK(job.roles(options).names() == std::vector<std::string>{"server0", "server1", "trainer2"});
}

TEST_CASE("a parameter that is not finite is named, and not saved") {
  const Folder folder;
  OwnOptions options;
  options.steps = 1;
  options.checkpoint = {folder.path(), 0, ""};
  options.fault = GENERATE("table.weight", "net.0.weight");
  const base::Error error = error_of_job(base::ErrorKind::kNotFinite, Place::kRanks, options);
  CHECK(error.message.starts_with(options.fault + " is not finite at step 1, so it was not saved"));
  CHECK_FALSE(store::CheckpointStore::newest(folder.path()));
}

TEST_CASE("a job on the kit learns, evaluates, and prints its own fields") {
  OwnOptions options;
  options.trainers = GENERATE(1, 3);
  options.epochs = 6;
  options.log_interval = 5;
  const Finished job = run_job(Place::kRanks, options);
  const std::vector<Json> evaluations = job.all("eval", 0);
  REQUIRE(evaluations.size() == 6);
  CHECK(evaluations.back()["samples"] == kRows);
  CHECK(evaluations.back()["accuracy"] == 1.0);
  CHECK(evaluations.back()["liked"] == 10);  // summed over the shares of all trainers
  CHECK(evaluations.back()["mean_id"] == 9.5);
  CHECK(job.fields(0)["eval"]["mean_id"] == 9.5);
  CHECK(job.fields(0)["accuracy"] == 1.0);
  CHECK(job.all("step").size() == static_cast<size_t>(options.trainers) * 12);
  for (int trainer = 1; trainer <= options.trainers; ++trainer) {
    CHECK(job.fields(trainer)["steps"] == 60);
  }
}

TEST_CASE("a job on the kit resumes exactly from the middle of an epoch") {
  OwnOptions options;
  std::tie(options.optimizer, options.lr_schedule) =
      GENERATE(Catch::Generators::table<std::string, std::string>({{"adam", "constant"},
                                                                   {"adam", "plateau:0,0.5"},
                                                                   {"sgd", "warmup:1e+cosine:2e"},
                                                                   {"adamw", "warmup:1e+cosine:2e"},
                                                                   {"rmsprop", "plateau:0,0.5"}}));
  if (options.optimizer == "sgd") options.momentum = 0.9;
  CAPTURE(options.optimizer, options.lr_schedule);
  check_resume_is_exact(Place::kRanks, options, 17, 30);
}

TEST_CASE("a job on the kit saves its module and its replicas as they were at the step") {
  OwnOptions options;
  options.optimizer = "sgd";
  options.momentum = 0.9;
  check_saved_as_it_was(Place::kRanks, options, 7);
}

TEST_CASE("a job on the kit that is stopped resumes to the same end") {
  OwnOptions options;
  options.steps = 120;
  check_stop_and_go_on(Place::kRanks, options, GENERATE(0, 1, 2), 12, 0.003);
}

TEST_CASE("a job on the kit that gets a signal to save does so and continues") {
  const Folder folder;
  OwnOptions options;
  options.steps = 240;
  options.log_interval = 1;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  const int rank = GENERATE(0, 1, 2);
  StopSignals signals;
  Hooks<OwnOptions> hooks;
  hooks.job = [&](Job& job) { signals.keep(job); };
  hooks.heard = [&](const Job&, const Line& line) {
    if (line.event == "step" && line.rank == 1 && line.fields["step"] == 12) {
      signals.of(rank).request_save();
    }
  };
  const std::vector<Json> saves = run_job(Place::kRanks, options, hooks).all("checkpoint");
  REQUIRE(saves.size() == 2);
  CHECK(saves[0]["step"] >= 12);
  CHECK(saves[0]["step"] < 240);
  CHECK(saves[1]["step"] == 240);
}

TEST_CASE("collectives have the deadline of the options, by default none") {
  CHECK(Job().collective_timeout_s == 0);
  OwnOptions options;
  options.steps = 1;
  Hooks<OwnOptions> hooks;
  hooks.job = [](Job& job) { job.collective_timeout_s = 3600.5; };
  run_job(Place::kRanks, options, hooks);
}

TEST_CASE("a mistake of a job's author is reported in one line") {
  OwnOptions options;
  options.epochs = 1;
  const auto told = [&](const std::string& fault, base::ErrorKind kind) {
    options.fault = fault;
    return error_of_job(kind, Place::kRanks, options).message;
  };
  // "forward" calls the module's own forward() instead of DDP's in an autograd context.
  CHECK(contains(told("forward", base::ErrorKind::kInvalid), "forward"));
  // "backward" calls torch's backward() on a loss that depends on a remote result.
  CHECK(contains(told("backward", base::ErrorKind::kInvalid), "autograd::backward"));
  // "buffers" exposes a module with running statistics.
  CHECK(contains(told("buffers", base::ErrorKind::kInvalid), "BatchNorm"));
  // "twice" puts a parameter into two groups.
  CHECK(contains(told("twice", base::ErrorKind::kInvalid), "group"));
}

TEST_CASE("an optimizer that no checkpoint contains is reported once") {
  const Folder folder;
  OwnOptions options;
  options.epochs = 1;
  options.fault = "optimizer";
  options.checkpoint = {folder.path(), 0, ""};
  const std::vector<Json> warnings = run_job(Place::kRanks, options).all("warn");
  REQUIRE(warnings.size() == 1);
  CHECK(contains(warnings[0]["message"].get<std::string>(), "no optimizer"));
}

TEST_CASE("a process whose assigned rank is taken by one that names it asks for another rank") {
  OwnOptions options;
  options.epochs = 1;
  net::Fd socket = std::move(net::listen_tcp("localhost", 0).value());
  Job job;
  job.name = "own";
  job.master_port = net::local_name(socket.get()).port;
  job.started = std::chrono::steady_clock::now();
  job.peer_timeout_s = 0;
  job.join_timeout_s = 60;
  base::Promise<void> only_rank_2_is_missing;
  std::once_flag once;
  const auto start = [&](int rank, std::function<void(int)> placed) {
    Job its = job;
    its.rank = rank;
    its.stop = std::make_shared<job::StopSignal>();
    its.rejoins = rank == 1;  // rank 0 may not have noticed the loss of the first rank 1
    if (rank == 0) its.listen_fd = socket.release();
    return std::async(std::launch::async, [&, its, placed = std::move(placed)] {
      at::set_num_threads(1);
      const auto heard = [&](const Line& line) {
        if (line.event != "waiting" || line.fields["missing"] != Json{2}) return;
        std::call_once(once, [&] { only_rank_2_is_missing.set(); });
      };
      Listener sink(events_of<OwnOptions>(), heard, placed);
      return job_of(options).run(options, its, sink).fields;
    });
  };
  rpc::AgentOptions of_first;
  of_first.job = "distrain own";
  of_first.rank = 1;
  of_first.master_port = job.master_port;
  std::unique_ptr<rpc::Agent> first;
  std::future<void> end_of_first;
  std::future<Json> rank_1;
  std::vector<int> places;
  std::future<Json> rank_0 = start(0, {});
  std::future<Json> any = start(membership::kUnassignedRank, [&](int rank) {
    places.push_back(rank);
    if (rank == 1) {
      first = std::make_unique<rpc::Agent>(of_first);
      end_of_first = std::async(std::launch::async, [&] {
        try {
          first->join();
        } catch (const base::Exception&) {  // when the test destroys the agent
        }
      });
      const base::Future<void> joined = only_rank_2_is_missing.future();
      joined.wait_until(base::deadline_after(std::chrono::seconds(50)));
    } else if (rank == 2) {
      first = nullptr;
      rank_1 = start(1, {});
    }
  });
  CHECK(any.get()["live_rrefs"] == 0);
  CHECK(rank_0.get()["live_rrefs"] == 0);
  REQUIRE(rank_1.valid());
  CHECK(rank_1.get()["live_rrefs"] == 0);
  CHECK(places == std::vector{1, membership::kUnassignedRank, 2});
}

}  // namespace distrain::testing
