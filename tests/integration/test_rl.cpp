// ctest: timeout=120 first
#include "distrain/base/future.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::RlOptions;

namespace {

RlOptions short_rl(int64_t episodes) {
  RlOptions options;
  options.max_episodes = episodes;
  options.log_interval = 1;
  return options;
}

/// Returns the fields of the `episode` lines without the speeds, which differ between runs.
std::vector<Json> episodes_of(const Finished& job) {
  std::vector<Json> episodes = job.all("episode", 0);
  for (Json& line : episodes) {
    CHECK(line["env_steps_per_s"].get<double>() > 0);
    CHECK(line["requests_per_s"].get<double>() > 0);
    line.erase("env_steps_per_s");
    line.erase("requests_per_s");
  }
  return episodes;
}

void set_size(RlOptions& options, std::pair<int, int> size) {
  std::tie(options.observers, options.envs_per_observer) = size;
}

}  // namespace

TEST_CASE("the episodes of observers equal those of one process bit for bit") {
  RlOptions options = short_rl(15);
  set_size(options, GENERATE(std::pair(1, 1), std::pair(3, 1), std::pair(1, 4), std::pair(2, 3)));
  options.seed = kSanitized ? 1 : GENERATE(1, 2);
  CAPTURE(options.observers, options.envs_per_observer, options.seed);
  const Folder folders[2];
  std::vector<Json> lines[2];
  for (const Place place : {Place::kRanks, Place::kLocal}) {
    const bool local = place == Place::kLocal;
    options.checkpoint = {folders[local].path(), 0, ""};
    const Finished job = run_job(place, options);
    lines[local] = episodes_of(job);
    CHECK(job.outcomes.at(0).goal_missed);
    CHECK(contains(job.outcomes.at(0).message, "not solved after 15 episodes"));
    CHECK(job.fields(0)["solved"] == false);
    for (const auto& [rank, outcome] : job.outcomes) {
      if (rank > 0) CHECK_FALSE(outcome.goal_missed);
    }
  }
  REQUIRE(lines[0].size() == 15);
  for (size_t i = 0; i < lines[0].size(); ++i) {
    CHECK(lines[0][i] == lines[1][i]);
    const auto reward = lines[0][i]["reward"].get<int64_t>();
    CHECK(reward >= 8);
    CHECK(lines[0][i]["steps"] >= reward * options.observers * options.envs_per_observer);
  }
  check_same(newest_checkpoint(folders[0].path()), newest_checkpoint(folders[1].path()));
}

TEST_CASE("a job ends as soon as its running reward is above the threshold") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  RlOptions options = short_rl(0);
  options.threshold = 12;
  const Finished job = run_job(place, options);
  const std::vector<Json> lines = job.all("episode");
  REQUIRE(lines.size() > 5);
  for (size_t i = 0; i + 1 < lines.size(); ++i) CHECK(lines[i]["running_reward"] <= 12);
  CHECK(lines.back()["running_reward"] > 12);
  const Json& end = job.fields(0);
  CHECK(end["solved"] == true);
  CHECK(end["episodes"] == lines.size());
  CHECK(end["running_reward"] == lines.back()["running_reward"]);
  int64_t steps = 0;
  for (const Json& line : lines) steps += line["steps"].get<int64_t>();
  CHECK(end["steps"] == steps);
  CHECK_FALSE(job.outcomes.at(0).goal_missed);
}

TEST_CASE("an episode has at most the allowed steps, and lines appear at the given interval") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  RlOptions options = short_rl(10);
  options.max_steps = GENERATE(1, 5);
  options.envs_per_observer = 2;
  options.log_interval = 3;
  const Finished job = run_job(place, options);
  const std::vector<Json> lines = job.all("episode");
  REQUIRE(lines.size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(lines[i]["episode"] == 3 * (i + 1));
    CHECK(lines[i]["reward"] == options.max_steps);
    CHECK(lines[i]["steps"] == 2 * options.max_steps);
  }
  options.log_interval = 0;
  CHECK(run_job(place, options).all("episode").empty());
}

TEST_CASE("a policy that is not finite ends the job, and nothing is saved") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  RlOptions options = short_rl(5);
  options.lr = 1e30;
  const Folder folder;
  options.checkpoint = {folder.path(), 0, ""};
  const Finished job = try_job(place, options);
  REQUIRE(job.errors.contains(0));
  CHECK(base::kind_name(job.errors.at(0).kind) == "not_finite");
  CHECK(contains(job.errors.at(0).message, "try a smaller --lr"));
  CHECK_FALSE(store::CheckpointStore::newest(folder.path()));
}

#ifndef DISTRAIN_SANITIZED  // it would take a minute and runs the same code as the cases above
TEST_CASE("CartPole is solved") {
  RlOptions options = short_rl(1000);
  options.observers = 3;
  options.seed = 5;  // a seed that is solved quickly
  const Finished job = run_job(Place::kRanks, options);
  const Json& end = job.fields(0);
  CHECK(end["solved"] == true);
  CHECK(end["running_reward"] > 475);
  CHECK_FALSE(job.outcomes.at(0).goal_missed);
}
#endif

TEST_CASE("an observer that fails during an episode ends the job on all ranks, with its reason") {
  base::Promise<void> played;
  const base::Future<void> has_played = played.future();
  Hooks<RlOptions> hooks;
  hooks.heard_at_once = [&](const Job& job, const Line& line) {
    if (job.rank == 0 && line.event == "episode") played.set();
    if (job.rank == 2 && line.event == "ready") {  // this rank also plays, on other threads
      has_played.wait();
      throw base::Exception(base::ErrorKind::kResources, "no more");
    }
  };
  RlOptions options = short_rl(0);
  options.threshold = 1e9;  // never reached, so only the failure ends the job
  options.observers = 3;
  const Finished job = try_job(Place::kRanks, options, hooks);
  CHECK_FALSE(job.all("episode", 0).empty());
  CHECK(job.outcomes.empty());
  REQUIRE(job.errors.size() == 4);
  for (const auto& [rank, error] : job.errors) {
    CAPTURE(rank, error.message);
    CHECK(base::kind_name(error.kind) == "resources");
    if (rank != 2) CHECK(error.rank == 2);
  }
}
