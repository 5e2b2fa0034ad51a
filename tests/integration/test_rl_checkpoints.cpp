// ctest: labels=ci,tsan_soak timeout=120
#include <cmath>

#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::RlOptions;

namespace {

RlOptions saving_rl(const Folder& folder, int64_t episodes, const std::string& resume = "auto") {
  RlOptions options;
  options.max_episodes = episodes;
  options.log_interval = 1;
  options.checkpoint = {folder.path(), 0, resume};
  return options;
}

}  // namespace

TEST_CASE("a job of episodes resumes exactly") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const int observers = GENERATE(1, 2);
  const Folder whole, halves;
  RlOptions options = saving_rl(whole, 40);
  options.observers = observers;
  run_job(place, options);
  options.checkpoint.dir = halves.path();
  options.max_episodes = 17;
  run_job(place, options);
  CHECK(newest_checkpoint(halves.path()).step == 17);
  options.max_episodes = 40;
  const Finished rest = run_job(place, options);
  CHECK(rest.all("episode").size() == 23);
  CHECK(rest.all("episode")[0]["episode"] == 18);
  CHECK(rest.fields(0)["episodes"] == 40);
  check_same(newest_checkpoint(halves.path()), newest_checkpoint(whole.path()));
}

TEST_CASE("a job of episodes saves at a given interval of episodes and at its end") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const int64_t every = GENERATE(0, 4, 5);
  const Folder folder;
  RlOptions options = saving_rl(folder, 10);
  options.checkpoint.every = every;
  std::vector<int64_t> episodes;
  for (const Json& line : run_job(place, options).all("checkpoint")) {
    episodes.push_back(line["step"].get<int64_t>());
  }
  const std::vector<int64_t> expected = every == 4   ? std::vector<int64_t>{4, 8, 10}
                                        : every == 5 ? std::vector<int64_t>{5, 10}
                                                     : std::vector<int64_t>{10};
  CHECK(episodes == expected);
}

TEST_CASE("resuming a completed job of episodes has no effect") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const bool solved = GENERATE(true, false);
  const Folder folder;
  RlOptions options = saving_rl(folder, solved ? 0 : 3);
  if (solved) options.threshold = 8;
  const Finished first = run_job(place, options);
  const Finished again = run_job(place, options);
  CHECK(again.all("episode").empty());
  CHECK(again.all("warn").size() == (solved ? 0 : 1));  // the warning names --max-episodes
  for (const char* name : {"solved", "episodes", "running_reward"}) {
    CHECK(again.fields(0)[name] == first.fields(0)[name]);
  }
  CHECK(again.fields(0)["steps"] == 0);
  CHECK(again.outcomes.at(0).goal_missed == !solved);
}

TEST_CASE("a job of episodes that is stopped resumes to the same end") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const int told = place == Place::kLocal ? 0 : GENERATE(0, 2);
  CAPTURE(told);
  const Folder whole, stopped;
  RlOptions options = saving_rl(whole, 40);
  options.observers = 2;
  run_job(place, options);
  options.checkpoint.dir = stopped.path();
  StopSignals signals;
  Hooks<RlOptions> hooks;
  hooks.job = [&](Job& job) { signals.keep(job); };
  hooks.heard = [&](const Job&, const Line& line) {
    if (line.event == "episode" && line.fields["episode"] == 7) CHECK(signals.of(told).request());
  };
  check_stopped(run_job(place, options, hooks), stopped.path());
  const int64_t stopped_at = newest_checkpoint(stopped.path()).step;
  CHECK(stopped_at >= 7);
  REQUIRE(stopped_at < 40);
  const Finished rest = run_job(place, options);
  for (const auto& [rank, outcome] : rest.outcomes) CHECK_FALSE(outcome.stopped);
  check_same(newest_checkpoint(stopped.path()), newest_checkpoint(whole.path()));
}

TEST_CASE("a job of episodes that is stopped in its last one reports that") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const int told = place == Place::kLocal ? 0 : GENERATE(0, 2);
  const bool solved = GENERATE(true, false);
  CAPTURE(told, solved);
  const Folder folder;
  RlOptions options = saving_rl(folder, solved ? 0 : 8, "");
  options.observers = 2;
  if (solved) {  // solved by the 8th episode, with rewards of 5
    options.max_steps = 5;
    options.threshold = 5 * (1 - std::pow(0.95, 7.5));
  }
  StopSignals signals;
  Hooks<RlOptions> hooks;
  hooks.job = [&](Job& job) { signals.keep(job); };
  hooks.heard = [&](const Job&, const Line& line) {
    // The 8th episode is the last. Its line is printed before the save is complete.
    if (line.event != "episode" || line.fields["episode"] != 8) return;
    CHECK(signals.of(told).request());
  };
  const Finished job = run_job(place, options, hooks);
  check_stopped(job, folder.path());
  CHECK(job.fields(0)["episodes"] == 8);
  CHECK(job.fields(0)["solved"] == solved);
}

