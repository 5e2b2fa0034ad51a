// ctest: labels=asan_soak timeout=180
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::RnnOptions;

namespace {

struct RnnFewWords : RnnText {
  RnnOptions options() const {
    RnnOptions options = on_text();
    options.clip = 0.25;
    options.trainers = 2;
    return options;
  }
};

}  // namespace

TEST_CASE_METHOD(RnnFewWords, "a language model resumes exactly from the middle of an epoch") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  RnnOptions options = this->options();
  int64_t half = 0;
  std::tie(options.trainers, options.optimizer, half) =
      GENERATE(Catch::Generators::table<int, std::string, int64_t>(
          {{1, "adagrad", 1}, {2, "sgd", 1}, {2, "adagrad", 17}}));
  CAPTURE(place, options.trainers, options.optimizer, half);
  check_resume_is_exact(place, options, half, 34);
}

TEST_CASE_METHOD(RnnFewWords, "a language model resumes exactly if its files are not in memory") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  RnnOptions options = this->options();
  options.steps = 17;
  const Snapshot expected = checkpoint_of(place, options);
  const Folder saves;
  options.checkpoint = {saves.path(), kSaveAtEndOnly, "auto"};
  for (const auto& [steps, in_memory] :
       {std::pair(5, "256MB"), std::pair(11, "0"), std::pair(17, "1")}) {
    options.steps = steps;
    options.in_memory = in_memory;
    run_job(place, options);
  }
  Snapshot saved = newest_checkpoint(saves.path());
  saved.state["options"] = expected.state["options"];
  check_same(saved, expected);
}

TEST_CASE_METHOD(RnnFewWords, "the tutorial's model resumes exactly, also at the end of an epoch") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  RnnOptions options;
  options.trainers = 2;
  options.mode = place == Place::kLocal ? "async" : "sync";
  check_resume_is_exact(place, options, GENERATE(5, 8), 14);
}

TEST_CASE_METHOD(RnnFewWords, "a job without a checkpoint to resume from starts anew") {
  RnnOptions options = this->options();
  options.steps = 3;
  const Folder saves;
  options.checkpoint = {saves.path(), kSaveAtEndOnly, "auto"};
  const Finished job = run_job(Place::kRanks, options);
  REQUIRE(job.all("checkpoint").size() == 1);
  CHECK(job.all("checkpoint")[0]["action"] == "saved");
  CHECK(job.all("checkpoint")[0]["step"] == 3);
}

TEST_CASE_METHOD(RnnFewWords, "a language model that is stopped resumes to the same end") {
  RnnOptions options = this->options();
  options.steps = 60;
  // The stop is requested on the server or on a trainer.
  const int64_t at = GENERATE(0, 20);
  SECTION("ranks") { check_stop_and_go_on(Place::kRanks, options, GENERATE(0, 2), at); }
  SECTION("one process") { check_stop_and_go_on(Place::kLocal, options, 0, at); }
}

TEST_CASE_METHOD(RnnFewWords, "trainers with another text than the first are refused by number") {
  const std::string other = folder.write("other.txt", make_text(120, 3));
  const std::string message = refusal_of_other_data<RnnOptions>(
      options(), [&](RnnOptions& options) { options.data = other; });
  CAPTURE(message);
  CHECK(contains(message, "trainer 2 has read other data than the others"));
}

TEST_CASE_METHOD(RnnFewWords,
                 "a trainer with another file than the one that was scanned is refused") {
  const std::string other = folder.write("other.txt", make_text(120, 3));
  RnnOptions options = this->options();
  options.in_memory = "0";
  Hooks<RnnOptions> hooks;
  hooks.options = [&](int rank, RnnOptions& own) {
    if (rank == 2) own.data = other;
  };
  const base::Error error = error_of_job(base::ErrorKind::kBadData, Place::kRanks, options, hooks);
  CAPTURE(error.message);
  CHECK(contains(error.message, other + ": its size or its first 64 KiB are not those"));
}

