#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/base/future.h"

namespace distrain::optim {

struct StepOptions {
  int participant = 0;
  double scale = 1;      ///< factor by which the gradients are multiplied
  double lr_factor = 1;  ///< factor by which each group's learning rate is multiplied
  int64_t number = 0;    ///< DistributedOptimizer::set_step_number; 0: steps are not numbered
  static constexpr auto kFields = std::tuple(&StepOptions::participant, &StepOptions::scale,
                                             &StepOptions::lr_factor, &StepOptions::number);
};

struct NormArguments {
  int participant = 0;
  double own = 0;  ///< squared L2 norm of the gradients of the participant's `own` parameters
  static constexpr auto kFields = std::tuple(&NormArguments::participant, &NormArguments::own);
};
/// Squared L2 norms of the gradients of shared and `own` parameters.
struct Norms {
  double shared = 0;
  double own = 0;
  static constexpr auto kFields = std::tuple(&Norms::shared, &Norms::own);
};

/// Parameters, on one or several ranks, that an optimizer updates together: those of one owner, or
/// the tables of a ShardedEmbedding.
///
/// A step calls check() of all targets, then norm() of all if it clips, then apply() of all. So no
/// target has changed if check() or norm() of one of them throws. `contexts` are the ids of
/// autograd contexts whose gradients are summed.
class StepTarget {
 public:
  virtual ~StepTarget() = default;
  /// Names the target in errors, for example "rank 3".
  virtual std::string where() const = 0;
  /// Throws if apply() would refuse the gradients. Changes no parameter. May wait for the last
  /// update, and then throws the error of an update that failed.
  virtual void check(const std::vector<uint64_t>& contexts) { static_cast<void>(contexts); }
  virtual base::Future<Norms> norm(const std::vector<uint64_t>& contexts,
                                   const NormArguments& arguments) = 0;
  /// Updates the parameters. Returns the number of updates, this one included; if only_sends(),
  /// returns the number of the caller's step.
  virtual base::Future<uint64_t> apply(const std::vector<uint64_t>& contexts,
                                       const StepOptions& options) = 0;
  /// Returns true if apply() returns before the update is made. Then the next check() or settle()
  /// throws the error of an update that failed.
  virtual bool only_sends() const { return false; }
  /// For an optimizer without contexts: groups the lookups that the target has answered since the
  /// last call. Returns the group's number, which stands for a context's id.
  virtual uint64_t gather() { base::invalid("this target takes its gradients from contexts"); }
  /// Waits until the updates of all calls of apply() are made. Throws the error of a failed update.
  virtual void settle() {}
};

}  // namespace distrain::optim
