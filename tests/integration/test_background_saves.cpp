// ctest: labels=notsan timeout=180
// Tests checkpoints that are written while the job continues to train. Does not run under thread
// sanitizer, which reports false races because it cannot see the synchronization in LibTorch's
// kernels and reference counts. unit_job.checkpoints tests the threads.
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

// Returns the indices in `job.lines` of the `event` lines of step `step`.
std::vector<size_t> places_of(const Finished& job, const std::string& event, int64_t step) {
  std::vector<size_t> places;
  for (size_t i = 0; i < job.lines.size(); ++i) {
    if (job.lines[i].event == event && job.lines[i].fields["step"] == step) places.push_back(i);
  }
  return places;
}

struct FewImages {
  FewImages() { write_images(folder, 96, 16, 1); }
  scenario::PsOptions options() const {
    scenario::PsOptions options;
    options.data = folder.path();
    options.batch_size = 4;
    options.mode = "sync";
    options.optimizer = "adam";
    options.log_interval = 1;
    return options;
  }
  const Folder folder;
};

}  // namespace

TEST_CASE("rows on a server and replicas of trainers are saved as they were at the step") {
  scenario::HybridOptions options;
  options.mode = "sync";
  options.optimizer = "adam";
  check_saved_as_it_was(GENERATE(Place::kRanks, Place::kLocal), options, 6);
}

TEST_CASE_METHOD(FewImages, "a net on rank 0 is saved as it was at the step") {
  check_saved_as_it_was(GENERATE(Place::kRanks, Place::kLocal), options(), 6);
}

TEST_CASE("a language model and each trainer's own state are saved as they were at the step") {
  scenario::RnnOptions options;
  options.mode = "sync";
  options.trainers = 2;
  options.optimizer = "adagrad";
  check_saved_as_it_was(GENERATE(Place::kRanks, Place::kLocal), options, 3);
}

TEST_CASE("stages with running statistics are saved as they were at the step") {
  scenario::PipelineOptions options = small_pipeline(4, 1);
  options.num_split = {2};
  options.momentum = 0.9;
  check_saved_as_it_was(GENERATE(Place::kRanks, Place::kLocal), options, 1,
                        &scenario::PipelineOptions::batches);
}

TEST_CASE("a policy is saved as it was at the episode") {
  check_saved_as_it_was(GENERATE(Place::kRanks, Place::kLocal), scenario::RlOptions(), 5,
                        &scenario::RlOptions::max_episodes);
}

TEST_CASE_METHOD(FewImages, "a job trains while it saves, and its next save waits for the first") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  scenario::PsOptions options = this->options();
  const Folder folder;
  options.checkpoint = {folder.path(), 3, ""};
  options.steps = 6;
  Hooks<scenario::PsOptions> hooks;
  base::Promise<void> trained;  // set after the last step
  std::once_flag once;
  hooks.job = [&](Job& job) {
    job.inject.before_save = [all = trained.future()] {
      all.wait_until(base::deadline_after(std::chrono::seconds(60)));
      return false;
    };
  };
  hooks.heard = [&](const Job&, const Line& line) {
    if (line.event == "step" && line.fields["step"] == 6)
      std::call_once(once, [&] { trained.set(); });
  };
  const Finished job = run_job(place, options, hooks);
  const std::vector<Json> saves = job.all("checkpoint");
  REQUIRE(saves.size() == 2);
  const size_t first_saved = places_of(job, "checkpoint", 3).at(0);
  for (const int64_t step : {4, 5, 6}) CHECK(places_of(job, "step", step).at(0) < first_saved);
  CHECK(saves[0]["step"] == 3);
  CHECK(saves[1]["step"] == 6);
  // The job has ended only after its last checkpoint was complete.
  CHECK(newest_checkpoint(folder.path()).step == 6);
  CHECK(contains(job.outcomes.at(0).message, "step 6"));
}

