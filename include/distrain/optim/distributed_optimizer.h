#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "distrain/autograd/context.h"
#include "distrain/optim/rule.h"
#include "distrain/optim/update_rule.h"
#include "distrain/rpc/agent.h"

namespace distrain::optim {

class LocalOptimizer;

/// How the ranks that train the same parameters take turns.
struct Sharing {
  /// kAsync: each rank's update is applied as it comes. kSync: one update a step, with the mean of
  /// the gradients of all participants. kSsp (stale synchronous parallel; Ho et al., NIPS 2013):
  /// as kAsync, but nobody runs more than `staleness` steps ahead of the slowest.
  enum class Mode : uint8_t { kAsync = 0, kSync = 1, kSsp = 2 };
  static constexpr int kOnlooker = -1;

  Mode mode = Mode::kAsync;
  int participants = 1;  ///< ranks that call step(), kSync and kSsp: each the same number of times
  /// This one's number, from 0; means are taken in this order. kOnlooker: the owner itself, which
  /// makes no steps of its own, to look after the state.
  int participant = 0;
  int64_t staleness = 0;  ///< kSsp
};

/// How far the updates of some parameters have come.
struct Progress {
  uint64_t updates = 0;  ///< applied by now
  int64_t lead = 0;      ///< steps that a participant is ahead of the slowest
  static constexpr auto kFields = std::tuple(&Progress::updates, &Progress::lead);
};

/// Updates that were applied to one rank's shared parameters.
using UpdateCount = std::shared_ptr<const std::atomic<uint64_t>>;

/// Lets this agent's parameters be optimised by others. On every rank, before join(). The count is
/// of all local optimizers of this rank and stays readable after the agent's end.
UpdateCount install(rpc::Agent& agent);

// For jobs that go on without a participant that is lost; see rpc::Agent::go_on_without().

/// This rank's optimizers stay until its agent ends, whoever refers to them: who does may be lost.
void keep_optimizers(rpc::Agent& agent);
/// That process makes no steps for a while: until it makes one, no other waits for it in kSsp.
void rest(rpc::Agent& agent, rpc::ProcessNumber process);
/// The number (DistributedOptimizer::set_step_number) of the last step of that process which has
/// been applied to parameters of this rank; none if it is no participant of their optimizers, or if
/// these differ. Once a later rpc::Layer hears of a loss, no step of that process is applied.
std::optional<int64_t> last_step_of(rpc::Agent& agent, rpc::ProcessNumber process);

/// On the rank that owns `parameter`: of the optimizer that updates it. `not_found` if none does.
Progress progress_of(rpc::Agent& agent, const at::Tensor& parameter, int participant);

/// Parameters that are updated alike.
struct ParameterGroup {
  /// Trained by all participants, wherever they live, on this rank too: Sharing applies to them.
  std::vector<rpc::RRef<at::Tensor>> shared;
  /// Tensors of this rank that only this rank's steps update, such as a module's under DDP.
  std::vector<at::Tensor> own;
  OptimizerOptions options;
};

/// Updates parameters where they live.
///
/// For each rank that owns some of the shared parameters there is one local optimizer on that rank,
/// with the state of the update rules; DistributedOptimizers of several ranks over the same
/// parameters share it. (As torch.distributed.optim.DistributedOptimizer, which has one for each
/// rank that trains.) A rank may own parameters that it trains with others. Copies are one.
/// Thread-safe: concurrent steps of one owner are applied one after the other. A pass in flight of
/// another context is not disturbed if it works on versions of the parameters (see
/// autograd/parameter_versions.h), or if it has saved none (a lookup with sparse gradients); torch
/// refuses to finish another one that has saved a parameter ("modified by an inplace operation").
class DistributedOptimizer {
 public:
  /// Throws `invalid` if a parameter is given twice (naming the groups, by their places from 0), or
  /// if the parameters of a rank are optimised otherwise already: with others beside them, in other
  /// groups, by other options; or for a shared parameter that is a DistributedDataParallel's
  /// replica on this rank. A group may be empty.
  DistributedOptimizer(rpc::Agent& agent, const std::vector<ParameterGroup>& groups,
                       Sharing sharing = {})
      : DistributedOptimizer(agent, groups, 0, sharing) {}
  /// One group of shared parameters.
  DistributedOptimizer(rpc::Agent& agent, const std::vector<rpc::RRef<at::Tensor>>& shared,
                       const OptimizerOptions& options, Sharing sharing = {})
      : DistributedOptimizer(agent, {ParameterGroup{shared, {}, options}}, 0, sharing) {}
  /// One group by `rule`, clipped as it says. The caller follows its schedule: set_lr_factor().
  DistributedOptimizer(rpc::Agent& agent, const std::vector<rpc::RRef<at::Tensor>>& shared,
                       const std::vector<at::Tensor>& own, const Rule& rule, Sharing sharing = {})
      : DistributedOptimizer(agent, {ParameterGroup{shared, own, rule.options}}, rule.max_norm,
                             sharing) {}

