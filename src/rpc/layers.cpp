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

void Layers::notify_locked(const std::weak_ptr<Layer>& layer, const Loss& loss) {
  notifier_.post([layer, loss] {
    const TorchStateGuard guard;
    if (const auto known = layer.lock()) known->on_rank_lost(loss);
  });
}

std::vector<Wait> Layers::waits() const {
  std::vector<Wait> waits;
  for (const auto& layer : living()) std::ranges::move(layer->waits(), std::back_inserter(waits));
  return waits;
}

}  // namespace distrain::rpc
