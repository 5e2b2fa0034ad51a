// ctest: timeout=120
// Tests checkpoints of a job whose tables are spread over servers, and whose module is on a server.
#include <algorithm>
#include <optional>

#include <ATen/Functions.h>
#include <torch/nn/modules/embedding.h>

#include "distrain/autograd/context.h"
#include "distrain/nn/module.h"
#include "distrain/table/sharded_embedding.h"
#include "support/refusal.h"
#include "support/scenario_job.h"

namespace distrain::testing {

struct TableJobOptions : job::TrainerOptions {
  int servers = 2;
  int64_t dim = 4;
  TableJobOptions() {
    optimizer = "adagrad";
    lr = 0.1;
    mode = "sync";
    trainers = 2;
  }
  static void describe(job::OptionList<TableJobOptions>& list) {
    list.integer("servers", &TableJobOptions::servers, "ranks with tables")
        .range(1, 9)
        .may_change();
    list.integer("dim", &TableJobOptions::dim, "numbers in a row").range(1, 64);
  }
};

namespace {

constexpr int64_t kSteps = 10, kIds = 300;
constexpr int64_t kWideRows = 200'000, kWideDim = 8;  // several pieces of 4 MiB

at::Tensor ids_of(const job::Step& step) {
  return (at::arange(20) * (7 + step.shard) + step.total * 13).remainder(kIds);
}

table::TableOptions options_of_table(const TableJobOptions& options) {
  return {.name = "embedding",
          .dim = options.dim,
          .num_rows = kIds,
          .seed = options.seed,
          .optimizer = optim::to_fields(options.rule().options)};
}

// Evaluates the rows of all ids, also of those that have no row yet. The sum is of whole numbers,
// so it does not depend on how the examples are shared.
job::Evaluation evaluation_of(table::ShardedEmbedding& tables, const job::Share& share) {
  const at::Tensor rows = tables.forward(at::arange(share.first(kIds), share.end(kIds)));
  const at::Tensor numbers = rows.to(at::kDouble).mul(1 << 24).round();
  return {.samples = rows.size(0), .loss_sum = numbers.sum().item<double>()};
}

void train_tables(job::Rank& rank, const TableJobOptions& options) {
  std::vector<int> servers;
  const int first = rank.roles().named("server").first;
  for (int k = 0; k < options.servers; ++k) servers.push_back(first + k);
  const auto tables = std::make_shared<table::ShardedEmbedding>(
      rank.agent(), servers, std::vector{options_of_table(options)}, options.sharing(rank.index()));
  nn::RemoteModule wide(rank.agent(), rpc::To(first), "wide", kWideRows, kWideDim);
  optim::DistributedOptimizer optimizer(rank.agent(), wide.remote_parameters(), {}, options.rule(),
                                        options.sharing(rank.index()));
  optimizer.add(tables);
  job::Training training(rank, options, kSteps);
  training.keep("wide", wide);
  training.keep(optimizer);
  training.keep("embedding", *tables);
  training.evaluate_epochs([&](const job::Share& share) { return evaluation_of(*tables, share); });
  training.run([&](const job::Step& step) {
    const at::Tensor ids = ids_of(step);
    autograd::Context context(rank.agent());
    const at::Tensor loss = tables->forward(ids).sin().mean() + wide.forward(ids).cos().mean();
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, 20};
  });
}

torch::nn::Embedding make_wide(int64_t rows, int64_t dim) {
  const at::Tensor weight = at::arange(rows * dim).view({rows, dim}).remainder(1013).to(at::kFloat);
  return torch::nn::Embedding(torch::nn::EmbeddingOptions(rows, dim)._weight(weight));
}

void train_tables_locally(job::SingleProcess& local, const TableJobOptions& options) {
  const auto server = std::make_shared<table::TableServer>();
  const auto tables =
      std::make_shared<table::ShardedEmbedding>(server, std::vector{options_of_table(options)});
  torch::nn::Embedding wide = make_wide(kWideRows, kWideDim);
  optim::SingleProcessOptimizer optimizer(*wide, options.rule(), options.mode);
  optimizer.add(tables);
  job::SingleProcessTraining training(local, options, kSteps);
  training.keep("wide", *wide);
  training.keep(optimizer);
  training.keep("embedding", *tables);
  training.evaluate_epochs([&](const job::Share& share) { return evaluation_of(*tables, share); });
  training.run(optimizer, [&](const job::Step& step) {
    const at::Tensor ids = ids_of(step);
    const at::Tensor loss = tables->forward(ids).sin().mean() + wide->forward(ids).cos().mean();
    return job::Result{loss, 20};
  });
}

// The rows of the table by id, with their state.
std::map<int64_t, std::vector<float>> rows_in(const Snapshot& snapshot) {
  std::map<int64_t, std::vector<float>> rows;
  for (const auto& [file, tensors] : snapshot.files) {
    if (!file.starts_with("table-")) continue;
    const std::string suffix = "." + file.substr(6, 5);
    const at::Tensor ids = tensors.at("embedding.ids" + suffix);
    const at::Tensor all =
        at::cat({tensors.at("embedding.weight" + suffix), tensors.at("embedding.sum" + suffix),
                 tensors.at("embedding.updates" + suffix).unsqueeze(1)},
                1)
            .contiguous();
    for (int64_t i = 0; i < ids.numel(); ++i) {
      const float* const row = all.const_data_ptr<float>() + i * all.size(1);
      REQUIRE(rows.emplace(ids[i].item<int64_t>(), std::vector(row, row + all.size(1))).second);
    }
  }
  return rows;
}

// Checks that two checkpoints of any number of servers have the same rows and other tensors.
void check_same_tables(const Snapshot& a, const Snapshot& b) {
  CHECK(rows_in(a) == rows_in(b));
  for (const char* file : {"model", "optimizer"}) {
    for (const auto& [name, tensor] : a.files.at(file)) {
      CAPTURE(file, name);
      CHECK(at::equal(tensor, b.files.at(file).at(name)));
    }
  }
}

}  // namespace

