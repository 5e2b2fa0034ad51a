// ctest: timeout=180
#include <algorithm>

#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::PsOptions;

namespace {

struct PsImages {
  PsImages() { write_images(folder, 600, 40, 1); }

  PsOptions options() const {
    PsOptions options;
    options.data = folder.path();
    options.batch_size = 4;
    options.log_interval = 1;
    return options;
  }

  const Folder folder;
};

}  // namespace

TEST_CASE_METHOD(PsImages, "sync training of images equals the one-process run") {
  PsOptions options = this->options();
  options.mode = "sync";
  options.trainers = GENERATE(1, 2, 3);
  using Rate = std::optional<double>;
  options.dropout = GENERATE(Rate(0), Rate(), Rate(0.1));  // --local has the same masks
  options.clip = options.dropout == 0 ? 0 : 0.5;
  if (options.dropout > 0.0 && options.trainers != 2) return;
  options.limit = 101;  // shards of different sizes
  if (kSanitized && options.trainers == 2 && !(options.dropout > 0.0)) return;
  options.steps = 14;
  CAPTURE(options.trainers, options.dropout.value_or(-1));
  const Snapshot ranks = checkpoint_of(Place::kRanks, options);
  const Snapshot local = checkpoint_of(Place::kLocal, options);
  CHECK(ranks.step == 14);
  CHECK(ranks.state == local.state);
  check_close(ranks.file("model"), local.file("model"), 1e-5);
}

TEST_CASE_METHOD(PsImages, "sync training on several servers equals the one-process run") {
  PsOptions options = this->options();
  options.mode = "sync";
  options.servers = GENERATE(2, 3);
  options.optimizer = options.servers == 2 ? "sgd" : "adam";
  options.clip = options.servers == 2 ? 0.5 : 0;  // the norm is that of all servers' gradients
  options.verify_grads = true;
  options.limit = 101;
  options.steps = 8;
  CAPTURE(options.servers);
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  const Finished ranks = run_job(Place::kRanks, options);
  CHECK(ranks.outcomes.size() == static_cast<size_t>(options.servers) + 2);
  CHECK(ranks.fields(0)["updates"] == 8);
  for (const Json& step : ranks.all("step")) {
    CAPTURE(step.dump());
    CHECK(step["version"] == step["step"].get<int64_t>() - 1);
    CHECK(step["delay"] == 0);
    CHECK(step["staleness"] == 0);
  }
  const Snapshot local = checkpoint_of(Place::kLocal, options);
  const Snapshot saved = newest_checkpoint(folder.path());
  CHECK(saved.state == local.state);
  check_close(saved.file("model"), local.file("model"), 1e-5);
  check_close(saved.file("optimizer"), local.file("optimizer"), 1e-5);
}

TEST_CASE_METHOD(PsImages, "one async trainer of two servers equals the one-process run") {
  PsOptions options = this->options();
  options.servers = 2;
  options.trainers = 1;
  options.steps = 5;
  check_same(checkpoint_of(Place::kRanks, options), checkpoint_of(Place::kLocal, options));
}

TEST_CASE_METHOD(PsImages, "several servers train in the modes async and ssp") {
  PsOptions options = this->options();
  options.mode = GENERATE("async", "ssp");
  options.staleness = 1;
  options.servers = 2;
  options.trainers = 3;
  options.batch_size = 2;
  options.steps = 15;
  options.verify_grads = true;
  CAPTURE(options.mode);
  const Finished job = run_job(Place::kRanks, options, slow_rank<PsOptions>(2, 0.003));
  const std::vector<Json> steps = job.all("step");
  REQUIRE(steps.size() == 45);
  for (const Json& step : steps) {
    CAPTURE(step.dump());
    CHECK(step["version"] >= 0);
    CHECK(step["delay"] >= 0);
    if (options.mode == "ssp") CHECK(step["staleness"] <= 1);
  }
  CHECK(job.fields(0)["updates"] == 45);
}