TEST_CASE("a signal ends a job of episodes without remaining work at once") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const bool solved = GENERATE(true, false);
  const Folder folder;
  RlOptions options = saving_rl(folder, solved ? 0 : 3);
  if (solved) options.threshold = 8;
  run_job(place, options);
  StopSignals signals;
  Hooks<RlOptions> hooks;
  hooks.job = [&](Job& job) { signals.keep(job); };
  run_job(place, options, hooks);
  for (const int rank : signals.ranks()) {
    CAPTURE(rank);
    CHECK_FALSE(signals.of(rank).armed());
  }
}

TEST_CASE("before all ranks have joined, signals are not deferred and a bad folder is reported") {
  const Folder folder;
  RlOptions options = saving_rl(folder, 3);
  Hooks<RlOptions> hooks;
  hooks.heard = [](const Job& job, const Line& line) {
    // Checks rank 0 only: an observer may play already when its `ready` line is printed.
    if (line.event == "ready" && job.rank == 0) CHECK_FALSE(job.stop->armed());
  };
  run_job(Place::kRanks, options, hooks);

  options.checkpoint.resume = "";  // now the folder holds the checkpoints of another run
  Hooks<RlOptions> short_join;
  short_join.job = [](Job& job) {
    if (job.rank != 0) job.join_timeout_s = 1;  // short, because rank 0 fails before it joins
  };
  const Finished job = try_job(Place::kRanks, options, short_join);
  CHECK(base::kind_name(job.errors.at(0).kind) == "invalid");
  CHECK(contains(job.errors.at(0).message, "holds another run's checkpoints"));
  CHECK(job.all("ready").empty());
}

TEST_CASE("a checkpoint of another job of episodes is refused with the reason") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const Folder folder;
  const RlOptions options = saving_rl(folder, 2);
  run_job(Place::kLocal, options);
  const auto refused = [&](auto change, const std::string& why) {
    RlOptions changed = options;
    change(changed);
    check_resume_refused(place, changed, folder.path(), why);
  };
  refused([](auto& o) { o.observers = 3; }, "saved with --observers 1, not 3");
  refused([](auto& o) { o.envs_per_observer = 2; }, "saved with --envs-per-observer 1, not 2");
  refused([](auto& o) { o.seed = 2; }, "saved with --seed 1, not 2");
  refused([](auto& o) { o.gamma = 0.5; }, "saved with --gamma 0.99, not 0.5");
  refused([](auto& o) { o.max_steps = 9; }, "saved with --max-steps 10000, not 9");
  refused([](auto& o) { o.optimizer = "sgd"; }, "saved with --optimizer adam, not sgd");
  RlOptions changed = options;
  changed.lr = 0.1;
  changed.threshold = 400;
  changed.max_episodes = 3;
  CHECK(run_job(place, changed).fields(0)["episodes"] == 3);
}

TEST_CASE("a checkpoint that does not contain this policy is refused") {
  const Folder folder;
  const RlOptions options = saving_rl(folder, 2);
  run_job(Place::kLocal, options);
  check_spoilt_refused(
      Place::kLocal, options, folder.path(),
      {{[](Snapshot& s) { s.files["model"].erase("affine1.bias"); },
        "model.safetensors: no affine1.bias"},
       {[](Snapshot& s) { s.files["model"]["affine2.bias"] = at::zeros({3}); },
        "model.safetensors: affine2.bias has another shape or dtype"},
       {[](Snapshot& s) { s.files["optimizer"]["affine3.bias.x"] = at::zeros({1}); },
        "affine3.bias.x, which is of no parameter"},
       {[](Snapshot& s) { s.files.erase("optimizer"); }, "no optimizer.safetensors"},
       {[](Snapshot& s) { s.state["cmd"] = "ps"; }, "a checkpoint of ps, not of rl"},
       {[](Snapshot& s) { s.state["position"]["steps"] = {3}; }, "the position"},
       {[](Snapshot& s) { s.state["position"]["epoch"] = 2; }, "the position"},
       {[](Snapshot& s) { s.files["state"]["running_reward"] = at::zeros({2}); },
        "state.safetensors: running_reward has another shape or dtype"},
       {[](Snapshot& s) { s.files["state"]["reward"] = at::zeros({}); },
        "state.safetensors: it has reward, which the model has not"},
       {[](Snapshot& s) { s.files.erase("state"); }, "no state.safetensors"}});
}
