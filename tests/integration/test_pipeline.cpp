// ctest: labels=notsan timeout=300 first
// Does not run under thread sanitizer, to save time: test_pipeline_failures.cpp and
// test_pipeline_checkpoints.cpp run the same code.
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::PipelineOptions;

namespace {

PipelineOptions small() { return small_pipeline(2, 9); }

/// Trains once per entry of `num_split`. Returns the `split` lines.
std::vector<Json> train_pipeline(Place place, const PipelineOptions& options) {
  const Finished finished = run_job(place, options);
  CHECK(finished.fields(0)["steps"] == options.batches * options.num_split.size());
  return finished.all("split");
}

/// Trains on one batch. Returns the model, whose parameters are little else than their gradients.
NamedTensors after_one_batch(Place place, PipelineOptions options) {
  options.batches = 1;
  options.lr = 1e4;
  return checkpoint_of(place, options).file("model");
}

void check_same(const NamedTensors& a, const NamedTensors& b) {
  REQUIRE(a.size() == b.size());
  for (const auto& [name, tensor] : a) {
    CAPTURE(name);
    REQUIRE(b.contains(name));
    const at::Tensor other = b.at(name).to(at::kDouble);
    const double error = (tensor.to(at::kDouble) - other).norm().item<double>();
    CHECK(error <= 1e-5 * other.norm().item<double>());
  }
}

}  // namespace

TEST_CASE("a pipeline has the gradients of one process with any schedule") {
  PipelineOptions options = small();
  options.num_split = {1, 2, 4, 8};
  options.batches = 1;
  options.schedule = GENERATE("gpipe", "1f1b", "naive");
  PipelineOptions one = options;
  one.num_split = {4};
  const NamedTensors expected = after_one_batch(Place::kLocal, one);
  REQUIRE(expected.size() == 122);  // parameters and buffers of resnet18
  const std::vector<Json> local_lines = train_pipeline(Place::kLocal, options);
  for (const int stages : {2, 3, 4}) {
    one.stages = options.stages = stages;
    CAPTURE(options.schedule, stages);
    check_same(after_one_batch(Place::kRanks, one), expected);
    const std::vector<Json> lines = train_pipeline(Place::kRanks, options);
    REQUIRE(lines.size() == 4);
    for (size_t i = 0; i < lines.size(); ++i) {
      const int64_t num_split = options.num_split[i];
      CHECK(lines[i]["num_split"] == num_split);
      CHECK(lines[i]["loss"].get<double>() ==
            Approx(local_lines[i]["loss"].get<double>()).epsilon(1e-5));
      REQUIRE(lines[i]["stage_s"].size() == static_cast<size_t>(stages));
      for (int stage = 1; stage <= stages; ++stage) {
        CAPTURE(num_split, stage);
        const int64_t held = lines[i]["activations"][static_cast<size_t>(stage) - 1];
        if (options.schedule == "gpipe") CHECK(held == num_split);
        if (options.schedule == "1f1b")
          CHECK(held == std::min<int64_t>(num_split, stages - stage + 1));
        if (options.schedule == "naive") CHECK(held == 1);
      }
    }
  }
}

TEST_CASE("the gradients do not depend on the split into stages") {
  PipelineOptions options = small();
  options.num_split = {3};
  options.loss = "ce";
  const NamedTensors expected = after_one_batch(Place::kLocal, options);
  options.split =
      GENERATE(as<std::vector<std::string>>{}, std::vector<std::string>{"stem"},
               std::vector<std::string>{"layer3.0"}, std::vector<std::string>{"layer4"});
  check_same(after_one_batch(Place::kRanks, options), expected);
}

TEST_CASE("each number of micro-batches starts with a new model of the same seed") {
  PipelineOptions options = small();
  options.num_split = {2, 3, 2};
  const std::vector<Json> lines = train_pipeline(Place::kRanks, options);
  REQUIRE(lines.size() == 3);
  CHECK(lines[0]["loss"] == lines[2]["loss"]);
  CHECK(lines[0]["loss"] != lines[1]["loss"]);  // batch norm sees micro-batches of another size
}