  /// Applies the gradients that the context has on each owner. Parameters without one are left out.
  /// Returns when this rank may begin its next step: see Sharing::Mode. If a rank is lost while
  /// others wait for each other's steps, they fail with its error. In kSync and kSsp they fail with
  /// `peer_lost`, too, if they wait for a participant that has entered Agent::shutdown(), unless
  /// its last step was made by a function that another rank has called: that one it may call again.
  ///
  /// With `max_norm` above 0 gradients are first multiplied by max_norm / norm if their L2 norm is
  /// greater, over the parameters of all owners together; `not_finite` if that norm is not, and
  /// nothing is updated. kSync: one norm a step, of the gradients' means over the participants, and
  /// one scale for all of them, whoever comes last. (`own` parameters count with the mean of the
  /// participants' squared norms, which is each one's where they are replicas under DDP.) kAsync
  /// and kSsp: each participant's gradients have their own norm, and none waits for another; with
  /// several participants `own` ones are scaled by the norm of them alone, so that replicas, whose
  /// gradients are the same for all, stay equal. In kSync all participants clip, or none.
  ///
  /// Each owner checks all gradients (shapes, dtypes, layouts, scales) before it changes any of its
  /// parameters: it updates all of them or none. What cannot be checked before, such as memory that
  /// gives out, is an error that tells which were updated. Where one of several owners fails, the
  /// others' updates stand: the error tells on which ranks the step was made, on which it failed
  /// (with peer_lost, deadline and cancelled: nobody knows whether it was made there), and where it
  /// was still waiting for other participants.
  ///
  /// Gives back how many updates its parameters on the first other owner (or here, if there is
  /// none) had had when this one was applied, itself included.
  uint64_t step(const autograd::Context& context) { return step(context, max_norm_); }
  uint64_t step(const autograd::Context& context, double max_norm) {
    return step({context.id()}, max_norm);
  }
  /// The same with the sum over several contexts, such as one for each micro-batch.
  uint64_t step(const std::vector<uint64_t>& contexts) { return step(contexts, max_norm_); }
  uint64_t step(const std::vector<uint64_t>& contexts, double max_norm);

  /// From this one's next step on each group's learning rate is that of its options times `factor`
  /// (Schedule::factor). It goes with each step to the owners: it costs no message, and no other
  /// rank's steps are changed. kSync: all participants step with the same, else `invalid`.
  void set_lr_factor(double factor);
  /// What last_step_of() tells of this one's next steps.
  void set_step_number(int64_t number) { *step_number_ = number; }

  /// Whether there are `own` parameters.
  bool has_own() const { return own_.optimizer != nullptr; }
  /// Of how many parameters it is.
  size_t size() const { return parameters_; }
  /// What the update rules keep, by parameter, on the CPU: group by group, `shared` before `own`. A
  /// consistent whole only while nobody steps.
  std::vector<ParameterState> state() const;
  /// The same as it is now, left where it is: of each rank that has parameters, tensors by names as
  /// flatten() gives them. `names`: of all parameters.
  std::vector<rpc::RRef<std::map<std::string, at::Tensor>>> held_state(
      const std::vector<std::string>& names) const;
  /// Throws `bad_data` for a state that does not fit: each owner checks all of its part before it
  /// changes anything, one after the other, this rank last.
  void load_state(const std::vector<ParameterState>& state);
  /// The same of the groups' `own` parameters only.
  std::vector<ParameterState> local_state() const;
  void load_local_state(const std::vector<ParameterState>& state);

 private:
  DistributedOptimizer(rpc::Agent& agent, const std::vector<ParameterGroup>& groups,
                       double max_norm, Sharing sharing);
  struct Remote {
    rpc::RRef<LocalOptimizer> optimizer;
    std::vector<size_t> places;  // of its parameters, in the order of state()
  };
  struct Local {
    std::shared_ptr<LocalOptimizer> optimizer;  // null: no parameters
    std::vector<size_t> places;
  };
  /// What gradients are multiplied by.
  struct Scales {
    double shared = 1;
    double own = 1;
  };
  /// One owner's part of a step.
  struct Step {
    std::string where;
    base::Future<uint64_t> done;
  };
  Scales scales_for(const std::vector<uint64_t>& contexts, double max_norm) const;
  std::string outcome_of(const std::vector<Step>& steps) const;
  int participant() const;
  bool steps_wait() const;
  rpc::To owner_of(const Remote& remote, bool waits) const;

  rpc::Agent& agent_;
  const Sharing sharing_;
  const double max_norm_;
  std::shared_ptr<std::atomic<double>> lr_factor_ = std::make_shared<std::atomic<double>>(1.0);
  std::shared_ptr<std::atomic<int64_t>> step_number_ = std::make_shared<std::atomic<int64_t>>(0);
  size_t parameters_ = 0;
  std::vector<Remote> remote_;
  std::set<int> owners_;  // of shared parameters
  Local shared_;          // those of the shared parameters that live here
  Local own_;
};

}  // namespace distrain::optim
