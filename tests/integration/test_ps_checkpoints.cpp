// ctest: labels=ci,tsan_soak timeout=180 first
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::PsOptions;

namespace {

struct FewPsImages {
  FewPsImages() { write_images(folder, 96, 16, 1); }

  // Returns options with 24 steps per epoch for one trainer, 12 for two, 8 for three.
  PsOptions options(const std::string& mode = "sync") const {
    PsOptions options;
    options.data = folder.path();
    options.batch_size = 4;
    options.mode = mode;
    return options;
  }

  const Folder folder;
};

}  // namespace

TEST_CASE_METHOD(FewPsImages, "a job on images resumes exactly from the middle of an epoch") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  PsOptions options = this->options();
  std::tie(options.trainers, options.optimizer) =
      GENERATE(Catch::Generators::table<int, std::string>({{1, "adam"}, {3, "sgd"}, {3, "adam"}}));
  CAPTURE(place, options.trainers, options.optimizer);
  check_resume_is_exact(place, options, 5, 10);
}

TEST_CASE_METHOD(FewPsImages, "a local async job resumes exactly, also from the end of an epoch") {
  check_resume_is_exact(Place::kLocal, options("async"), GENERATE(5, 12), 15);
}

TEST_CASE_METHOD(FewPsImages, "an async job resumes with the remaining steps") {
  PsOptions options = this->options(GENERATE("async", "ssp"));
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, "auto"};
  options.steps = 7;
  run_job(Place::kRanks, options);
  options.steps = 20;
  const Finished rest = run_job(Place::kRanks, options);
  CHECK(rest.fields(0)["updates"] == 2 * 13);
  CHECK(newest_checkpoint(folder.path()).state["position"]["total"] == 40);
}

TEST_CASE_METHOD(FewPsImages, "a job that was saved by two servers resumes on any number of them") {
  PsOptions options = this->options();
  options.optimizer = "adam";
  options.servers = 2;
  options.steps = 8;
  const Snapshot expected = checkpoint_of(Place::kRanks, options);
  const Folder folder;
  options.steps = 4;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  run_job(Place::kRanks, options);
  const Snapshot half = newest_checkpoint(folder.path());
  options.checkpoint = {"", 0, folder.path()};
  options.eval_only = true;
  const std::vector<Json> evaluated = run_job(Place::kRanks, options).all("eval");
  REQUIRE(evaluated.size() == 1);
  options.eval_only = false;
  for (const int servers : {3, 1, 2, 0}) {  // 0: one process
    CAPTURE(servers);
    const Place place = servers == 0 ? Place::kLocal : Place::kRanks;
    options.servers = std::max(servers, 1);
    options.eval_only = true;
    options.checkpoint = {"", 0, folder.path()};
    options.steps = 4;
    const std::vector<Json> again = run_job(place, options).all("eval");
    REQUIRE(again.size() == 1);
    CHECK(again[0]["accuracy"] == evaluated[0]["accuracy"]);
    CHECK(again[0]["loss"].get<double>() ==
          Approx(evaluated[0]["loss"].get<double>()).margin(1e-5));
    options.eval_only = false;
    const Folder copy;
    options.checkpoint = {copy.path(), kSaveAtEndOnly, folder.path()};
    options.steps = 8;
    run_job(place, options);
    const Snapshot resumed = newest_checkpoint(copy.path());
    CHECK(resumed.step == 8);
    check_close(resumed.file("model"), expected.file("model"), 1e-5);
    check_close(resumed.file("optimizer"), expected.file("optimizer"), 1e-5);
    if (servers == 2) check_same(resumed, expected);
  }
}

TEST_CASE_METHOD(FewPsImages, "several servers refuse a checkpoint that does not hold the model") {
  const Folder folder;
  PsOptions options = this->options();
  options.servers = 2;
  options.steps = 2;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  run_job(Place::kRanks, options);
  check_spoilt_refused(Place::kRanks, options, folder.path(),
                       {{[](Snapshot& s) { s.files["model"].erase("fc1.weight"); },
                         "model.safetensors: no fc1.weight"},
                        {[](Snapshot& s) { s.files["model"]["fc3.bias"] = at::zeros({1}); },
                         "model.safetensors has fc3.bias, which the model has not"},
                        {[](Snapshot& s) { s.files["model"]["fc2.bias"] = at::zeros({11}); },
                         "model.safetensors: fc2.bias has another shape or dtype"}});
}

