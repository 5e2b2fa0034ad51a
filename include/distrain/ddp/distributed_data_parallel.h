#pragma once

#include <utility>

#include <ATen/core/grad_mode.h>

#include "distrain/collective/staged_reduce_group.h"
#include "distrain/ddp/reducer.h"

namespace distrain::ddp {

/// Checks that all ranks have `tensors` with the same names, shapes, dtypes and requires_grad, and
/// the same grouping by device. Otherwise throws `invalid` on all ranks, naming the first rank and
/// tensor that differ from rank 0. A collective call.
void check_same_everywhere(const std::vector<NamedParameter>& tensors,
                           collective::ReduceGroup& group);

/// Copies the values of dense `tensors` from group rank 0 to the other ranks in the current
/// streams, without autograd. A collective call with one message per device.
void broadcast_values(const std::vector<at::Tensor>& tensors, collective::ReduceGroup& group);

/// A replica of `Module` on each rank of a group, kept equal by averaging the gradients.
///
/// `Module` is a torch module holder (`torch::nn::Linear`) or a shared_ptr to a module. The
/// constructor throws `invalid` unless all ranks have the same parameters and buffers, and copies
/// the values of rank 0. forward() in training mode first copies the buffers of rank 0. The
/// constructor, such a forward() and each backward pass are collective.
///
///   DistributedDataParallel model(torch::nn::Linear(16, 8), backend);
///   loss(model.forward(x)).backward();            // gradients in .grad are means over the ranks
///
///   autograd::Context context(agent);             // the same in a distributed pass:
///   autograd::backward(context, {loss(model.forward(x))});  // the context's gradients are means
///
/// forward() in training mode with gradients enabled announces a pass over the thread's current
/// context (Reducer::expect) or a plain pass (Reducer::count_forward). Several forwards may precede
/// a backward pass, and several contexts may live at once, such as those of micro-batches. A pass
/// over a context that used the parameters only by module() or in eval mode fails.
template <class Module>
class DistributedDataParallel {
 public:
  DistributedDataParallel(Module module, std::shared_ptr<collective::ReduceGroup> group,
                          Reducer::Options options = {})
      : module_(std::move(module)),
        group_(std::move(group)),
        has_buffers_(!module_->buffers().empty()),
        reducer_(make_equal(), group_, options) {}
  /// Averages the gradients by a StagedReduceGroup over `backend`.
  DistributedDataParallel(Module module, c10::intrusive_ptr<collective::Backend> backend,
                          Reducer::Options options = {})
      : DistributedDataParallel(std::move(module),
                                std::make_shared<collective::StagedReduceGroup>(std::move(backend)),
                                options) {}

  template <class... Args>
  auto forward(Args&&... args) {
    if (module_->is_training()) {
      if (at::GradMode::is_enabled()) {
        if (const auto context = autograd::ContextRef::current()) {
          reducer_.expect(*context);
        } else {
          reducer_.count_forward();
        }
      }
      if (has_buffers_) broadcast_values(module_->buffers(), reducer_.group());
    }
    return module_->forward(std::forward<Args>(args)...);
  }

  Module& module() { return module_; }
  Reducer& reducer() { return reducer_; }
  auto parameters() const { return module_->parameters(); }

 private:
  std::vector<NamedParameter> make_equal() {
    std::vector<NamedParameter> parameters;
    for (const auto& item : module_->named_parameters()) {
      parameters.push_back({item.key(), item.value()});
    }
    std::vector<NamedParameter> all = parameters;
    for (const auto& item : module_->named_buffers()) all.push_back({item.key(), item.value()});
    check_same_everywhere(all, *group_);
    std::vector<at::Tensor> values;
    for (const NamedParameter& tensor : all) values.push_back(tensor.tensor);
    broadcast_values(values, *group_);
    return parameters;
  }

  Module module_;
  std::shared_ptr<collective::ReduceGroup> group_;
  const bool has_buffers_;
  Reducer reducer_;
};

}  // namespace distrain::ddp