TEST_CASE("a pipeline fits batches that it sees repeatedly") {
  const Folder folder;
  write_images(folder, 9, 0, 1);
  PipelineOptions options = small();
  options.data = folder.path();
  options.loss = "ce";
  options.num_split = {2};
  options.batches = 8;
  options.log_interval = 1;
  options.lr = 0.03;
  const Finished finished = run_job(Place::kRanks, options);
  const std::vector<Json> steps = finished.all("step");
  REQUIRE(steps.size() == 8);
  CHECK(steps[7]["loss"].get<double>() < 0.5 * steps[0]["loss"].get<double>());
  CHECK(finished.fields(0)["accuracy"].get<double>() > steps[0]["accuracy"].get<double>());
  CHECK(finished.fields(0)["best"]["num_split"] == 2);
}

TEST_CASE("a pipeline is as accurate on CIFAR-10 test images as one process") {
  const Folder folder;
  write_cifar10(folder, 80, 41, 1);
  PipelineOptions options = small();
  options.data = options.valid_data = folder.path();
  options.batch_size = 16;
  options.loss = "ce";
  options.num_split = {2};
  options.epochs = 3;
  options.lr = 0.01;
  options.stages = 3;
  const std::vector<Json> expected = run_job(Place::kLocal, options).all("eval", 0);
  const Finished finished = run_job(Place::kRanks, options);
  const std::vector<Json> evaluations = finished.all("eval", 0);
  REQUIRE(expected.size() == 3);
  REQUIRE(evaluations.size() == 3);
  for (const Json& evaluation : evaluations) CHECK(evaluation["samples"] == 41);
  const double accuracy = evaluations.back()["accuracy"];
  CHECK(accuracy > 0.9);
  CHECK(accuracy >= expected.back()["accuracy"].get<double>() - 0.01);
  CHECK(evaluations[0]["loss"].get<double>() ==
        Approx(expected[0]["loss"].get<double>()).epsilon(1e-3));
  CHECK(finished.fields(0)["accuracy"] == accuracy);
  CHECK(finished.fields(0)["steps"] == 15);
}

TEST_CASE("a pipeline evaluates one folder after each epoch and another at the end") {
  const Folder folder, test;
  write_images(folder, 8, 5, 1);
  write_images(test, 1, 7, 2);
  PipelineOptions options = small();
  options.data = options.valid_data = folder.path();
  options.test_data = test.path();
  options.batch_size = 4;
  options.num_split = {2};
  options.epochs = 2;
  const Finished ranks = run_job(Place::kRanks, options);
  check_evaluated(ranks, "samples", 5, 7);
  CHECK(ranks.fields(0)["accuracy"] == ranks.all("eval")[2]["accuracy"]);
  const Finished local = run_job(Place::kLocal, options);
  check_evaluated(local, "samples", 5, 7);
  CHECK(local.all("eval")[2]["loss"].get<double>() ==
        Approx(ranks.all("eval")[2]["loss"].get<double>()).epsilon(1e-3));
}

TEST_CASE("stages that sleep instead of computing still take turns") {
  PipelineOptions options = small();
  options.stages = 3;
  options.num_split = {1, 3, 9};
  Hooks<PipelineOptions> hooks;
  hooks.job = [](Job& job) { job.inject.stage_sleep_s = 0.02; };
  const Finished finished = run_job(Place::kRanks, options, hooks);
  for (const Json& line : finished.all("split")) {
    for (const double stage_s : line["stage_s"]) CHECK(stage_s >= 0.04);
  }
}

TEST_CASE("a loss that is not finite ends the job") {
  PipelineOptions options = small();
  options.num_split = {2};
  options.lr = 1e30;
  options.batches = 5;
  const base::Error error = error_of_job(base::ErrorKind::kNotFinite, Place::kRanks, options);
  CHECK(contains(error.message, "step"));
}

TEST_CASE("weights that cannot be read end the job") {
  PipelineOptions options = small();
  options.weights = "no-such-file.safetensors";
  Hooks<PipelineOptions> hooks;
  hooks.job = [](Job& job) { job.join_timeout_s = 3; };  // short, because rank 0 never joins
  const Finished job = try_job(Place::kRanks, options, hooks);
  CHECK(base::kind_name(job.errors.at(0).kind) == "bad_data");
  CHECK(contains(job.errors.at(0).message, "no-such-file"));
  CHECK(job.all("ready").empty());  // rank 0 failed before any rank was ready
}