const job::Definition<TableJobOptions>& job_of(const TableJobOptions&) {
  static const auto kJob =
      job::define<TableJobOptions>("tables", "a job with sharded tables")
          .role("trainer", &TableJobOptions::trainers, train_tables)
          .role("server", &TableJobOptions::servers)
          .saving_role([](const TableJobOptions&) { return std::string("server"); })
          .expose([](rpc::Agent& agent) { nn::expose_module(agent, "wide", make_wide); })
          .local(train_tables_locally);
  return kJob;
}

TEST_CASE("a resumed job with tables equals one that was not interrupted") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  TableJobOptions options;
  options.steps = 2 * kSteps;
  const Snapshot expected = checkpoint_of(place, options);
  REQUIRE(rows_in(expected).size() > 100);
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, "auto"};
  options.steps = kSteps + 2;
  const Finished begun = run_job(place, options);
  CHECK(begun.all("checkpoint").back()["stalled_s"] == 0);
  options.steps = 2 * kSteps;
  // In sync mode the number of servers does not change the result.
  options.servers = place == Place::kRanks ? GENERATE(1, 2, 3) : 2;
  run_job(place, options);
  check_same_tables(newest_checkpoint(folder.path()), expected);
}

TEST_CASE("ranks and --local load each other's tables, and evaluate them to the last digit") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  TableJobOptions options;
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  options.steps = kSteps;
  const job::Json expected = run_job(place, options).all("eval").back()["loss"];
  options.eval_only = true;
  options.checkpoint.resume = "auto";
  for (const Place other : {Place::kRanks, Place::kLocal}) {
    for (const int servers : {1, 3}) {
      options.servers = servers;
      options.trainers = 2;
      CHECK(run_job(other, options).all("eval").back()["loss"] == expected);
    }
  }
}

TEST_CASE("each checkpoint of a running job has the tables of its step") {
  TableJobOptions options;
  const Folder folder;
  options.checkpoint = {folder.path(), 5, "", 10};
  options.steps = 15;
  Hooks<TableJobOptions> hooks;
  hooks.job = [](Job& job) { job.inject.before_save = slow_by(0.05); };
  const std::vector<Json> lines = run_job(Place::kRanks, options, hooks).all("checkpoint");
  REQUIRE(lines.size() == 3);
  for (size_t i = 0; i < 2; ++i) {
    options.steps = 5 * (static_cast<int64_t>(i) + 1);
    const Snapshot saved(job::read_checkpoint(lines[i]["path"]));
    check_same_tables(saved, checkpoint_of(Place::kRanks, options));
  }
}

TEST_CASE("a checkpoint whose tables do not fit the job is refused") {
  TableJobOptions options;
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  options.steps = 2;
  run_job(Place::kRanks, options);
  options.steps = 4;
  options.servers = 3;
  options.dim = 5;
  check_resume_refused(Place::kRanks, options, folder.path(), "saved with --dim 4, not 5");
}

TEST_CASE("saves of servers of tables, but not of trainers, can be made to fail") {
  const app::JobCommand command(job_of(TableJobOptions()));  // servers are ranks 2 and 3
  const std::string refused =
      "fail=checkpoint.1@rank=1: only rank 0 saves checkpoints, and the "
      "ranks of server";
  check_refused(command, {"--inject", "fail=checkpoint.1@rank=1"}, refused);
  check_refused(command, {"--inject", "fail=checkpoint.1@rank=3,fail=checkpoint.1@rank=1"},
                refused);
  check_refused(command, {"--inject", "save=1ms@rank=2"}, "only rank 0 saves checkpoints");
}

}  // namespace distrain::testing