TEST_CASE_METHOD(PsImages, "training on images improves and prints the same as one process") {
  PsOptions options = this->options();
  options.mode = "sync";
  options.epochs = 2;
  options.limit = 160;
  options.lr = 0.1;
  const Finished ranks = run_job(Place::kRanks, options);
  const Finished local = run_job(Place::kLocal, options);
  CHECK(ranks.fields(0)["accuracy"].get<double>() > 0.5);
  CHECK(ranks.fields(0)["updates"] == 40);
  for (const char* event : {"eval", "epoch"}) {
    for (const Json& line : ranks.all(event)) CHECK(line["loss"].is_number());
  }
  REQUIRE(ranks.all("eval").size() == 2);
  REQUIRE(local.all("eval").size() == 2);
  for (size_t i = 0; i < 2; ++i) {
    const Json mine = ranks.all("eval")[i], other = local.all("eval")[i];
    CHECK(mine["samples"] == 40);
    CHECK(other["samples"] == 40);
    CHECK(mine["accuracy"] == other["accuracy"]);
    CHECK(mine["loss"].get<double>() == Approx(other["loss"].get<double>()).margin(1e-4));
  }
  CHECK(ranks.fields(0)["loss"].get<double>() ==
        Approx(local.fields(0)["loss"].get<double>()).margin(1e-4));
}

TEST_CASE_METHOD(PsImages, "several servers send their parameters once for each evaluation") {
  PsOptions options = this->options();
  options.trainers = 1;
  options.servers = 2;
  options.steps = 1;
  std::vector<Json> calls;
  for (const int images : {20, 300}) {  // one batch and three
    const Folder test;
    write_images(test, 3, images, 2);
    options.test_data = test.path();
    calls.push_back(run_job(Place::kRanks, options).fields(2)["rpc"]["calls"]);
  }
  CHECK(calls[0] == calls[1]);
}

TEST_CASE_METHOD(PsImages, "a job on images evaluates other folders, one of them at the end") {
  const Folder valid, test;
  write_images(valid, 3, 21, 2);
  write_images(test, 3, 33, 3);
  PsOptions options = this->options();
  options.limit = 16;
  options.trainers = 1;
  options.epochs = 2;
  options.log_interval = 0;
  options.test_data = test.path();
  check_evaluated(run_job(Place::kLocal, options), "samples", 40, 33);
  options.valid_data = valid.path();
  const Folder saves;
  options.checkpoint = {saves.path(), 0, "auto"};
  const Finished ranks = run_job(Place::kRanks, options);
  check_evaluated(ranks, "samples", 21, 33);
  CHECK(ranks.fields(0)["accuracy"] == ranks.all("eval")[2]["accuracy"]);
  options.checkpoint = {};
  CHECK(run_job(Place::kLocal, options).all("eval") == ranks.all("eval"));
  options.checkpoint = {"", 0, saves.path()};
  options.eval_only = true;
  const std::vector<Json> again = run_job(Place::kRanks, options).all("eval");
  REQUIRE(again.size() == 2);
  CHECK(again[0] == ranks.all("eval")[1]);
  CHECK(again[1] == ranks.all("eval")[2]);
}

TEST_CASE_METHOD(PsImages, "one async trainer equals the one-process run bit for bit") {
  PsOptions options = this->options();
  options.trainers = 1;
  options.steps = 10;
  check_same(checkpoint_of(Place::kRanks, options), checkpoint_of(Place::kLocal, options));
}

TEST_CASE_METHOD(PsImages, "with ssp 0 no trainer begins a step before all made the previous one") {
  PsOptions options = this->options();
  options.mode = "ssp";
  options.staleness = 0;
  options.trainers = 3;
  options.batch_size = 2;
  options.steps = 20;
  const Finished job = run_job(Place::kRanks, options, slow_rank<PsOptions>(2, 0.003));
  const std::vector<Json> steps = job.all("step");
  REQUIRE(steps.size() == 60);
  for (const Json& step : steps) {
    CAPTURE(step.dump());
    CHECK(step["version"] >= 3 * (step["step"].get<int64_t>() - 1));
    CHECK(step["staleness"] == 0);
  }
  CHECK(job.fields(0)["staleness"] == 0);
  CHECK(job.fields(0)["updates"] == 60);
}

