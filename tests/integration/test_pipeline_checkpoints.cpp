// ctest: timeout=180
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::PipelineOptions;

namespace {

PipelineOptions three_batches() {
  PipelineOptions options = small_pipeline(4, 4);
  options.num_split = {2};
  return options;
}

}  // namespace

TEST_CASE("a resumed pipeline ends with the same bits, also with another split") {
  PipelineOptions options = three_batches();
  const Snapshot expected = checkpoint_of(Place::kRanks, options);
  CHECK(expected.step == 4);
  CHECK(expected.file("model").size() == 122);  // as in torchvision's state_dict
  CHECK(expected.file("model").at("bn1.num_batches_tracked").item<int64_t>() == 8);

  const Folder folder;
  options.checkpoint = {folder.path(), 0, "auto"};
  options.batches = 2;
  run_job(Place::kRanks, options);
  REQUIRE(newest_checkpoint(folder.path()).step == 2);
  options.batches = 4;
  options.stages = 3;
  options.schedule = "1f1b";
  const Finished rest = run_job(Place::kRanks, options);
  CHECK(rest.fields(0)["steps"] == 2);
  Snapshot saved = newest_checkpoint(folder.path());
  CHECK(saved.state["options"]["stages"] == "3");
  saved.state["options"] = expected.state["options"];
  check_same(saved, expected);

  // All batches were trained before the save, so the resumed job only prints a warning.
  const Finished nothing = run_job(Place::kRanks, options);
  REQUIRE(nothing.all("warn").size() == 1);
  CHECK(contains(nothing.all("warn")[0]["message"], "a larger --batches"));
  CHECK(nothing.all("split").empty());
  CHECK(nothing.fields(0)["steps"] == 0);
}

TEST_CASE("a pipeline in one process saves what its ranks save") {
  const PipelineOptions options = three_batches();
  const Snapshot ranks = checkpoint_of(Place::kRanks, options);
  const Snapshot local = checkpoint_of(Place::kLocal, options);
  CHECK(ranks.state == local.state);
  for (const auto& [name, tensor] : ranks.file("model")) {
    CAPTURE(name);
    CHECK(at::allclose(tensor, local.file("model").at(name), 1e-4, 1e-6));
  }
}

TEST_CASE("a pipeline that is stopped saves and can be resumed") {
  PipelineOptions options = three_batches();
  const int rank = GENERATE(0, 2);
  CAPTURE(rank);
  check_stop_and_go_on(Place::kRanks, options, rank, 0);
}

TEST_CASE("a pipeline resumes with the images that it began with") {
  const Folder images, others, folder;
  write_images(images, 9, 0, 1);
  write_images(others, 9, 0, 2);
  PipelineOptions options = three_batches();
  options.batches = 1;
  options.data = images.path();
  options.checkpoint = {folder.path(), 0, ""};
  run_job(Place::kLocal, options);
  options.data = others.path();
  check_resume_refused(Place::kLocal, options, folder.path(), "saved while training on other data");
}

TEST_CASE("a pipeline resumes only from its own checkpoints") {
  PipelineOptions options = three_batches();
  options.batches = 1;
  const Folder folder;
  options.checkpoint = {folder.path(), 0, ""};
  run_job(Place::kLocal, options);
  const auto refused = [&](const auto& change, const std::string& why) {
    PipelineOptions other = options;
    change(other);
    check_resume_refused(Place::kLocal, other, folder.path(), why);
  };
  refused([](PipelineOptions& o) { o.num_split = {4}; }, "saved with --micro-batches 2, not 4");
  refused([](PipelineOptions& o) { o.loss = "ce"; }, "saved with --loss mse, not ce");
  refused([](PipelineOptions& o) { o.seed = 2; }, "saved with --seed 1, not 2");
  refused([](PipelineOptions& o) { o.model = "resnet50"; },
          "saved with --model narrow_resnet18, not resnet50");
  check_spoilt_refused(
      Place::kLocal, options, folder.path(),
      {{[](Snapshot& s) { s.state["position"]["total"] = 7; }, "the position"},
       {[](Snapshot& s) { s.files["model"].erase("fc.bias"); }, "fc.bias"},
       {[](Snapshot& s) { s.files["model"]["fc.bias"] = at::ones({3}); }, "fc.bias"}});
}
