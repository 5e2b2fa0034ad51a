#pragma once

#include <atomic>
#include <set>

#include "distrain/autograd/context.h"
#include "distrain/optim/step_target.h"
#include "distrain/optim/update_rule.h"
#include "distrain/rpc/agent.h"

namespace distrain::optim {

/// Settings of several ranks (the participants) that update the same parameters.
struct Sharing {
  /// kAsync: each participant's update is applied when it arrives. kSync: each step is one update
  /// with the mean of all participants' gradients. kSsp (stale synchronous parallel; Ho et al.,
  /// NIPS 2013): as kAsync, but a participant is at most `staleness` steps ahead of the slowest.
  enum class Mode : uint8_t { kAsync = 0, kSync = 1, kSsp = 2 };
  static constexpr int kOnlooker = -1;

  Mode mode = Mode::kAsync;
  /// Number of ranks that call step(). In kSync and kSsp all of them make the same number of calls.
  int participants = 1;
  /// This rank's number among the participants, from 0. Gradients are summed in this order.
  /// kOnlooker: this rank makes no steps and only reads or loads the optimizer's state.
  int participant = 0;
  int64_t staleness = 0;  ///< kSsp only: maximum lead over the slowest participant, in steps

  /// Returns true if a step may wait for other participants.
  bool steps_wait() const { return mode != Mode::kAsync && participants > 1; }
};

struct Progress {
  uint64_t updates = 0;  ///< updates applied so far
  int64_t lead = 0;      ///< steps by which the participant is ahead of the slowest
  static constexpr auto kFields = std::tuple(&Progress::updates, &Progress::lead);
};

/// Number of updates applied to one rank's shared parameters.
using UpdateCount = std::shared_ptr<const std::atomic<uint64_t>>;

/// Allows other ranks to optimize this rank's parameters. Call it on every rank before join().
/// Returns this rank's update count, which stays readable after `agent` is destroyed.
UpdateCount install(rpc::Agent& agent);

// The next three functions are for jobs that continue without a lost rank (go_on_without()).

/// Keeps this rank's existing parameter updaters until `agent` ends, even if ranks are lost.
void keep_updaters(rpc::Agent& agent);
/// Notes that `process` pauses. Until its next step, other participants in kSsp do not wait for it.
void rest(rpc::Agent& agent, rpc::ProcessNumber process);
/// Returns the number (DistributedOptimizer::set_step_number) of the last step of `process` that
/// was applied to this rank's parameters. Returns nullopt if the mode is kSync, if `process` is
/// unknown or does not number its steps, or if this rank's updaters disagree. When a layer that was
/// added after optim::install() is notified that `process` is lost, the result is final.
std::optional<int64_t> last_step_of(rpc::Agent& agent, rpc::ProcessNumber process);

/// Returns the progress of a participant. Throws `not_found` if `parameter` has no updater.
Progress progress_of(rpc::Agent& agent, const at::Tensor& parameter, int participant);

/// Parameters that are updated with one set of options.
struct ParameterGroup {
  /// Parameters on any rank, including this one, that all participants train (see Sharing).
  std::vector<rpc::RRef<at::Tensor>> shared;
  /// Tensors on this rank that only this rank's steps update, such as parameters under DDP.
  std::vector<at::Tensor> own;
  OptimizerOptions options;
};

/// Updates parameters on the ranks that own them.
///
/// Each rank that owns shared parameters has one parameter updater for them, which holds the state
/// of the update rules and which DistributedOptimizers of several ranks share. (PyTorch's
/// DistributedOptimizer has one local optimizer for each training rank.) Copies of a
/// DistributedOptimizer share their state. Thread-safe: owners apply steps one by one.
///
/// A step does not disturb another context's in-flight pass if the pass works on versions of the
/// parameters (see autograd/parameter_versions.h) or saves no parameter (a lookup with sparse
/// gradients). In other cases that backward pass fails ("modified by an inplace operation").
class DistributedOptimizer {
 public:
  /// Groups may be empty. Throws `invalid` if a parameter is given twice, if a rank's parameters
  /// already have an optimizer with different parameters, groups, options or sharing, or if a
  /// shared parameter is a DistributedDataParallel replica on this rank.
  DistributedOptimizer(rpc::Agent& agent, const std::vector<ParameterGroup>& groups,
                       Sharing sharing = {})
      : DistributedOptimizer(agent, groups, 0, sharing) {}
  DistributedOptimizer(rpc::Agent& agent, const std::vector<rpc::RRef<at::Tensor>>& shared,
                       const OptimizerOptions& options, Sharing sharing = {})
      : DistributedOptimizer(agent, {ParameterGroup{shared, {}, options}}, 0, sharing) {}
  /// Creates an optimizer with one group, with the options and the maximum norm of `rule`. The
  /// caller applies the schedule of `rule` by set_lr_factor().
  DistributedOptimizer(rpc::Agent& agent, const std::vector<rpc::RRef<at::Tensor>>& shared,
                       const std::vector<at::Tensor>& own, const Rule& rule, Sharing sharing = {})
      : DistributedOptimizer(agent, {ParameterGroup{shared, own, rule.options}}, rule.max_norm,
                             sharing) {}

  /// Adds a target, such as the tables of a ShardedEmbedding, that steps of this object and of its
  /// later copies update. state(), snapshot() and load_state() do not include added targets. The
  /// target's Sharing must be that of this object. Then only one thread at a time may call step().
  void add(std::shared_ptr<StepTarget> target) { targets_.push_back(std::move(target)); }
  /// Waits until the updates of all added targets are made. Throws the error of a failed update.
  void settle() {
    for (const auto& target : targets_) target->settle();
  }

