#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "distrain/rpc/agent.h"
#include "parameter_updater.h"

namespace distrain::optim {

/// The ParameterUpdaters of one agent, indexed by their parameters.
class UpdaterRegistry final : public rpc::Layer {
 public:
  explicit UpdaterRegistry(rpc::Agent& agent) : agent_(agent) {}

  /// Whether an updater's updates count in updates(). Those of `own` parameters do not.
  enum class Counts { kYes, kNo };
  /// Throws `invalid` if one of `parameters` has an updater with other parameters or options.
  std::shared_ptr<ParameterUpdater> find_or_make(const std::vector<at::Tensor>& parameters,
                                                 const UpdaterOptions& options,
                                                 Counts counts = Counts::kYes);
  void on_rank_lost(const rpc::Loss& loss) override;
  /// Calls ParameterUpdater::leave() on the owners that note_steps() has recorded.
  void on_shutdown() override;
  std::vector<rpc::Wait> waits() const override;
  /// Records that the calling thread steps updaters on `owners`, so that on_shutdown() notifies
  /// these ranks. If the thread is a pool worker, removes the record instead: a worker still serves
  /// calls during shutdown(), so it may make more steps.
  void note_steps(const std::set<int>& owners);
  /// Keeps the existing updaters until the agent ends.
  void keep_all();
  std::set<std::shared_ptr<ParameterUpdater>> all() const;
  std::shared_ptr<ParameterUpdater> find(const at::Tensor& parameter);  ///< null if there is none
  /// Returns the update count of all updaters with Counts::kYes, destroyed ones included.
  UpdateCount updates() const { return updates_; }

 private:
  std::set<std::shared_ptr<ParameterUpdater>> all_locked() const;

  rpc::Agent& agent_;
  const std::shared_ptr<std::atomic<uint64_t>> updates_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  mutable std::mutex mutex_;
  std::map<const c10::TensorImpl*, std::weak_ptr<ParameterUpdater>> updaters_;
  std::set<std::shared_ptr<ParameterUpdater>> kept_;
  std::set<int> owners_;           // the ranks that on_shutdown() notifies
  std::optional<rpc::Loss> lost_;  // the first loss that ends the job
};

/// Exposed function by which the calling process leaves all updaters of this rank.
void leave_here(rpc::CallContext& call);

}  // namespace distrain::optim