namespace {

/// Moves the checkpoint folder away after the first save, and back at the warning of a failed save.
template <class Options>
Hooks<Options> without_folder(const Folder& folder) {
  Hooks<Options> hooks;
  hooks.heard = [&folder](const Job&, const Line& line) {
    const bool first = line.event == "checkpoint" && line.fields["step"] == 2;
    if (first) std::filesystem::rename(folder.path("saves"), folder.path("moved"));
    if (line.event == "warn") std::filesystem::rename(folder.path("moved"), folder.path("saves"));
  };
  return hooks;
}

template <class Options>
void check_goes_on_after_failed_save(Place place, Options options,
                                     int64_t Options::*steps = &Options::steps) {
  CAPTURE(place, job_of(options).info().name);
  const Folder folder;
  options.checkpoint = {folder.path("saves"), 2, "", 10};
  options.*steps = 6;
  const Finished job = run_job(place, options, without_folder<Options>(folder));
  const std::vector<Json> warnings = job.all("warn");
  std::vector<int64_t> saved;
  for (const Json& line : job.all("checkpoint")) saved.push_back(line["step"]);
  CHECK(saved == std::vector<int64_t>{2, 6});
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0]["kind"] == "resources");
  CHECK(contains(warnings[0]["message"].template get<std::string>(), "saving step 4 in"));
}

}  // namespace

TEST_CASE_METHOD(FewImages, "a job whose save fails continues and saves again") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  check_goes_on_after_failed_save(place, options());
  scenario::HybridOptions hybrid;
  hybrid.mode = "sync";
  check_goes_on_after_failed_save(place, hybrid);
  check_goes_on_after_failed_save(place, scenario::RlOptions(), &scenario::RlOptions::max_episodes);
  scenario::PipelineOptions pipeline = small_pipeline(6, 1);
  pipeline.num_split = {2};
  check_goes_on_after_failed_save(place, pipeline, &scenario::PipelineOptions::batches);
}

TEST_CASE_METHOD(FewImages,
                 "a job whose last save fails ends with that error, even after a signal") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const bool by_signal = GENERATE(false, true);
  CAPTURE(place, by_signal);
  scenario::PsOptions options = this->options();
  options.steps = by_signal ? 1'000'000 : 4;
  options.epochs = 1'000'000;
  const Folder folder;
  options.checkpoint = {folder.path("saves"), by_signal ? 1'000'000 : 2, "", 10};
  StopSignals signals;
  Hooks<scenario::PsOptions> hooks;
  hooks.job = [&](Job& job) { signals.keep(job); };
  std::once_flag once;
  hooks.heard = [&](const Job&, const Line& line) {
    const bool is_time = by_signal ? line.event == "step" : line.event == "checkpoint";
    if (!is_time) return;
    std::call_once(once, [&] {
      std::filesystem::rename(folder.path("saves"), folder.path("moved"));
      if (by_signal) signals.of(0).request();
    });
  };
  const base::Error error = error_of_job(base::ErrorKind::kResources, place, options, hooks);
  CHECK(contains(error.message, "in " + folder.path("saves") + " failed: cannot save in "));
  CHECK(error.message.ends_with(by_signal ? "; there is no earlier checkpoint"
                                          : "checkpoint is " + folder.path("saves") +
                                                "/step-000000000002"));
}

TEST_CASE_METHOD(FewImages, "a save that fails ends a job at once with --on-save-error stop") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  scenario::PsOptions options = this->options();
  options.steps = 1'000'000;
  const Folder folder;
  options.checkpoint = {folder.path("saves"), 4, "", 10};
  options.checkpoint.on_save_error = "stop";
  options.epochs = 1'000'000;
  Hooks<scenario::PsOptions> hooks;
  hooks.job = [](Job& job) { job.inject.before_save = slow_by(0.1); };
  hooks.heard = [&](const Job&, const Line& line) {
    if (line.event != "checkpoint") return;
    std::filesystem::rename(folder.path("saves"), folder.path("moved"));
    folder.write("saves", "no folder");
  };
  const base::Error error = error_of_job(base::ErrorKind::kResources, place, options, hooks);
  CHECK(contains(error.message, folder.path("saves")));
  CHECK(newest_checkpoint(folder.path("moved")).step == 4);
}
