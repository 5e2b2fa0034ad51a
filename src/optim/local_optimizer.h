#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/optim/update_rule.h"
#include "distrain/rpc/agent.h"

namespace distrain::optim {

/// What all who share a LocalOptimizer have to agree on.
struct SharedTerms {
  OptimizerFields options;
  Sharing::Mode mode = Sharing::Mode::kAsync;
  int participants = 1;
  int64_t staleness = 0;

  bool operator==(const SharedTerms&) const = default;
  static constexpr auto kFields = std::tuple(&SharedTerms::options, &SharedTerms::mode,
                                             &SharedTerms::participants, &SharedTerms::staleness);
};

/// The parameters of one rank that are optimised together, and the state of their update rule.
/// Thread-safe: steps are applied one at a time.
class LocalOptimizer {
 public:
  using Gradients = std::vector<at::Tensor>;  // by parameter; undefined: none

  /// Counts its updates in `updates`, too.
  LocalOptimizer(rpc::Agent& agent, std::vector<at::Tensor> parameters, SharedTerms terms,
                 std::shared_ptr<std::atomic<uint64_t>> updates);

  /// A participant's gradients, which are multiplied by `scale`. Done when the participant may go
  /// on to its next step: kAsync, when they have been applied; kSync, when the mean of all
  /// participants' has been; kSsp, when it is not too far ahead of the slowest.
  /// Gives back how many updates there had been when it was applied, itself included.
  base::Future<uint64_t> step(int participant, Gradients gradients, double scale);

  /// The squared norm of what step() would apply: kSync, of the mean of all participants'
  /// gradients; else the mean of the participants' squared norms. Done when all have asked.
  base::Future<double> norm_squared(int participant, Gradients gradients);

  /// `invalid` if it optimises other parameters, or otherwise.
  void check_same(const std::vector<at::Tensor>& parameters, const SharedTerms& terms) const;

  void set_lr(double lr);
  std::vector<ParameterState> state() const;
  void load_state(const std::vector<ParameterState>& state);
  Progress progress(int participant) const;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  // What the participants bring for one step, until all have come.
  template <class R>
  struct Gathering {
    std::map<int, Gradients> gradients;
    std::vector<base::Promise<R>> waiting;
  };

  void check_participant(int participant, const Gradients& gradients) const;
  template <class R>
  base::Future<R> bring(Gathering<R>& gathering, int participant, Gradients gradients);
  base::Future<uint64_t> step_together(int participant, Gradients gradients, double scale);
  base::Future<uint64_t> step_alone(int participant, const Gradients& gradients, double scale);
  Gradients means(const std::map<int, Gradients>& gathered) const;
  void apply_locked(const Gradients& gradients, double scale);
  int64_t lead_locked(int participant) const;

  rpc::Agent& agent_;
  std::vector<at::Tensor> parameters_;
  const SharedTerms terms_;
  mutable std::mutex mutex_;
  std::unique_ptr<UpdateRule> rule_;
  const std::shared_ptr<std::atomic<uint64_t>> updates_;  // of all optimizers of this rank
  uint64_t applied_ = 0;                                  // of this one
  std::vector<int64_t> steps_;                            // by participant
  Gathering<uint64_t> stepping_;
  Gathering<double> measuring_;
  struct Ahead {
    base::Promise<uint64_t> promise;
    uint64_t updates;  // its result
  };
  std::multimap<int, Ahead> ahead_;  // kSsp: by participant
};

/// The local optimizers of one agent, found by any of their parameters.
class LocalOptimizers {
 public:
  explicit LocalOptimizers(rpc::Agent& agent) : agent_(agent) {}

  std::shared_ptr<LocalOptimizer> find_or_make(const std::vector<at::Tensor>& parameters,
                                               const SharedTerms& terms);
  /// Null if none has it.
  std::shared_ptr<LocalOptimizer> find(const at::Tensor& parameter);
  /// Of all of them, those that are gone included.
  UpdateCount updates() const { return updates_; }

 private:
  rpc::Agent& agent_;
  const std::shared_ptr<std::atomic<uint64_t>> updates_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  std::mutex mutex_;
  std::map<const c10::TensorImpl*, std::weak_ptr<LocalOptimizer>> optimizers_;
};

}  // namespace distrain::optim