TEST_CASE_METHOD(FewPsImages, "a completed job that is resumed ends at once") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  PsOptions options = this->options();
  const Folder folder;
  options.checkpoint = {folder.path(), 0, "auto"};
  run_job(place, options);
  const Snapshot before = newest_checkpoint(folder.path());
  const Finished again = run_job(place, options);
  CHECK(again.fields(0).value("steps", 0) == 0);
  CHECK(again.all("eval").size() == 1);
  REQUIRE(again.all("warn").size() == 1);
  CHECK(contains(again.all("warn")[0]["message"],
                 "nothing is left to train without a larger --epochs"));
  check_same(newest_checkpoint(folder.path()), before);
}

TEST_CASE_METHOD(FewPsImages,
                 "a job on images saves at an interval of steps, or after each epoch") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const std::string mode = GENERATE("async", "sync");
  const int64_t every = GENERATE(0, 5);
  CAPTURE(place, mode, every);
  const Folder folder;
  PsOptions options = this->options(mode);
  options.limit = 48;  // 6 steps per epoch
  options.epochs = 2;
  options.checkpoint = {folder.path(), every, ""};
  std::vector<int64_t> steps;
  for (const Json& line : run_job(place, options).all("checkpoint")) {
    steps.push_back(line["step"].get<int64_t>());
  }
  CHECK(steps == (every > 0 ? std::vector<int64_t>{5, 10, 12} : std::vector<int64_t>{6, 12}));
}

TEST_CASE_METHOD(FewPsImages, "a job on images that is stopped resumes to the same end") {
  PsOptions options = this->options();
  options.steps = 30;
  SECTION("by a signal to the server") { check_stop_and_go_on(Place::kRanks, options, 0, 8); }
  SECTION("by a signal to a trainer") {
    check_stop_and_go_on(Place::kRanks, options, 2, GENERATE(0, 8));
  }
  SECTION("in one process") { check_stop_and_go_on(Place::kLocal, options, 0, GENERATE(0, 8)); }
}

TEST_CASE_METHOD(FewPsImages,
                 "a job whose trainers differ in progress can be stopped and resumed") {
  PsOptions options = this->options(GENERATE("async", "ssp"));
  CAPTURE(options.mode);
  options.trainers = 3;
  options.staleness = 2;
  options.steps = 16;
  options.log_interval = 1;
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, "auto"};
  Hooks<PsOptions> hooks = slow_rank<PsOptions>(3, 0.01);
  hooks.heard = [](const Job& job, const Line& line) {
    // Each rank requests the stop, because a slow rank alone might do so after the last step.
    if (line.event == "step" && line.fields["step"] == 4) job.stop->request();
  };
  const Finished first = run_job(Place::kRanks, options, hooks);
  for (const auto& [rank, outcome] : first.outcomes) {
    CAPTURE(rank);
    CHECK(outcome.stopped);
  }
  const Json saved = newest_checkpoint(folder.path()).state["position"];
  CHECK(saved["total"] == first.fields(0)["updates"]);
  CHECK(saved["total"] < 48);
  const Finished rest = run_job(Place::kRanks, options);
  CHECK(rest.fields(0)["updates"] == 48 - saved["total"].get<int64_t>());
  CHECK(newest_checkpoint(folder.path()).state["position"]["total"] == 48);
}

TEST_CASE_METHOD(FewPsImages, "a job resumes from an older checkpoint by its path") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  PsOptions options = this->options();
  options.steps = 8;
  const Folder first, second, third;
  options.checkpoint = {first.path(), 4, ""};
  run_job(place, options);
  options.checkpoint = {second.path(), 4, first.path("step-000000000004")};
  run_job(place, options);
  check_same(newest_checkpoint(second.path()), newest_checkpoint(first.path()));
  options.checkpoint = {third.path(), 4, first.path("step-000000000005")};
  const base::Error error = error_of_job(base::ErrorKind::kBadData, place, options);
  CAPTURE(error.message);
  CHECK(contains(error.message, "step-000000000005"));
}

