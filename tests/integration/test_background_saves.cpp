// ctest: labels=notsan timeout=180
// Checkpoints that are written while the job goes on training. Not under tsan, which sees nothing
// of the tensors' kernels and counters in LibTorch, so finds races where there are none:
// unit_job.checkpoints has the threads.
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

// Numbers of the lines of an event, in the order in which all lines came.
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

TEST_CASE("rows on a server and replicas of trainers are saved as they were") {
  scenario::HybridOptions options;
  options.mode = "sync";
  options.optimizer = "adam";
  check_saved_as_it_was(GENERATE(Place::kRanks, Place::kLocal), options, 6);
}

TEST_CASE_METHOD(FewImages, "a net on rank 0 is saved as it was") {
  check_saved_as_it_was(GENERATE(Place::kRanks, Place::kLocal), options(), 6);
}

TEST_CASE("a language model and each trainer's own state are saved as they were") {
  scenario::RnnOptions options;
  options.mode = "sync";
  options.trainers = 2;
  options.optimizer = "adagrad";
  check_saved_as_it_was(GENERATE(Place::kRanks, Place::kLocal), options, 3);
}

TEST_CASE("stages with statistics of batches are saved as they were") {
  scenario::PipelineOptions options = small_pipeline(4, 1);
  options.num_split = {2};
  options.momentum = 0.9;
  check_saved_as_it_was(GENERATE(Place::kRanks, Place::kLocal), options, 1,
                        &scenario::PipelineOptions::batches);
}

TEST_CASE("a policy is saved as it was") {
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
  base::Promise<void> trained;  // all that is to be
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
  // Whoever has ended has saved.
  CHECK(newest_checkpoint(folder.path()).step == 6);
  CHECK(contains(job.outcomes.at(0).message, "step 6"));
}

TEST_CASE_METHOD(FewImages, "a save that fails ends a job that has long gone on") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  scenario::PsOptions options = this->options();
  options.steps = 1'000'000;
  const Folder folder;
  options.checkpoint = {folder.path("saves"), 4, "", 10};
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
