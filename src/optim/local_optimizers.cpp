#include <utility>

#include "distrain/base/thread_state.h"
#include "local_optimizer.h"

namespace distrain::optim {

std::shared_ptr<LocalOptimizer> LocalOptimizers::find_or_make(
    const std::vector<at::Tensor>& parameters, const SharedTerms& terms, Counts counts) {
  std::lock_guard lock(mutex_);
  std::erase_if(optimizers_, [](const auto& known) { return known.second.expired(); });
  // Look up every parameter, because none may be in two optimizers.
  for (const at::Tensor& parameter : parameters) {
    const auto it = optimizers_.find(parameter.unsafeGetTensorImpl());
    if (it == optimizers_.end()) continue;
    auto optimizer = it->second.lock();
    if (!optimizer) continue;
    optimizer->check_same(parameters, terms);
    return optimizer;
  }
  auto made = std::make_shared<LocalOptimizer>(agent_, parameters, terms,
                                               counts == Counts::kYes ? updates_ : nullptr);
  if (lost_) made->on_rank_lost(*lost_);
  for (const at::Tensor& parameter : parameters)
    optimizers_[parameter.unsafeGetTensorImpl()] = made;
  return made;
}

std::set<std::shared_ptr<LocalOptimizer>> LocalOptimizers::all_locked() const {
  std::set<std::shared_ptr<LocalOptimizer>> all;
  for (const auto& [parameter, known] : optimizers_) {
    if (auto optimizer = known.lock()) all.insert(std::move(optimizer));
  }
  return all;
}

std::set<std::shared_ptr<LocalOptimizer>> LocalOptimizers::all() const {
  std::lock_guard lock(mutex_);
  return all_locked();
}

std::vector<rpc::Wait> LocalOptimizers::waits() const {
  std::vector<rpc::Wait> waits;
  for (const auto& optimizer : all()) {
    for (rpc::Wait& wait : optimizer->waits()) waits.push_back(std::move(wait));
  }
  return waits;
}

void LocalOptimizers::on_rank_lost(const rpc::Loss& loss) {
  std::set<std::shared_ptr<LocalOptimizer>> all;
  {
    std::lock_guard lock(mutex_);
    if (!lost_ && !loss.job_goes_on) lost_ = loss;
    all = all_locked();
  }
  for (const auto& optimizer : all) optimizer->on_rank_lost(loss);
}

void LocalOptimizers::keep_all() {
  std::lock_guard lock(mutex_);
  kept_ = all_locked();
}

void LocalOptimizers::note_steps(const std::set<int>& owners) {
  const bool serves = base::thread_state().observer != nullptr;
  std::lock_guard lock(mutex_);
  for (const int owner : owners) serves ? owners_.erase(owner) : owners_.insert(owner).second;
}

void LocalOptimizers::on_shutdown() {
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
  for (const auto& optimizer : call.agent.local<LocalOptimizers>().all()) optimizer->leave(process);
}

void rest(rpc::Agent& agent, rpc::ProcessNumber process) {
  for (const auto& optimizer : agent.local<LocalOptimizers>().all()) optimizer->rest(process);
}

std::optional<int64_t> last_step_of(rpc::Agent& agent, rpc::ProcessNumber process) {
  std::optional<int64_t> last;
  for (const auto& optimizer : agent.local<LocalOptimizers>().all()) {
    if (!optimizer->has(process)) continue;
    const std::optional<int64_t> its = optimizer->last_step_of(process);
    if (!its || (last && last != its)) return std::nullopt;  // a step may be half applied
    last = its;
  }
  return last;
}

std::shared_ptr<LocalOptimizer> LocalOptimizers::find(const at::Tensor& parameter) {
  std::lock_guard lock(mutex_);
  const auto it = optimizers_.find(parameter.unsafeGetTensorImpl());
  return it == optimizers_.end() ? nullptr : it->second.lock();
}

}  // namespace distrain::optim
