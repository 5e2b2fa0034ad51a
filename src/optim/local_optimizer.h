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

/// The parameters of one rank that are optimised together, and the state of their update rule.
/// Thread-safe: steps are applied one at a time.
class LocalOptimizer {
 public:
  using Gradients = std::vector<at::Tensor>;  // by parameter; undefined: none

  /// Counts its updates in `updates`, too.
  LocalOptimizer(std::vector<at::Tensor> parameters, OptimizerFields options, int participants,
                 std::shared_ptr<std::atomic<uint64_t>> updates);

  /// A participant's gradients. Done when they, or with several participants the mean of all
  /// participants', have been applied.
  base::Future<void> step(int participant, Gradients gradients);

  /// `invalid` if it optimises other parameters, or otherwise.
  void check_same(const std::vector<at::Tensor>& parameters, const OptimizerFields& options,
                  int participants) const;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  void apply_locked(const Gradients& gradients);

  std::vector<at::Tensor> parameters_;
  const OptimizerFields options_;
  const int participants_;
  mutable std::mutex mutex_;
  std::unique_ptr<UpdateRule> rule_;
  const std::shared_ptr<std::atomic<uint64_t>> updates_;
  // The step that is being gathered, with several participants.
  std::map<int, Gradients> gathered_;
  std::vector<base::Promise<void>> waiting_;
};

/// The local optimizers of one agent, found by any of their parameters.
class LocalOptimizers {
 public:
  std::shared_ptr<LocalOptimizer> find_or_make(const std::vector<at::Tensor>& parameters,
                                               const OptimizerFields& options, int participants);
  /// Of all of them, those that are gone included.
  UpdateCount updates() const { return updates_; }

 private:
  const std::shared_ptr<std::atomic<uint64_t>> updates_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  std::mutex mutex_;
  std::map<const c10::TensorImpl*, std::weak_ptr<LocalOptimizer>> optimizers_;
};

}  // namespace distrain::optim
