// ctest: timeout=120
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::HybridOptions;

namespace {

struct TableRun {
  Finished job;
  NamedTensors parameters;  // of the dense layers
};

TableRun run_tables(Place place, HybridOptions options) {
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  TableRun trained;
  trained.job = run_job(place, options);
  trained.parameters = newest_checkpoint(folder.path()).files.at("model");
  trained.parameters.erase("embedding.weight");
  REQUIRE(trained.parameters.size() == 2);
  return trained;
}

void check_equal(const TableRun& a, const TableRun& b, double tolerance) {
  check_close(a.parameters, b.parameters, tolerance);
  const auto loss = [](const TableRun& trained) {
    return trained.job.fields(0)["eval"]["loss"].get<double>();
  };
  CHECK(loss(a) == Approx(loss(b)).margin(tolerance));
}

HybridOptions with_teacher() {
  HybridOptions options;
  options.data = HybridOptions::kTeacher;
  options.epochs = 4;  // 40 steps
  options.seed = 7;
  return options;
}

}  // namespace

TEST_CASE("in sync mode a table on one, two or three servers equals the module in one process") {
  HybridOptions options = with_teacher();
  options.mode = "sync";
  std::tie(options.trainers, options.optimizer, options.clip) =
      GENERATE(Catch::Generators::table<int, std::string, double>(
          {{1, "sgd", 0}, {2, "adagrad", 0}, {3, "adam", 0.5}}));
  CAPTURE(options.trainers, options.optimizer);
  const TableRun module = run_tables(Place::kLocal, options);
  options.table = "sharded";
  check_equal(run_tables(Place::kLocal, options), module, 1e-6);
  options.servers = GENERATE(1, 2, 3);
  CAPTURE(options.servers);
  const TableRun sharded = run_tables(Place::kRanks, options);
  check_equal(sharded, module, 1e-6);
  const int last = cmd::hybrid_job().roles(options).world_size() - 1;
  CHECK(sharded.job.fields(last)["updates"] == 40);
}

TEST_CASE("in async mode one trainer's steps do not depend on the servers, also by rows' sums") {
  HybridOptions options = with_teacher();
  options.trainers = 1;
  options.table = "sharded";
  options.optimizer = GENERATE("rowwise-adagrad", "rmsprop");
  const TableRun local = run_tables(Place::kLocal, options);
  options.servers = 2;
  // The servers add the rows of a bag in another order.
  check_equal(run_tables(Place::kRanks, options), local, 1e-5);
  options.wire_dtype = GENERATE("bf16", "fp16");
  // Rows of bf16 have 8 significant bits. 40 steps of lr 0.05 do not let the errors grow much.
  const TableRun narrow = run_tables(Place::kRanks, options);
  check_close(narrow.parameters, local.parameters, 0.05);
  CHECK_FALSE(at::equal(narrow.parameters.at("fc.weight"), local.parameters.at("fc.weight")));
}

TEST_CASE("prefetched batches are those that are trained, and steps tell their staleness") {
  HybridOptions options = with_teacher();
  options.lr = 1e-9;  // the rows stay as they are, so that staleness does not matter
  options.table = "sharded";
  options.trainers = 2;
  options.log_interval = 1;
  const Finished plain = run_job(Place::kRanks, options);
  options.prefetch = 3;
  const Finished ahead = run_job(Place::kRanks, options);
  const std::vector<Json> before = plain.all("step", 1), after = ahead.all("step", 1);
  REQUIRE(before.size() == 40);
  REQUIRE(after.size() == 40);
  int64_t staleness = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    CHECK(after[i]["loss"].get<double>() == Approx(before[i]["loss"].get<double>()).margin(1e-5));
    CHECK(after[i]["staleness"] <= 3);
    CHECK_FALSE(before[i].contains("staleness"));
    staleness = std::max(staleness, after[i]["staleness"].get<int64_t>());
  }
  CHECK(staleness > 0);
}

TEST_CASE("hashed words need no vocabulary, and learn as words of a vocabulary do") {
  const Folder folder;
  HybridOptions options;
  options.mode = "sync";
  options.epochs = 4;
  options.batch_size = 4;
  options.data = folder.write("examples", make_examples(60));
  options.test_data = folder.write("test", make_examples(33));
  options.optimizer = "adagrad";
  options.table = "sharded";
  options.servers = 2;
  options.hash_bits = 40;
  const TableRun ranks = run_tables(Place::kRanks, options);
  check_equal(ranks, run_tables(Place::kLocal, options), 1e-5);
  CHECK_FALSE(ranks.job.fields(0).contains("unknown_words"));
  CHECK(ranks.job.fields(0)["accuracy"] > 0.6);  // of three classes
}

TEST_CASE("a trainer of a sharded table with other data than the first is refused by number") {
  const Folder folder;
  HybridOptions options;
  options.trainers = 3;
  options.batch_size = 4;
  options.data = folder.write("examples", make_examples(60));
  options.table = "sharded";
  const std::string other = folder.write("other", make_examples(30));
  const std::string message = refusal_of_other_data<HybridOptions>(
      options, [&](HybridOptions& options) { options.data = other; });
  CAPTURE(message);
  CHECK(contains(message, "trainer 2 has read other data than the others"));
}

TEST_CASE("a trainer's loss that is not finite is the error of a job with a sharded table") {
  HybridOptions options = with_teacher();
  options.table = "sharded";
  options.servers = 2;
  options.mode = "sync";
  options.lr = 1e30;
  options.clip = GENERATE(0.0, 1e30);
  error_of_job(base::ErrorKind::kNotFinite, Place::kRanks, options);
}

TEST_CASE("a server with too many rows ends the job and is named") {
  HybridOptions options = with_teacher();
  options.table = "sharded";
  options.servers = 2;
  options.max_rows = 5;
  const auto place = GENERATE(Place::kRanks, Place::kLocal);
  const auto error = error_of_job(base::ErrorKind::kResources, place, options);
  CHECK(contains(error.message, "a table would exceed its limit of 5 rows"));
  if (place == Place::kRanks) CHECK(error.rank >= 3);
}

TEST_CASE("a hybrid job with tables resumes exactly, also one that hashes words") {
  const Folder folder;
  HybridOptions options = with_teacher();
  options.mode = "sync";
  options.optimizer = "adam";
  options.table = "sharded";
  options.servers = 2;
  if (GENERATE(false, true)) {
    options.data = folder.write("examples", make_examples(60));
    options.batch_size = 4;
    options.hash_bits = 30;
  }
  check_resume_is_exact(GENERATE(Place::kRanks, Place::kLocal), options, 11, 20);
}

TEST_CASE("tables of three servers are evaluated to the last digit on any number of servers") {
  const Folder folder;
  HybridOptions options = with_teacher();
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  options.table = "sharded";
  options.servers = 3;
  options.optimizer = "rowwise-adagrad";
  const Json saved = run_job(Place::kRanks, options).fields(0)["eval"];
  options.checkpoint.resume = "auto";
  options.eval_only = true;
  for (const int servers : {1, 2, 5}) {
    options.servers = servers;
    CAPTURE(servers);
    CHECK(run_job(Place::kRanks, options).fields(0)["eval"]["loss"] == saved["loss"]);
  }
  CHECK(run_job(Place::kLocal, options).fields(0)["eval"]["accuracy"] == saved["accuracy"]);
}
