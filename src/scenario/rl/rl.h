#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "distrain/base/random.h"
#include "distrain/job/definition.h"

namespace distrain::scenario {

/// Options of `distrain rl`. The defaults are those of the PyTorch tutorial. Steps are episodes.
struct RlOptions : job::CommonOptions, job::RuleOptions {
  RlOptions() {
    optimizer = "adam";
    checkpoint.every = 100;
  }
  static void describe(job::OptionList<RlOptions>& list);

  int observers = 1;
  int envs_per_observer = 1;
  double gamma = 0.99;        ///< discount factor per step
  int64_t max_steps = 10000;  ///< per environment and episode
  double threshold = 475;     ///< the running reward above which CartPole is solved
  int64_t max_episodes = 0;   ///< 0: train until solved
};

/// An environment's state, rounded to float.
using Observation = std::array<float, 4>;

/// CartPole-v1: a pole on a cart that is pushed left (action 0) or right (1) with 10 N for 20 ms
/// per step. Each step has a reward of 1. An episode ends if the pole is over 12 degrees from
/// upright or the cart over 2.4 m from the center, or after 500 steps.
///
/// The dynamics are from Barto, Sutton and Anderson (1983). Rounding errors grow fast, so this
/// class computes in Gymnasium's order: double precision, Euler's method.
class CartPole {
 public:
  /// Cart position in m, its velocity in m/s, pole angle in rad, its velocity in rad/s.
  using State = std::array<double, 4>;
  struct Step {
    Observation observation{};
    double reward = 0;
    bool terminated = false;  ///< the pole or the cart left its range
    bool truncated = false;   ///< the episode reached the step limit
    bool over() const { return terminated || truncated; }
  };

  /// Starts an episode from a random state near the center.
  Observation reset(base::Random random);
  /// Starts an episode from `state`.
  Observation begin(const State& state);
  /// Must not be called after the end of the episode.
  Step step(int action);

 private:
  Observation observation() const;

  State state_{};
  int steps_ = 0;
};

/// The state of one environment of an observer.
struct EnvironmentState {
  uint32_t environment = 0;
  Observation observation{};
  double last_reward = 0;  ///< reward of the last step; 0 at the start of an episode
  static constexpr auto kFields =
      std::tuple(&EnvironmentState::environment, &EnvironmentState::observation,
                 &EnvironmentState::last_reward);
};
using EnvironmentStates = std::vector<EnvironmentState>;

/// One action for each state of a request.
using Actions = std::vector<int32_t>;

/// The environments of one observer. Not thread-safe.
class Environments {
 public:
  /// `seed` must differ between observers. An episode ends after at most `max_steps` steps.
  Environments(uint64_t seed, int64_t count, int64_t max_steps)
      : seed_(seed), max_steps_(max_steps), environments_(static_cast<size_t>(count)) {}

  /// Plays one episode in each environment. Each step calls `select` for the environments that have
  /// not ended; finally `report` gets the end states with the last rewards, which no request
  /// carried. The start of an episode depends only on seed, environment and `episode`, so a resumed
  /// job needs no generator state.
  void play(uint64_t episode, const std::function<Actions(const EnvironmentStates&)>& select,
            const std::function<void(const EnvironmentStates&)>& report);

 private:
  const uint64_t seed_;
  const int64_t max_steps_;
  std::vector<CartPole> environments_;
};

struct PolicyInput {
  Observation observation{};
  base::Random random{0};  ///< draws the step's dropout and action, whatever the other inputs are
};

struct PolicyStep {
  PolicyInput input;
  int action = 0;
  double advantage = 0;  ///< the step's normalized return
};

/// The policy of PyTorch's tutorial: Linear(4, 128), dropout 0.6, ReLU, Linear(128, 2), softmax.
///
/// On the CPU it computes row by row in plain loops, because a row's result must not depend on the
/// number of rows or threads, which LibTorch's matrix products do not guarantee. For a net of this
/// size the loops are also faster. Other devices use matrix products, with the same random numbers.
/// const functions are thread-safe.
class Policy {
 public:
  static constexpr int kHidden = 128;
  static constexpr int kActions = 2;
  static constexpr double kDropout = 0.6;

  /// Initializes as torch.nn.Linear does.
  explicit Policy(uint64_t seed, c10::Device device = c10::kCPU);

  static const std::vector<std::string>& names();
  std::vector<at::Tensor>& parameters() { return parameters_; }  ///< in the order of names()
  rpc::NamedTensors named_parameters() const;

