#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <set>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "distrain/ddp/reducer.h"

namespace distrain::ddp {

/// Checks that all ranks have `tensors` with the same names, shapes, dtypes and requires_grad, and
/// the same grouping by device, and the same `options`, if given. Otherwise throws `invalid` on all
/// ranks, naming the first rank and tensor that differ from rank 0. A collective call.
void check_same_everywhere(const std::vector<NamedParameter>& tensors,
                           collective::ReduceGroup& group, const ReducerOptions* options = nullptr);

/// Sets has_sparse_gradient of the weights of embeddings of `module` with the option `sparse`.
void mark_sparse(std::vector<NamedParameter>& parameters, const torch::nn::Module& module);

/// Copies the values of dense `tensors` from group rank `root` to the other ranks in the current
/// streams, without autograd. A collective call with one message per device.
void broadcast_values(const std::vector<at::Tensor>& tensors, collective::ReduceGroup& group,
                      int root = 0);

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
///
/// To accumulate gradients, in `.grad` or in a context, average only the last of several passes:
///
///   const auto guard = model.no_sync(/*is_active=*/!is_last);
///   loss(model.forward(batch)).backward();
///
/// If the ranks' data ends at different steps, each rank goes on until no rank has data. For the
/// mean over the ranks that have data, it also calls reducer().scale_means(size / double(ranks)).
///
///   while (const int ranks = model.ranks_with_data(has_data)) {
///     (has_data ? loss(model.forward(x)) : model.forward_without_data()).backward();
///   }
template <class Module>
class DistributedDataParallel {
 public:
  /// `ignored` names parameters and buffers that are neither compared, copied nor averaged.
  DistributedDataParallel(Module module, std::shared_ptr<collective::ReduceGroup> group,
                          Reducer::Options options = {}, std::set<std::string> ignored = {})
      : module_(std::move(module)),
        group_(std::move(group)),
        ignored_(std::move(ignored)),
        copies_buffers_(options.broadcast_buffers && !module_->buffers().empty()),
        reducer_(make_equal(options), group_, options) {}
  /// Averages the gradients by a StagedReduceGroup over `backend`.
  DistributedDataParallel(Module module, c10::intrusive_ptr<collective::Backend> backend,
                          Reducer::Options options = {}, std::set<std::string> ignored = {})
      : DistributedDataParallel(std::move(module),
                                std::make_shared<collective::StagedReduceGroup>(std::move(backend)),
                                std::move(options), std::move(ignored)) {}

  template <class... Args>
  auto forward(Args&&... args) {
    begin_forward();
    return module_->forward(std::forward<Args>(args)...);
  }

  /// Takes part in a forward() of ranks that have data. Returns a loss of 0, whose backward pass
  /// gives zero gradients.
  at::Tensor forward_without_data() {
    begin_forward();
    at::Tensor loss = at::zeros({});
    for (const NamedParameter& parameter : named(module_->named_parameters())) {
      // The sum of no element gives zeros, even if the parameter is not finite.
      if (parameter.tensor.requires_grad()) {
        loss = loss + parameter.tensor.flatten().narrow(0, 0, 0).sum();
      }
    }
    return loss;
  }

  /// Until the result is destroyed, forward passes, on any thread, are not averaged: their backward
  /// passes only add to this rank's gradients. Does nothing unless `is_active`. As in torch, the
  /// first such forward still copies the buffers of rank 0, and the first one after them does not.
  [[nodiscard]] std::shared_ptr<void> no_sync(bool is_active = true) {
    if (!is_active) return nullptr;
    return {this, [before = syncs_.exchange(false)](auto* self) { self->syncs_ = before; }};
  }

  /// Returns how many ranks call it with `mine` set. A collective call.
  int ranks_with_data(bool mine) {
    const at::Tensor share = at::full({1}, mine ? 1.0 : 0.0, at::kDouble);
    group_->average_async(share)->wait();
    return static_cast<int>(std::lround(share.item<double>() * group_->size()));
  }

  Module& module() { return module_; }
  Reducer& reducer() { return reducer_; }
  auto parameters() const { return module_->parameters(); }

 private:
  // Announces a pass, and gets the buffers of rank 0.
  void begin_forward() {
    if (!module_->is_training()) return;
    const bool syncs = syncs_;
    if (at::GradMode::is_enabled()) {
      if (const auto context = autograd::ContextRef::current()) {
        reducer_.expect(*context, /*is_local=*/!syncs);
      } else {
        reducer_.count_forward(/*is_local=*/!syncs);
      }
    }
    if (copies_next_.exchange(syncs) && copies_buffers_) {
      broadcast_values(tensors_of(named(module_->named_buffers())), reducer_.group());
    }
  }

  template <class Items>
  std::vector<NamedParameter> named(const Items& items) const {
    std::vector<NamedParameter> result;
    for (const auto& item : items) {
      if (!ignored_.contains(item.key())) result.push_back({item.key(), item.value()});
    }
    return result;
  }
  static std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& parameters) {
    std::vector<at::Tensor> tensors;
    for (const NamedParameter& parameter : parameters) tensors.push_back(parameter.tensor);
    return tensors;
  }

  std::vector<NamedParameter> make_equal(const Reducer::Options& options) {
    std::vector<NamedParameter> parameters = named(module_->named_parameters());
    mark_sparse(parameters, *module_);
    std::vector<NamedParameter> all = parameters;
    for (NamedParameter& buffer : named(module_->named_buffers())) all.push_back(std::move(buffer));
    check_same_everywhere(all, *group_, &options);
    if (std::ranges::none_of(parameters, [](const auto& p) { return p.tensor.requires_grad(); })) {
      base::invalid(
          "DistributedDataParallel: the module has no parameter that requires a gradient");
    }
    broadcast_values(tensors_of(all), *group_);
    return parameters;
  }

  Module module_;
  std::shared_ptr<collective::ReduceGroup> group_;
  const std::set<std::string> ignored_;
  const bool copies_buffers_;
  std::atomic<bool> copies_next_ = true;  // the forward pass before this one was not in no_sync()
  std::atomic<bool> syncs_ = true;
  Reducer reducer_;
};

}  // namespace distrain::ddp
