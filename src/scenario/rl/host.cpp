#include "host.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <numeric>
#include <sstream>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/trace.h"
#include "distrain/job/local_trainers.h"

namespace distrain::scenario {

namespace {

constexpr double kNewShare = 0.05;  // of an episode in the running reward

template <class... Parts>
[[noreturn]] void fail(base::ErrorKind kind, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw base::Exception(kind, message.str());
}

double per_second(int64_t count, double seconds) {
  return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

}  // namespace

std::vector<double> discounted_returns(const std::vector<double>& rewards, double gamma) {
  std::vector<double> returns(rewards.size());
  double later = 0;
  for (size_t i = rewards.size(); i-- > 0;) returns[i] = later = rewards[i] + gamma * later;
  return returns;
}

void normalise(std::vector<double>& values) {
  const auto count = static_cast<double>(values.size());
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const double deviation = values.size() > 1 ? std::sqrt(squares / (count - 1)) : 0;
  for (double& value : values) {
    value = (value - mean) / (deviation + std::numeric_limits<float>::epsilon());
  }
}

RlHost::RlHost(const RlOptions& options, const job::Job& job, job::EventSink& sink)
    : options_(options),
      sink_(sink),
      stop_(job.stop),
      checkpoints_(options.checkpoint, job, sink),
      policy_(options.seed, job.device()),
      rule_(optim::make_update_rule(optim::Adam{.lr = options.lr})),
      optimizer_(job::rule_access(*rule_, policy_.parameters())),
      trajectories_(static_cast<size_t>(options.observers) *
                    static_cast<size_t>(options.envs_per_observer)) {}

void RlHost::start() {
  if (const auto snapshot = checkpoints_.load()) resume(*snapshot);
  set_state();
}

int64_t RlHost::begin_episode() {
  std::lock_guard lock(mutex_);
  for (Trajectory& each : trajectories_) {
    each.steps.clear();
    each.rewards.clear();
  }
  if (now_.at == base::TimePoint{}) begun_.at = logged_.at = base::Clock::now();
  return ++episode_;
}

void RlHost::check(int observer, uint32_t environment) const {
  const auto count = static_cast<uint32_t>(options_.envs_per_observer);
  if (observer < 0 || observer >= options_.observers || environment >= count) {
    fail(base::ErrorKind::kInvalid, "rank ", observer + 1, " speaks of environment ", environment,
         ", but there are ", options_.observers, " observers with ", count, " each");
  }
}

void RlHost::check(const ActionRequest& request) const {
  const EnvironmentState* before = nullptr;
  for (const EnvironmentState& state : request.states) {
    check(request.observer, state.environment);
    if (before && state.environment <= before->environment) {
      fail(base::ErrorKind::kInvalid, "rank ", request.observer + 1, " asks for environment ",
           state.environment, " after ", before->environment);
    }
    before = &state;
  }
}

RlHost::Trajectory& RlHost::trajectory(int observer, uint32_t environment) {
  check(observer, environment);
  return trajectories_[static_cast<size_t>(observer) *
                           static_cast<size_t>(options_.envs_per_observer) +
                       environment];
}

std::vector<Actions> RlHost::choose(const std::vector<ActionRequest>& requests) {
  std::lock_guard lock(mutex_);
  std::vector<models::PolicyInput> inputs;
  for (const ActionRequest& request : requests) {
    for (const EnvironmentState& state : request.states) {
      Trajectory& mine = trajectory(request.observer, state.environment);
      if (!mine.steps.empty()) mine.rewards.push_back(state.last_reward);
      const models::StepKey key{options_.seed, static_cast<uint64_t>(request.observer) + 1,
                                state.environment, static_cast<uint64_t>(episode_),
                                mine.steps.size()};
      inputs.push_back({state.observation, key});
      mine.steps.push_back({inputs.back()});
    }
  }
  const std::vector<int> chosen = [&] {
    const base::TraceScope scope("forward", "states", static_cast<int64_t>(inputs.size()));
    return policy_.act(inputs);
  }();
  std::vector<Actions> answers;
  auto next = chosen.begin();
  for (const ActionRequest& request : requests) {
    const auto end = next + static_cast<std::ptrdiff_t>(request.states.size());
    answers.emplace_back(next, end);
    for (const EnvironmentState& state : request.states) {
      trajectory(request.observer, state.environment).steps.back().action = *next++;
    }
  }
  requests_ += static_cast<int64_t>(requests.size());
  return answers;
}

void RlHost::report(int observer, const std::vector<FinalReward>& rewards) {
  std::lock_guard lock(mutex_);
  for (const FinalReward& last : rewards) {
    trajectory(observer, last.environment).rewards.push_back(last.reward);
  }
}

void RlHost::end_episode(bool stop) {
  std::lock_guard lock(mutex_);
  learn();
  now_ = {now_.steps + episode_steps_, requests_, base::Clock::now()};
  stopped_ = stop;
  set_state();
  if (options_.log_interval > 0 && episode_ % options_.log_interval == 0) log();
  if (!checkpoints_.saving()) return;
  const int64_t every = options_.checkpoint.every;
  if (state_ != State::kTraining || (every > 0 && episode_ % every == 0)) save();
}

void RlHost::learn() {
  std::vector<models::PolicyStep> steps;
  std::vector<double> returns;
  reward_ = std::numeric_limits<double>::infinity();
  for (const Trajectory& mine : trajectories_) {
    if (mine.steps.empty() || mine.rewards.size() != mine.steps.size()) {
      fail(base::ErrorKind::kInternal, "episode ", episode_, " has ", mine.steps.size(),
           " steps and ", mine.rewards.size(), " rewards of an environment");
    }
    const std::vector<double> own = discounted_returns(mine.rewards, options_.gamma);
    returns.insert(returns.end(), own.begin(), own.end());
    steps.insert(steps.end(), mine.steps.begin(), mine.steps.end());
    reward_ = std::min(reward_, std::accumulate(mine.rewards.begin(), mine.rewards.end(), 0.0));
  }
  normalise(returns);
  for (size_t i = 0; i < steps.size(); ++i) steps[i].advantage = returns[i];
  const models::Policy::Loss loss = base::traced("backward", [&] { return policy_.loss(steps); });
  if (!std::isfinite(loss.value)) {
    fail(base::ErrorKind::kNotFinite, "the loss is ", std::isnan(loss.value) ? "NaN" : "infinite",
         " at episode ", episode_, ": try a smaller --lr");
  }
  const base::TraceScope scope("update");
  for (size_t i = 0; i < loss.gradients.size(); ++i) {
    rule_->apply(i, policy_.parameters()[i], loss.gradients[i]);
  }
  policy_.refresh();
  running_reward_ = kNewShare * reward_ + (1 - kNewShare) * running_reward_;
  episode_steps_ = static_cast<int64_t>(steps.size());
}

void RlHost::log() {
  const double elapsed = std::chrono::duration<double>(now_.at - logged_.at).count();
  sink_.emit("episode",
             {{"episode", episode_},
              {"reward", reward_},
              {"running_reward", running_reward_},
              {"steps", episode_steps_},
              {"env_steps_per_s", per_second(now_.steps - logged_.steps, elapsed)},
              {"requests_per_s", per_second(now_.requests - logged_.requests, elapsed)}});
  logged_ = now_;
}

void RlHost::set_state() {
  if (running_reward_ > options_.threshold) {
    state_ = State::kSolved;
  } else if (options_.max_episodes > 0 && episode_ >= options_.max_episodes) {
    state_ = State::kMissed;
  } else if (stopped()) {
    state_ = State::kStopped;
  }
}

job::Json RlHost::must_agree() const {
  return {{"cmd", "rl"},
          {"observers", options_.observers},
          {"envs_per_observer", options_.envs_per_observer},
          {"seed", options_.seed},
          {"gamma", options_.gamma},
          {"max_steps", options_.max_steps}};
}

void RlHost::save() {
  job::Snapshot snapshot;
  snapshot.step = episode_;
  snapshot.state = must_agree();
  snapshot.state["episode"] = episode_;
  snapshot.state["running_reward"] = running_reward_;
  snapshot.files["model"] = policy_.named_parameters();
  snapshot.files["optimizer"] = job::flatten(models::Policy::names(), optimizer_.get());
  checkpoints_.save(snapshot);
}

void RlHost::resume(const job::Snapshot& snapshot) {
  const job::Json agreed = must_agree();
  for (const auto& [key, value] : agreed.items()) snapshot.expect(key.c_str(), value);
  const job::Json episode = snapshot.state.value("episode", job::Json());
  const job::Json running_reward = snapshot.state.value("running_reward", job::Json());
  if (!episode.is_number_integer() || episode.get<int64_t>() < 1 || episode != snapshot.step) {
    snapshot.refuse("the episode is not a number from 1 on, or not that of its name");
  }
  if (!running_reward.is_number()) snapshot.refuse("it does not say its running_reward");
  snapshot.copy_into("model", policy_.named_parameters());
  snapshot.checked(
      [&] { optimizer_.set(job::unflatten(models::Policy::names(), snapshot.file("optimizer"))); });
  policy_.refresh();
  episode_ = episode.get<int64_t>();
  running_reward_ = running_reward.get<double>();
}

void RlHost::add_to(job::Outcome& outcome) const {
  const double train_s = std::chrono::duration<double>(now_.at - begun_.at).count();
  outcome.fields.update({{"episodes", episode_},
                         {"solved", state_ == State::kSolved},
                         {"running_reward", running_reward_},
                         {"steps", now_.steps},
                         {"train_s", train_s},
                         {"env_steps_per_s", per_second(now_.steps, train_s)},
                         {"requests_per_s", per_second(now_.requests, train_s)}});
  outcome.stopped = stopped();
  outcome.goal_missed = state_ == State::kMissed && !outcome.stopped;
  outcome.message = checkpoints_.last_saved();
  if (outcome.goal_missed) {
    std::ostringstream message;
    message << "not solved after " << episode_ << " episodes: the running reward is " << std::fixed
            << std::setprecision(1) << running_reward_ << ", not above " << std::defaultfloat
            << std::setprecision(6) << options_.threshold;
    outcome.message = message.str();
  }
}

}  // namespace distrain::scenario