  /// Draws an action for each of `inputs`, without recording a graph.
  std::vector<int> act(std::span<const PolicyInput> inputs) const;

  /// Returns the more probable action, without dropout, for evaluation.
  int best(const Observation& observation) const;

  struct Loss {
    double value = 0;
    std::vector<at::Tensor> gradients;  ///< in the order of names()
  };
  /// Returns the REINFORCE loss (Williams 1992) and its gradients: the sum over `steps` of
  /// -log p(action) × advantage. Each step uses the dropout with which its action was drawn.
  Loss loss(std::span<const PolicyStep> steps) const;

  using Row = std::array<float, kHidden>;
  /// Draws the dropout factor of each hidden unit, 0 or 1 / (1 - kDropout), two from each number.
  static Row dropout_mask(base::Random& random);

 private:
  const c10::Device device_;
  std::vector<at::Tensor> parameters_;
};

/// A request for actions, with the states of one observer's environments.
struct ActionRequest {
  int observer = 0;          ///< from 0
  EnvironmentStates states;  ///< in ascending order of environments
};

/// Returns for each reward the sum of it and all later ones, discounted by `gamma` per step.
std::vector<double> discounted_returns(const std::vector<double>& rewards, double gamma);
/// Normalises to mean 0 and sample deviation 1; a single value becomes 0.
void normalise(std::vector<double>& values);

/// The policy of a job and its training, in the `agent` rank or in the process of a `--local` job.
///
/// One thread begins and ends episodes; in between, any thread may call choose() and report().
class Learner {
 public:
  Learner(const RlOptions& options, c10::Device device, job::EventSink& sink);

  /// Adds the policy, its optimizer and the running reward to checkpoints, and the goal to the job.
  void keep_in(job::TrainingPlan& training);

  /// Starts episode number `episode`, from 1.
  void begin_episode(int64_t episode);
  /// Throws `invalid` if choose() must not get the request: it has no valid observer, or an
  /// environment that does not exist or occurs twice. May be called by any thread at any time.
  void check(const ActionRequest& request) const;
  /// Chooses actions by one pass over all requests, and records what learning needs. An observer
  /// must not send another request before it has its answer.
  std::vector<Actions> choose(const std::vector<ActionRequest>& requests);
  /// Records the end states of an observer's episode.
  void report(int observer, const EnvironmentStates& ends);
  /// Updates the policy and prints the `episode` line, after all observers have reported.
  job::Result end_episode();

  bool solved() const { return running_reward() > options_.threshold; }
  /// Prints the last `episode` line, if it is not printed yet, and adds the fields of `end` to
  /// `fields`. `episodes` includes the episodes before a resume.
  void add_to(job::Json& fields, int64_t episodes);
  /// Returns the message of a missed goal.
  std::string what_is_missing(int64_t episodes) const;

  const Policy& policy() const { return policy_; }
  const job::SingleProcessOptimizer& optimizer() const { return optimizer_; }

 private:
  /// The current episode of one environment.
  struct Trajectory {
    std::vector<PolicyStep> steps;
    std::vector<double> rewards;
  };

  // Counts in this run up to the time `at`.
  struct Counts {
    int64_t steps = 0;  // of all environments
    int64_t requests = 0;
    std::chrono::steady_clock::time_point at{};
  };

  size_t place(int observer, uint32_t environment) const;
  at::Tensor learn();
  job::Json rates_since(const Counts& then) const;
  double running_reward() const { return running_reward_.item<double>(); }

  const RlOptions options_;
  job::StepLines lines_;
  Policy policy_;
  job::SingleProcessOptimizer optimizer_;
  int64_t episode_ = 0;              // number of the current or last episode
  double reward_ = 0;                // smallest of all environments in that episode
  const at::Tensor running_reward_;  // a scalar, as checkpoints keep tensors

  std::mutex mutex_;  // guards the members below, which choose() and report() write
  std::vector<Trajectory> trajectories_;  // by observer, then by environment
  Counts begun_, logged_, now_;           // `logged_`: at the last line
  int64_t episode_steps_ = 0;
};

void train_rl(job::Rank& rank, const RlOptions& options);
void expose_rl(rpc::Agent& agent);
void train_rl_local(job::SingleProcess& local, const RlOptions& options);
void predict_rl(job::Predictions& predictions, const RlOptions& options);

}  // namespace distrain::scenario
