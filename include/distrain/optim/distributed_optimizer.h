#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "distrain/autograd/context.h"
#include "distrain/optim/update_rule.h"
#include "distrain/rpc/agent.h"

namespace distrain::optim {

class LocalOptimizer;

/// How the ranks that train the same parameters take turns.
struct Sharing {
  /// kAsync: each rank's update is applied as it comes. kSync: one update a step, with the mean of
  /// the gradients of all participants; step() returns when it is applied, everywhere.
  enum class Mode : uint8_t { kAsync = 0, kSync = 1 };
  Mode mode = Mode::kAsync;
  int participants = 1;  ///< kSync: ranks that call step(), each the same number of times
  int participant = 0;   ///< this one's number, from 0; the mean is taken in this order
};

/// Updates that were applied to one rank's parameters.
using UpdateCount = std::shared_ptr<const std::atomic<uint64_t>>;

/// Lets this agent's parameters be optimised by others. On every rank, before join(). The count is
/// of all local optimizers of this rank and stays readable after the agent's end.
UpdateCount install(rpc::Agent& agent);

/// Updates parameters where they live.
///
/// For each rank that owns some of `parameters` there is one local optimizer on that rank, with the
/// state of the update rule; DistributedOptimizers of several ranks over the same parameters share
/// it. (As torch.distributed.optim.DistributedOptimizer, which has one for each rank that trains.)
/// Thread-safe: concurrent steps of one owner are applied one after the other, in place. A sparse
/// gradient may be applied while another context's pass over the same table is in flight; a dense
/// one makes torch refuse that pass, if it saved the parameter ("modified by an inplace
/// operation").
class DistributedOptimizer {
 public:
  /// Throws `invalid` if the parameters of a rank are optimised otherwise already, or by other
  /// options. Parameters of this rank are its own: `sharing` does not apply to them.
  DistributedOptimizer(rpc::Agent& agent, const std::vector<rpc::RRef<at::Tensor>>& parameters,
                       const OptimizerOptions& options, Sharing sharing = {});

  /// Applies the gradients that the context has on each owner. Parameters without one are left out.
  void step(const autograd::Context& context) { step({context.id()}); }
  /// The same with the sum over several contexts, such as one for each micro-batch.
  void step(const std::vector<uint64_t>& contexts);

 private:
  rpc::Agent& agent_;
  const Sharing sharing_;
  std::vector<rpc::RRef<LocalOptimizer>> remote_;
  std::shared_ptr<LocalOptimizer> local_;
};

}  // namespace distrain::optim