TEST_CASE_METHOD(RnnFewWords, "a perplexity that is not finite ends the job without a save") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  RnnOptions options = this->options();
  options.clip = 0;
  const Folder saves;
  options.checkpoint = {saves.path(), kSaveAtEndOnly, "auto"};
  options.steps = 2;
  run_job(place, options);
  const Snapshot before = newest_checkpoint(saves.path());
  options.lr = 1e38;
  options.steps = 20;
  const base::Error error = error_of_job(base::ErrorKind::kNotFinite, place, options);
  CAPTURE(error.message);
  CHECK(contains(error.message, "try a smaller --lr"));
  check_same(newest_checkpoint(saves.path()), before);
}

TEST_CASE_METHOD(RnnFewWords, "a checkpoint of another language model is refused with the reason") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  const Folder saves;
  RnnOptions options = this->options();
  options.steps = 2;
  options.checkpoint = {saves.path(), kSaveAtEndOnly, ""};
  run_job(Place::kLocal, options);
  const auto refused = [&](auto change, const std::string& why) {
    RnnOptions other = options;
    change(other);
    check_resume_refused(place, other, saves.path(), why);
  };
  refused([](auto& o) { o.trainers = 1; }, "saved with --trainers 2, not 1");
  refused([](auto& o) { o.mode = "async"; }, "saved with --mode sync, not async");
  refused([](auto& o) { o.seed = 2; }, "saved with --seed 1, not 2");
  refused([](auto& o) { o.nhid = 9; }, "saved with --nhid 8, not 9");
  refused([](auto& o) { o.bptt = 7; }, "saved with --bptt 6, not 7");
  refused([](auto& o) { o.vocab_size = 24; }, "saved with words 25, not 24");
  refused([&](auto& o) { o.data = o.valid_data; }, "saved while training on other data");
}

TEST_CASE_METHOD(RnnFewWords, "a checkpoint that does not contain this language model is refused") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  const Folder saves;
  RnnOptions options = this->options();
  options.steps = 2;
  options.checkpoint = {saves.path(), kSaveAtEndOnly, ""};
  run_job(Place::kLocal, options);
  check_spoilt_refused(
      place, options, saves.path(),
      {{[](Snapshot& s) { s.files["model"].erase("decoder.bias"); },
        "model.safetensors: no decoder.bias"},
       {[](Snapshot& s) { s.files["model"]["more"] = at::zeros({1}); },
        "model.safetensors has more, which the model has not"},
       {[](Snapshot& s) {
          s.files["model"]["encoder.weight"] = at::zeros({25, 7});
        },
        "encoder.weight has another shape or dtype"},
       {[](Snapshot& s) { s.files["model"].erase("rnn.bias_hh_l1"); },
        "model.safetensors: no rnn.bias_hh_l1"},
       {[](Snapshot& s) { s.files["model"]["rnn.x"] = at::zeros({1}); },
        "model.safetensors: it has rnn.x, which the model has not"},
       {[](Snapshot& s) { s.files["optimizer"]["rnn.bias_hh_l1.x"] = at::zeros({1}); },
        "of another optimizer"},
       {[](Snapshot& s) { s.files["state"].erase("hidden.1"); }, "state.safetensors: no hidden"},
       {[](Snapshot& s) {
          s.files["state"]["hidden.2"] = at::zeros({2, 4, 8});
        },
        "state.safetensors has hidden.2, which the model has not"},
       {[](Snapshot& s) {
          s.files["state"]["cell.0"] = at::zeros({2, 4, 9});
        },
        "state.safetensors: cell has another shape"},
       {[](Snapshot& s) { s.files.erase("state"); }, "no state.safetensors"},
       {[](Snapshot& s) { s.state.erase("lr"); }, "no lr"},
       {[](Snapshot& s) {
          s.state["position"]["steps"] = {-1, 0};
        },
        "the position is"}});
}