TEST_CASE_METHOD(PsImages, "with ssp 2 fast trainers are at most two steps ahead of a slow one") {
  PsOptions options = this->options();
  options.mode = "ssp";
  options.staleness = 2;
  options.trainers = 3;
  options.batch_size = 1;
  options.steps = 20;
  const Finished job = run_job(Place::kRanks, options, slow_rank<PsOptions>(2, 0.02));
  int64_t greatest = 0;
  for (const Json& step : job.all("step")) {
    CAPTURE(step.dump());
    const auto staleness = step["staleness"].get<int64_t>();
    CHECK(staleness >= 0);
    CHECK(staleness <= 2);
    // `version` counts all trainers' updates. The other two are at most two steps behind this one.
    CHECK(step["version"] >= 3 * (step["step"].get<int64_t>() - 1 - 2));
    greatest = std::max(greatest, staleness);
  }
  CHECK(greatest > 0);
  CHECK(job.fields(0)["staleness"] == greatest);
  // Trainer 2 is nearly always the slowest, unless another trainer gets no CPU time.
  const std::vector<Json> slow = job.all("step", 2);
  REQUIRE(slow.size() == 20);
  CHECK(std::count_if(slow.begin(), slow.end(),
                      [](const Json& step) { return step["staleness"] == 0; }) > 15);
}

TEST_CASE_METHOD(PsImages, "four async trainers make 50 steps each without an error") {
  PsOptions options = this->options();
  options.trainers = 4;
  options.batch_size = 2;
  options.steps = 50;
  options.log_interval = 10;
  const Finished job = run_job(Place::kRanks, options);
  CHECK(job.fields(0)["updates"] == 200);
  int64_t steps = 0;
  for (int rank = 1; rank <= 4; ++rank) steps += job.fields(rank)["steps"].get<int64_t>();
  CHECK(steps == 200);
}

TEST_CASE_METHOD(PsImages, "async trainers take over steps of a slow one") {
  PsOptions options = this->options();
  options.trainers = 2;
  options.limit = 120;  // 15 steps per trainer
  const Finished job = run_job(Place::kRanks, options, slow_rank<PsOptions>(2, 0.1));
  const auto fast = job.fields(1)["steps"].get<int64_t>();
  CHECK(fast > 15);
  CHECK(fast + job.fields(2)["steps"].get<int64_t>() == 30);
  int64_t samples = 0;
  for (const Json& epoch : job.all("epoch")) samples += epoch["samples"].get<int64_t>();
  CHECK(samples == 120);
}

TEST_CASE_METHOD(PsImages, "verified gradients are on the server, in every mode") {
  PsOptions options = this->options();
  options.mode = GENERATE("async", "sync", "ssp");
  CAPTURE(options.mode);
  options.verify_grads = true;
  options.steps = 5;
  const Finished job = run_job(Place::kRanks, options);
  CHECK(job.fields(0)["updates"] == (options.mode == "sync" ? 5 : 10));
}

TEST_CASE_METHOD(PsImages, "trainers with other data than the first are refused by number") {
  const Folder other;
  write_images(other, 600, 40, 2);
  const std::string message = refusal_of_other_data<PsOptions>(
      options(), [&, only_test = GENERATE(false, true)](PsOptions& options) {
        (only_test ? options.test_data : options.data) = other.path();
      });
  CAPTURE(message);
  CHECK(contains(message, "trainer 2 has read other data than the others"));
}

TEST_CASE_METHOD(PsImages, "a loss that is not finite ends the job, and nothing is saved") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  PsOptions options = this->options();
  options.mode = GENERATE("sync", "async");
  CAPTURE(place, options.mode);
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, "auto"};
  options.steps = 2;
  run_job(place, options);
  const Snapshot before = newest_checkpoint(folder.path());
  options.lr = 1e30;
  options.steps = 20;
  const base::Error error = error_of_job(base::ErrorKind::kNotFinite, place, options);
  CAPTURE(error.message);
  CHECK(contains(error.message, "try a smaller --lr"));
  check_same(newest_checkpoint(folder.path()), before);
}
