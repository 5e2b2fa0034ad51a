#include "updater_registry.h"

#include <utility>

#include "distrain/base/thread_state.h"

namespace distrain::optim {

std::shared_ptr<ParameterUpdater> UpdaterRegistry::find_or_make(
    const std::vector<at::Tensor>& parameters, const UpdaterOptions& options, Counts counts) {
  std::lock_guard lock(mutex_);
  std::erase_if(updaters_, [](const auto& known) { return known.second.expired(); });
  // Look up every parameter, because none may have two updaters.
  for (const at::Tensor& parameter : parameters) {
    const auto it = updaters_.find(parameter.unsafeGetTensorImpl());
    if (it == updaters_.end()) continue;
    auto updater = it->second.lock();
    if (!updater) continue;
    updater->check_same(parameters, options);
    return updater;
  }
  auto made = std::make_shared<ParameterUpdater>(agent_, parameters, options,
                                                 counts == Counts::kYes ? updates_ : nullptr);
  if (lost_) made->on_rank_lost(*lost_);
  for (const at::Tensor& parameter : parameters) updaters_[parameter.unsafeGetTensorImpl()] = made;
  return made;
}

std::set<std::shared_ptr<ParameterUpdater>> UpdaterRegistry::all_locked() const {
  std::set<std::shared_ptr<ParameterUpdater>> all;
  for (const auto& [parameter, known] : updaters_) {
    if (auto updater = known.lock()) all.insert(std::move(updater));
  }
  return all;
}

std::set<std::shared_ptr<ParameterUpdater>> UpdaterRegistry::all() const {
  std::lock_guard lock(mutex_);
  return all_locked();
}

std::vector<rpc::Wait> UpdaterRegistry::waits() const {
  std::vector<rpc::Wait> waits;
  for (const auto& updater : all()) {
    for (rpc::Wait& wait : updater->waits()) waits.push_back(std::move(wait));
  }
  return waits;
}

void UpdaterRegistry::on_rank_lost(const rpc::Loss& loss) {
  std::set<std::shared_ptr<ParameterUpdater>> all;
  {
    std::lock_guard lock(mutex_);
    if (!lost_ && !loss.job_goes_on) lost_ = loss;
    all = all_locked();
  }
  for (const auto& updater : all) updater->on_rank_lost(loss);
}

void UpdaterRegistry::keep_all() {
  std::lock_guard lock(mutex_);
  kept_ = all_locked();
}

void UpdaterRegistry::note_steps(const std::set<int>& owners) {
  const bool serves = base::thread_state().observer != nullptr;
  std::lock_guard lock(mutex_);
  for (const int owner : owners) serves ? owners_.erase(owner) : owners_.insert(owner).second;
}

void UpdaterRegistry::on_shutdown() {
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

void leave_here(rpc::CallContext& call) {
  const auto process = rpc::process_number(call.caller.rank, call.caller.incarnation);
  for (const auto& updater : call.agent.local<UpdaterRegistry>().all()) updater->leave(process);
}

void rest(rpc::Agent& agent, rpc::ProcessNumber process) {
  for (const auto& updater : agent.local<UpdaterRegistry>().all()) updater->rest(process);
}

std::optional<int64_t> last_step_of(rpc::Agent& agent, rpc::ProcessNumber process) {
  std::optional<int64_t> last;
  for (const auto& updater : agent.local<UpdaterRegistry>().all()) {
    if (!updater->has(process)) continue;
    const std::optional<int64_t> its = updater->last_step_of(process);
    if (!its || (last && last != its)) return std::nullopt;  // a step may be half applied
    last = its;
  }
  return last;
}

std::shared_ptr<ParameterUpdater> UpdaterRegistry::find(const at::Tensor& parameter) {
  std::lock_guard lock(mutex_);
  const auto it = updaters_.find(parameter.unsafeGetTensorImpl());
  return it == updaters_.end() ? nullptr : it->second.lock();
}

}  // namespace distrain::optim
