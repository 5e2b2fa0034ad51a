#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/collective/staged_reduce_group.h"
#include "distrain/ddp/reducer.h"
#include "distrain/ddp/replicas.h"

namespace distrain::ddp {

/// A replica of `Module` on each rank of a group, kept equal by averaging the gradients.
///
/// `Module` is a torch module holder (`torch::nn::Linear`) or a shared_ptr to a module. The
/// constructor checks that all ranks have the same parameters and buffers (`invalid` if not) and
/// takes the values of rank 0; it, forward() and each backward pass are collective. While training,
/// forward() first takes the buffers of rank 0, if there are any.
///
///   DistributedDataParallel model(torch::nn::Linear(16, 8), backend);
///   loss(model.forward(x)).backward();            // gradients in .grad are means over the ranks
///
///   model.attach(pass);                           // the same in a distributed pass:
///   autograd::backward(context, {loss});          // the context's gradients are means
template <class Module>
class DistributedDataParallel {
 public:
  DistributedDataParallel(Module module, std::shared_ptr<collective::ReduceGroup> group,
                          Reducer::Options options = {})
      : module_(std::move(module)),
        group_(std::move(group)),
        has_buffers_(!module_->buffers().empty()),
        reducer_(make_equal(), group_, options) {}
  /// Over a StagedReduceGroup.
  DistributedDataParallel(Module module, c10::intrusive_ptr<collective::Backend> backend,
                          Reducer::Options options = {})
      : DistributedDataParallel(std::move(module),
                                std::make_shared<collective::StagedReduceGroup>(std::move(backend)),
                                options) {}

  /// As the module's.
  template <class... Args>
  auto forward(Args&&... args) {
    if (has_buffers_ && module_->is_training()) broadcast_values(module_->buffers(), *group_);
    return module_->forward(std::forward<Args>(args)...);
  }

  /// See Reducer::attach.
  void attach(GradientPass& pass) { reducer_.attach(pass); }

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
