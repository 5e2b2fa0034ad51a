#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <ATen/Functions.h>

#include "distrain/base/trace.h"
#include "rl.h"

namespace distrain::scenario {

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

Learner::Learner(const RlOptions& options, c10::Device device, job::EventSink& sink)
    : options_(options),
      lines_(sink, "episode", options.log_interval),
      policy_(options.seed, device),
      optimizer_(options.rule(), "async", optim::named(Policy::names(), policy_.parameters())),
      running_reward_(at::zeros({}, at::kDouble)),
      trajectories_(static_cast<size_t>(options.observers) *
                    static_cast<size_t>(options.envs_per_observer)) {}

void Learner::keep_in(job::TrainingPlan& training) {
  job::Part policy = job::part_of(policy_.named_parameters());
  policy.take = [this](int) {
    job::Held held(store::copies_on_host(policy_.named_parameters()));
    held.trained = Policy::names();
    return held;
  };
  training.keep("", std::move(policy));
  training.keep(optimizer_);
  training.keep("", job::part_of({{"running_reward", running_reward_}}, "state"));
}

size_t Learner::place(int observer, uint32_t environment) const {
  const auto count = static_cast<uint32_t>(options_.envs_per_observer);
  if (observer < 0 || observer >= options_.observers || environment >= count) {
    base::invalid(
        fmt::format("rank {} speaks of environment {}, but there are {} observers with {} each",
                    observer + 1, environment, options_.observers, count));
  }
  return static_cast<size_t>(observer) * count + environment;
}

void Learner::check(const ActionRequest& request) const {
  const EnvironmentState* before = nullptr;
  for (const EnvironmentState& state : request.states) {
    place(request.observer, state.environment);
    if (before && state.environment <= before->environment) {
      base::invalid(fmt::format("rank {} asks for environment {} after {}", request.observer + 1,
                                state.environment, before->environment));
    }
    before = &state;
  }
}

std::vector<Actions> Learner::choose(const std::vector<ActionRequest>& requests) {
  std::lock_guard lock(mutex_);
  std::vector<PolicyInput> inputs;
  for (const ActionRequest& request : requests) {
    for (const EnvironmentState& state : request.states) {
      Trajectory& mine = trajectories_[place(request.observer, state.environment)];
      if (!mine.steps.empty()) mine.rewards.push_back(state.last_reward);
      const base::Random random({options_.seed, static_cast<uint64_t>(request.observer) + 1,
                                 state.environment, static_cast<uint64_t>(episode_),
                                 mine.steps.size()});
      inputs.push_back({state.observation, random});
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
      trajectories_[place(request.observer, state.environment)].steps.back().action = *next++;
    }
  }
  now_.requests += static_cast<int64_t>(requests.size());
  return answers;
}

job::Result Learner::end_episode() {
  std::lock_guard lock(mutex_);
  const at::Tensor loss = learn();
  job::Result result{.loss = loss,
                     .samples = episode_steps_,
                     .steps = episode_steps_,
                     .progress = {{"running_reward", running_reward()}}};
  now_.steps += episode_steps_;
  now_.at = base::Clock::now();
  job::Json fields{{"episode", episode_},
                   {"reward", reward_},
                   {"running_reward", running_reward()},
                   {"steps", episode_steps_}};
  fields.update(rates_since(logged_));
  if (lines_.add(episode_, [fields] { return fields; })) logged_ = now_;
  return result;
}

at::Tensor Learner::learn() {
  constexpr double kNewShare = 0.05;  // weight of this episode in the running reward
  std::vector<PolicyStep> steps;
  std::vector<double> returns;
  reward_ = std::numeric_limits<double>::infinity();
  for (const Trajectory& mine : trajectories_) {
    if (mine.steps.empty() || mine.rewards.size() != mine.steps.size()) {
      throw base::Exception(base::ErrorKind::kInternal,
                            fmt::format("episode {} has {} steps and {} rewards of an environment",
                                        episode_, mine.steps.size(), mine.rewards.size()));
    }
    const std::vector<double> own = discounted_returns(mine.rewards, options_.gamma);
    returns.insert(returns.end(), own.begin(), own.end());
    steps.insert(steps.end(), mine.steps.begin(), mine.steps.end());
    reward_ = std::min(reward_, std::accumulate(mine.rewards.begin(), mine.rewards.end(), 0.0));
  }
  normalise(returns);
  for (size_t i = 0; i < steps.size(); ++i) steps[i].advantage = returns[i];
  const Policy::Loss loss = base::traced("backward", [&] { return policy_.loss(steps); });
  if (!std::isfinite(loss.value)) {
    throw base::Exception(base::ErrorKind::kNotFinite,
                          fmt::format("the loss is {} at episode {}: try a smaller --lr",
                                      std::isnan(loss.value) ? "NaN" : "infinite", episode_));
  }
  const base::TraceScope scope("update");
  for (size_t i = 0; i < loss.gradients.size(); ++i) {
    policy_.parameters()[i].mutable_grad() = loss.gradients[i];
  }
  optimizer_.gather();
  optimizer_.step();
  running_reward_.fill_(kNewShare * reward_ + (1 - kNewShare) * running_reward());
  episode_steps_ = static_cast<int64_t>(steps.size());
  return at::scalar_tensor(loss.value, at::kDouble);
}

job::Json Learner::rates_since(const Counts& then) const {
  const double elapsed = std::chrono::duration<double>(now_.at - then.at).count();
  const auto a_second = [&](int64_t count) {
    return elapsed > 0 ? static_cast<double>(count) / elapsed : 0;
  };
  return {{"env_steps_per_s", a_second(now_.steps - then.steps)},
          {"requests_per_s", a_second(now_.requests - then.requests)}};
}

void Learner::add_to(job::Json& fields, int64_t episodes) {
  lines_.end();
  fields.update({{"episodes", episodes},
                 {"solved", solved()},
                 {"running_reward", running_reward()},
                 {"steps", now_.steps},
                 {"train_s", std::chrono::duration<double>(now_.at - begun_.at).count()}});
  fields.update(rates_since(begun_));
}

}  // namespace distrain::scenario
