#pragma once

#include "distrain/base/thread_state.h"
#include "parameter_updater.h"

namespace distrain::optim {

/// Exposed to remote calls. Removes the calling process from all updaters of this rank.
void leave_here(rpc::CallContext& call);

/// The ParameterUpdaters of one agent, indexed by their parameters.
class UpdaterRegistry final : public rpc::Layer {
 public:
  using UpdaterPtr = std::shared_ptr<ParameterUpdater>;

  explicit UpdaterRegistry(rpc::Agent& agent) : agent_(agent) {}

  /// Whether updates() counts an updater's updates. Updaters of `own` parameters use kNo.
  enum class Counts { kYes, kNo };
  /// Returns the updater of `parameters`. Throws `invalid` if it has other parameters or options.
  UpdaterPtr find_or_make(const std::vector<at::Tensor>& parameters, const UpdaterOptions& options,
                          Counts counts = Counts::kYes) {
    std::lock_guard lock(mutex_);
    std::erase_if(updaters_, [](const auto& known) { return known.second.expired(); });
    // Look up every parameter, because no parameter may have two updaters.
    for (const at::Tensor& parameter : parameters) {
      const UpdaterPtr updater = find_locked(parameter);
      if (!updater) continue;
      updater->check_same(parameters, options);
      return updater;
    }
    const auto made = std::make_shared<ParameterUpdater>(
        agent_, parameters, options, counts == Counts::kYes ? updates_ : nullptr);
    if (lost_) made->on_rank_lost(*lost_);
    for (const at::Tensor& parameter : parameters) {
      updaters_[parameter.unsafeGetTensorImpl()] = made;
    }
    return made;
  }

  void on_rank_lost(const rpc::Loss& loss) override {
    std::unique_lock lock(mutex_);
    if (!lost_ && !loss.job_goes_on) lost_ = loss;
    const auto all = all_locked();
    lock.unlock();
    for (const auto& updater : all) updater->on_rank_lost(loss);
  }

  /// Makes this process leave the updaters of the ranks that note_steps() has recorded.
  void on_shutdown() override {
    std::unique_lock lock(mutex_);
    const std::set<int> owners = std::exchange(owners_, {});
    lock.unlock();
    std::vector<base::Future<void>> told;
    for (const int owner : owners) {
      try {
        told.push_back(agent_.rpc_async<&leave_here>(owner));
      } catch (const base::Exception&) {  // the owner is lost
      }
    }
    for (const auto& each : told) static_cast<void>(each.wait_result());
  }

  std::vector<rpc::Wait> waits() const override {
    std::vector<rpc::Wait> waits;
    for (const auto& updater : all()) {
      std::ranges::move(updater->waits(), std::back_inserter(waits));
    }
    return waits;
  }

  /// Records that the calling thread steps the updaters on `owners`, so that on_shutdown() makes
  /// this process leave these updaters. A pool worker removes `owners` from the record instead,
  /// because it serves calls during shutdown() and may make more steps.
  void note_steps(const std::set<int>& owners) {
    const bool serves = base::thread_state().observer != nullptr;
    std::lock_guard lock(mutex_);
    for (const int owner : owners) serves ? owners_.erase(owner) : owners_.insert(owner).second;
  }

  /// Keeps the existing updaters until the agent ends, even if no optimizer uses them.
  void keep_all() {
    std::lock_guard lock(mutex_);
    kept_ = all_locked();
  }
  std::set<UpdaterPtr> all() const {
    std::lock_guard lock(mutex_);
    return all_locked();
  }
  /// Returns null if the parameter has no updater.
  UpdaterPtr find(const at::Tensor& parameter) const {
    std::lock_guard lock(mutex_);
    return find_locked(parameter);
  }
  /// Returns the update count of all updaters with Counts::kYes, destroyed ones included.
  UpdateCount updates() const { return updates_; }

 private:
  UpdaterPtr find_locked(const at::Tensor& parameter) const {
    const auto it = updaters_.find(parameter.unsafeGetTensorImpl());
    return it == updaters_.end() ? nullptr : it->second.lock();
  }
  std::set<UpdaterPtr> all_locked() const {
    std::set<UpdaterPtr> all;
    for (const auto& [parameter, known] : updaters_) all.insert(known.lock());
    all.erase(nullptr);
    return all;
  }

  rpc::Agent& agent_;
  const std::shared_ptr<std::atomic<uint64_t>> updates_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  mutable std::mutex mutex_;
  std::map<const c10::TensorImpl*, std::weak_ptr<ParameterUpdater>> updaters_;
  std::set<UpdaterPtr> kept_;
  std::set<int> owners_;           // the ranks that on_shutdown() notifies
  std::optional<rpc::Loss> lost_;  // the first loss that ends the job
};

}  // namespace distrain::optim
