#include "layers.h"

#include "distrain/rpc/torch_state.h"

namespace distrain::rpc {

std::vector<std::shared_ptr<Layer>> Layers::living() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Layer>> all;
  for (const auto& known : layers_) {
    if (auto layer = known.lock()) all.push_back(std::move(layer));
  }
  return all;
}

void Layers::add(const std::weak_ptr<Layer>& layer) {
  std::lock_guard lock(mutex_);
  layers_.push_back(layer);
  for (const auto& [rank, loss] : losses_) notify_locked(layer, loss);
}

void Layers::notify_locked(const std::weak_ptr<Layer>& layer, const Loss& loss) {
  ++outstanding_;
  notifier_.post([this, layer, loss] {
    const TorchStateGuard guard;
    if (const auto known = layer.lock()) known->on_rank_lost(loss);
    --outstanding_;
  });
}

void Layers::on_rank_lost(const Loss& loss) {
  std::lock_guard lock(mutex_);
  if (!losses_.emplace(loss.rank, loss).second) return;
  for (const auto& layer : layers_) notify_locked(layer, loss);
}

void Layers::on_rank_returned(int rank) {
  std::lock_guard lock(mutex_);
  losses_.erase(rank);
}

void Layers::on_shutdown() {
  for (const auto& layer : living()) layer->on_shutdown();
}

std::vector<Wait> Layers::waits() const {
  std::vector<Wait> waits;
  for (const auto& layer : living()) {
    for (Wait& wait : layer->waits()) waits.push_back(std::move(wait));
  }
  return waits;
}

}  // namespace distrain::rpc
