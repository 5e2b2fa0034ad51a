#include "distrain/collective/staged_reduce_group.h"
#include "reducer_impl.h"

namespace distrain::ddp {

struct Reducer::Hook final : autograd::LeafHook {
  Hook(std::weak_ptr<Impl> impl_in, size_t index_in) : impl(std::move(impl_in)), index(index_in) {}
  void operator()(const at::Tensor& variable) override {
    if (auto strong = impl.lock()) strong->on_accumulated(index, variable);
  }
  void on_context_gradient(const autograd::ContextRef& context,
                           const at::Tensor& gradient) override {
    if (auto strong = impl.lock()) strong->on_context_gradient(index, context, gradient);
  }
  const std::weak_ptr<Impl> impl;
  const size_t index;
};

Reducer::Reducer(const std::vector<NamedParameter>& parameters,
                 std::shared_ptr<collective::ReduceGroup> group, Options options)
    : impl_(std::make_shared<Impl>(parameters, std::move(group), options)) {
  for (size_t i = 0; i < impl_->parameters_.size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(impl_->parameters_[i],
                                                   std::make_unique<Hook>(impl_, i));
  }
}

Reducer::Reducer(const std::vector<NamedParameter>& parameters,
                 c10::intrusive_ptr<collective::Backend> backend, Options options)
    : Reducer(parameters, std::make_shared<collective::StagedReduceGroup>(std::move(backend)),
              options) {}

Reducer::~Reducer() {
  for (const at::Tensor& parameter : impl_->parameters_) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
  }
  constexpr auto kWhy = "ended with its Reducer";
  std::unique_lock lock(impl_->mutex_);
  const uint64_t pass = impl_->pass_;
  lock.unlock();
  impl_->give_up(pass, kWhy);
  lock.lock();
  for (auto& [id, announced] : impl_->contexts_) {
    if (std::exchange(announced.expected, 0) != 0) {
      impl_->owed_refusals_.push_back(impl_->given_up_error(kWhy));
    }
  }
  impl_->send_owed_refusals_locked();
}

void Reducer::expect(const autograd::ContextRef& context) { impl_->expect(context); }

void Reducer::count_forward() {
  std::lock_guard lock(impl_->mutex_);
  impl_->plain_ = {impl_->plain_.forward + 1, 0};
}

void Reducer::set_step(uint64_t step) {
  std::lock_guard lock(impl_->mutex_);
  impl_->step_ = step;
}

collective::ReduceGroup& Reducer::group() const { return *impl_->group_; }

std::vector<std::vector<std::string>> Reducer::buckets() const {
  std::lock_guard lock(impl_->mutex_);
  std::vector<std::vector<std::string>> result;
  for (const Bucket& bucket : impl_->buckets_) {
    result.emplace_back();
    for (size_t index : bucket.members()) result.back().push_back(impl_->names_[index]);
  }
  return result;
}

}  // namespace distrain::ddp