  /// Applies the gradients of `context` on each owner; parameters without a gradient stay as they
  /// are. Returns when this rank may begin its next step: see Sharing::Mode.
  ///
  /// If a rank is lost while participants wait for each other, their steps fail with its error,
  /// unless the mode is kSsp and the job continues without it. In kSync and kSsp a step that waits
  /// for a participant in Agent::shutdown() fails with `peer_lost`, unless that participant made
  /// its last step in an RPC: another RPC may still make the next one.
  ///
  /// If `max_norm` (by default that of the constructor's Rule) is above 0 and less than the L2 norm
  /// of all owners' gradients, they are first multiplied by max_norm / norm. Throws `not_finite`,
  /// without any update, if the norm is not finite. In kSync all participants must clip or none;
  /// the norm of the mean gradients gives one scale for all. (The `own` parameters add the mean of
  /// the participants' squared norms, which are equal under DDP.) Otherwise each participant's
  /// gradients have their own norm; with several participants, that of the `own` parameters is
  /// separate, so that replicas under DDP stay equal.
  ///
  /// Each owner checks all gradients first, so it updates all of its parameters or none. An error
  /// that it cannot foresee, such as no memory, says which parameters were updated. If one owner
  /// fails, the updates of others stand; the error says on which ranks the step was made, failed
  /// (after `peer_lost`, `deadline` or `cancelled` it may have been made) or waits for others.
  ///
  /// Returns how many updates, including this one, the parameter updater of the first other owner
  /// (of this rank, if there is no other owner) has applied.
  uint64_t step(const autograd::Context& context, std::optional<double> max_norm = {}) {
    return step(std::vector<uint64_t>{context.id()}, max_norm);
  }
  /// Applies the sums of the gradients of several contexts, such as one for each micro-batch.
  uint64_t step(const std::vector<uint64_t>& contexts, std::optional<double> max_norm = {});

  /// Multiplies each group's learning rate by `factor` (LearningRateSchedule::factor) from this
  /// optimizer's next step on, but not for other ranks' steps. Throws `invalid` if `factor` is
  /// negative or not finite. In kSync step() throws `invalid` if the participants' factors differ.
  void set_lr_factor(double factor) {
    check_lr_factor(factor);
    *lr_factor_ = factor;
  }
  /// Prepares steps in which some participants have no data, and therefore zero gradients. In kSync
  /// the mean gradients are multiplied by `mean_factor` before they are clipped and applied: all
  /// participants set participants / N for the mean over the N that have data. In other modes the
  /// steps of a participant without data update only its `own` parameters.
  void begin_steps(double mean_factor, bool has_data) {
    *mean_factor_ = mean_factor;
    *has_data_ = has_data;
  }
  /// Sets the number of the following steps, which last_step_of() returns; 0 means no number.
  void set_step_number(int64_t number) { *step_number_ = number; }
  bool has_own() const { return own_ != nullptr; }
  size_t size() const { return parameters_; }
  /// Returns copies of the parameters' states on the CPU, group by group, `shared` before `own`.
  /// The result is a consistent snapshot only if no participant steps during the call.
  std::vector<ParameterState> state() const;
  /// Copies each state on its owner's rank and returns references to the copies, which are maps
  /// with the keys of flatten(). `names` has a name for each parameter, in the order of state().
  std::vector<rpc::RRef<rpc::NamedTensors>> snapshot(const std::vector<std::string>& names) const;
  /// Loads `state` on the owners one by one, on this rank last. Throws `bad_data` if the state does
  /// not fit the parameters. Each owner checks its whole part before it changes anything.
  void load_state(const std::vector<ParameterState>& state);
  /// Return or load the states of the `own` parameters only, like state() and load_state().
  std::vector<ParameterState> own_state() const;
  void load_own_state(const std::vector<ParameterState>& state);

 private:
  DistributedOptimizer(rpc::Agent& agent, const std::vector<ParameterGroup>& groups,
                       double max_norm, Sharing sharing);
  class Owner;
  struct Scales {
    double shared = 1;
    double own = 1;
  };
  /// One owner's part of a step.
  struct Step {
    std::string where;
    bool is_only_sent;
    base::Future<uint64_t> done;
  };
  Scales scales_for(const std::vector<uint64_t>& contexts, double max_norm) const;
  std::string outcome_of(const std::vector<Step>& steps) const;
  int participant() const {
    if (sharing_.participant == Sharing::kOnlooker) base::invalid("an onlooker makes no steps");
    return sharing_.participant;
  }
  double mean_factor() const {
    return sharing_.mode == Sharing::Mode::kSync ? mean_factor_->load() : 1;
  }
  std::vector<std::shared_ptr<Owner>> all_owners() const {
    std::vector<std::shared_ptr<Owner>> all = owners_;
    if (own_) all.push_back(own_);
    return all;
  }

  rpc::Agent& agent_;
  const Sharing sharing_;
  const double max_norm_;
  std::shared_ptr<std::atomic<double>> lr_factor_ = std::make_shared<std::atomic<double>>(1.0);
  std::shared_ptr<std::atomic<double>> mean_factor_ = std::make_shared<std::atomic<double>>(1.0);
  std::shared_ptr<std::atomic<bool>> has_data_ = std::make_shared<std::atomic<bool>>(true);
  std::shared_ptr<std::atomic<int64_t>> step_number_ = std::make_shared<std::atomic<int64_t>>(0);
  size_t parameters_ = 0;
  std::vector<std::shared_ptr<Owner>> owners_;        // of shared parameters; this rank comes last
  std::set<int> ranks_;                               // ranks in `owners_`
  std::vector<std::shared_ptr<StepTarget>> targets_;  // of add()
  std::shared_ptr<Owner> own_;                        // null if there are no `own` parameters
};

}  // namespace distrain::optim