TEST_CASE_METHOD(FewPsImages, "a checkpoint that cannot be written ends the job on all ranks") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  PsOptions options = this->options();
  options.steps = 6;
  options.log_interval = 1;
  const Folder folder;
  options.checkpoint = {folder.path("saves"), 4, ""};
  Hooks<PsOptions> hooks;
  hooks.heard = [&](const Job&, const Line& line) {
    if (line.event != "step" || line.fields["step"] != 1) return;
    std::filesystem::remove_all(folder.path("saves"));
    folder.write("saves", "no folder");
  };
  const base::Error error = error_of_job(base::ErrorKind::kResources, place, options, hooks);
  CAPTURE(error.message);
  CHECK(contains(error.message, folder.path("saves")));
}

TEST_CASE_METHOD(FewPsImages, "another job's checkpoint on images is refused, with the reason") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  const Folder folder, other;
  write_images(other, 96, 16, 2);
  PsOptions options = this->options();
  options.steps = 2;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  run_job(Place::kLocal, options);
  const auto refused = [&](auto change, const std::string& why) {
    PsOptions changed = options;
    change(changed);
    check_resume_refused(place, changed, folder.path(), why);
  };
  refused([](auto& o) { o.trainers = 3; }, "saved with --trainers 2, not 3");
  refused([](auto& o) { o.mode = "async"; }, "saved with --mode sync, not async");
  refused([](auto& o) { o.seed = 2; }, "saved with --seed 1, not 2");
  refused([](auto& o) { o.limit = 50; },
          "saved with examples 96, not 50: resume with the data and options that it was saved "
          "with, or ");
  refused([](auto& o) { o.mean = 0.5; }, "saved with --mean 0.1307, not 0.5");
  refused([](auto& o) { o.dropout = 0; }, "saved with --dropout on, not off");
  refused([](auto& o) { o.dropout = 0.3; }, "saved with --dropout on, not 0.3");
  refused([&](auto& o) { o.data = other.path(); }, "saved while training on other data");
}

TEST_CASE_METHOD(FewPsImages, "a checkpoint that does not hold this model is refused") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  const Folder folder;
  PsOptions options = this->options();
  options.steps = 2;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  run_job(Place::kLocal, options);
  check_spoilt_refused(
      place, options, folder.path(),
      {{[](Snapshot& s) { s.files["model"].erase("fc2.bias"); }, "model.safetensors: no fc2.bias"},
       {[](Snapshot& s) { s.files["model"]["fc3.bias"] = at::zeros({1}); },
        "model.safetensors: it has fc3.bias, which the model has not"},
       {[](Snapshot& s) { s.files["model"]["fc2.bias"] = at::zeros({11}); },
        "model.safetensors: fc2.bias has another shape or dtype"},
       {[](Snapshot& s) { s.files["model"]["fc2.bias"] = at::zeros({10}, at::kDouble); },
        "model.safetensors: fc2.bias has another shape or dtype"},
       {[](Snapshot& s) { s.files["optimizer"]["fc3.bias.x"] = at::zeros({1}); },
        "fc3.bias.x, which is of no parameter"},
       {[](Snapshot& s) { s.files["optimizer"]["fc2.bias.no"] = at::zeros({1}); }, ""},
       {[](Snapshot& s) { s.files.erase("model"); }, "no model.safetensors"},
       {[](Snapshot& s) { s.state["cmd"] = "rnn"; }, "a checkpoint of rnn, not of ps"},
       {[](Snapshot& s) { s.state.erase("position"); }, "the position is"},
       {[](Snapshot& s) { s.state["position"]["epoch"] = 0; }, "the position is"},
       {[](Snapshot& s) {
          s.state["position"]["steps"] = {13, 13};
          s.state["position"]["total"] = 26;
        },
        "beyond the end of the epoch"}});
}
