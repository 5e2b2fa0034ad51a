#include "distrain/ddp/reducer.h"

#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

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

Reducer::Impl::Impl(const std::vector<NamedParameter>& parameters,
                    std::shared_ptr<collective::ReduceGroup> group, Options options)
    : group_(group->duplicate()), options_(options) {
  if (!group_) group_ = std::move(group);
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& [name, tensor, has_sparse_gradient] : parameters) {
    if (!tensor.requires_grad() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (!tensor.is_leaf() || tensor.layout() != at::kStrided) {
      throw base::Exception(invalid("parameter '" + name + "' is not a dense leaf tensor"));
    }
    if (torch::autograd::impl::post_acc_grad_hooks(tensor)) {
      throw base::Exception(invalid("parameter '" + name +
                                    "' has a post-accumulate hook already: is it in another "
                                    "Reducer?"));
    }
    if (has_sparse_gradient) sparse_.insert(parameters_.size());
    names_.push_back(name);
    parameters_.push_back(tensor);
  }
  sparse_gradients_.resize(parameters_.size());
  std::vector<int64_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  make_buckets(order);
}

void Reducer::Impl::make_buckets(std::vector<int64_t> order) {
  std::erase_if(order, [this](int64_t i) { return sparse_.contains(static_cast<size_t>(i)); });
  buckets_.clear();
  slots_.assign(parameters_.size(), {});
  const auto allocate = [group = group_.get()](int64_t count, const at::TensorOptions& options) {
    return group->allocate(count, options);
  };
  for (auto& members :
       assign_buckets(parameters_, order, options_.first_bucket_bytes, options_.bucket_cap_bytes)) {
    for (size_t slot = 0; slot < members.size(); ++slot) {
      slots_[members[slot]] = {buckets_.size(), slot, 0};
    }
    buckets_.emplace_back(std::move(members), parameters_, allocate);
  }
}

void Reducer::Impl::transition_locked(PassState to) {
  using enum PassState;
  static constexpr std::pair<PassState, PassState> kAllowed[] = {{kIdle, kAccumulating},
                                                                 {kAccumulating, kReducing},
                                                                 {kAccumulating, kFinalising},
                                                                 {kReducing, kFinalising},
                                                                 {kFinalising, kIdle}};
  if (std::ranges::find(kAllowed, std::pair(state_, to)) == std::end(kAllowed)) {
    throw base::Exception(ErrorKind::kInternal, "Reducer: impossible change of state " +
                                                    std::to_string(int(state_)) + " to " +
                                                    std::to_string(int(to)));
  }
  state_ = to;
}

void Reducer::Impl::store_locked(size_t index, const at::Tensor& gradient, bool is_unused) {
  if (state_ != PassState::kAccumulating && state_ != PassState::kReducing) return;
  const at::Tensor& parameter = parameters_[index];
  BucketSlot& target = slots_[index];
  if (!gradient.defined()) return;
  if (knows_unused_ && unused_[index] && !is_unused) return fail_locked(index, kNotStatic);
  if (std::exchange(target.last_pass, pass_) == pass_) {
    return fail_locked(index, "got a second gradient");
  }
  const bool is_sparse = sparse_.contains(index);
  if (gradient.is_sparse() != is_sparse || (is_sparse && gradient.sparse_dim() != 1)) {
    return fail_locked(index, is_sparse ? "got a gradient that is not sparse by rows, as announced,"
                                        : "got a sparse gradient that was not announced");
  }
  if (gradient.scalar_type() != parameter.scalar_type() || gradient.sizes() != parameter.sizes() ||
      gradient.device() != parameter.device()) {
    return fail_locked(index, "got a gradient of another shape, dtype or device");
  }
  arrival_.push_back(static_cast<int64_t>(index));
  if (is_sparse) {
    sparse_gradients_[index] = gradient.coalesce();
  } else {
    buckets_[target.bucket].store(target.slot, gradient);
  }
  while (!failure_ && started_ < buckets_.size() && buckets_[started_].complete()) {
    if (state_ == PassState::kAccumulating) transition_locked(PassState::kReducing);
    start_next_bucket_locked();
  }
}

void Reducer::Impl::start_next_bucket_locked() {
  Bucket& bucket = buckets_[started_];
  const auto its = std::make_shared<GradientBucket>(GradientBucket{
      started_, started_ + 1 == buckets_.size(), bucket.flat(), bucket.parameters(), bucket.views(),
      [this](const at::Tensor& tensor) { return average(tensor); }, options_.hook.averages});
  try {
    bucket.start([&] {
      auto mean = std::make_shared<std::future<at::Tensor>>(
          options_.hook.run ? options_.hook.run(its) : its->average(its->tensor));
      return std::async(std::launch::deferred, [its, mean = std::move(mean)] {
        at::Tensor result = mean->get();
        if (its->averages_left > 0) base::invalid("called average() less often than it should");
        return result;
      });
    });
    ++started_;
  } catch (...) {
    failure_ = hook_error(started_);
  }
}

void Reducer::Impl::begin_locked(uint64_t pass, const collective::PassNumber& number,
                                 int graph_task) {
  if (state_ != PassState::kIdle) {
    throw base::Exception(
        invalid("another backward pass over these parameters is under way; one at a time"));
  }
  send_owed_refusals_locked();
  transition_locked(PassState::kAccumulating);
  pass_ = pass;
  number_ = number;
  graph_task_ = graph_task;
  context_pass_ = 0;
  started_ = 0;
  made_ = 0;
  gave_up_ = false;
  failure_.reset();
  arrival_.clear();
  if (counts_use_locked()) {
    used_ = at::ones({static_cast<int64_t>(parameters_.size())}, at::kDouble);
    unused_.assign(parameters_.size(), false);
  }
  for (Bucket& bucket : buckets_) bucket.begin(graph_task != kNoGraphTask);
}

void Reducer::Impl::expect(const autograd::ContextRef& context, bool is_local) {
  uint64_t pass = 0;
  {
    std::lock_guard lock(mutex_);
    if (state_ == PassState::kIdle) send_owed_refusals_locked();
    std::erase_if(contexts_, [](const auto& item) {
      return item.second.context.ended() && item.second.expected == 0;
    });
    AnnouncedContext& announced =
        contexts_.try_emplace(context.id(), AnnouncedContext{context}).first->second;
    if (announced.expected != 0) return;
    announced.count = {++announced_, 0, is_local};
    if (is_local) return;
    pass = announced.expected = ++last_pass_;
  }
  context.on_pass_end(end_of(pass, context));
}

// Returns a function that calls finish(). If the function is destroyed uncalled, give_up() runs.
std::function<void()> Reducer::Impl::end_of(uint64_t pass, Target target) {
  const std::weak_ptr<Impl> weak = weak_from_this();
  std::shared_ptr<void> open(nullptr, [weak, pass](void*) {
    if (const auto impl = weak.lock()) impl->give_up(pass, "failed before its end");
  });
  return [weak, pass, open = std::move(open), target = std::move(target)] {
    if (const auto impl = weak.lock()) impl->finish(pass, target);
  };
}

void Reducer::Impl::on_accumulated(size_t index, const at::Tensor& variable) {
  std::lock_guard lock(mutex_);
  const int graph_task = torch::autograd::get_current_graph_task_id();
  const auto it = contexts_.find(rpc::current_context());
  if (graph_task == local_task_ ||
      ((state_ == PassState::kIdle || graph_task != graph_task_) &&
       (it == contexts_.end() ? plain_.is_local && !expects_plain_ : it->second.stays_local()))) {
    local_task_ = graph_task;
    locally_used_.insert(index);
    return;
  }
  if (state_ == PassState::kIdle || graph_task != graph_task_) {
    begin_locked(++last_pass_, {}, graph_task);
    if (AnnouncedContext* const announced = answer_expectation_locked()) {
      number_ = number_by(announced->count, announced->context.id());
    } else {
      number_ = number_by(plain_, 0);
      plain_numbered_ = plain_.forward;
      expects_plain_ = false;
    }
    store_unused_of_graph_locked();
    torch::autograd::Engine::get_default_engine().queue_callback(end_of(pass_, {}));
  }
  store_locked(index, variable.grad());
}

void Reducer::Impl::on_context_gradient(size_t index, const autograd::ContextRef& context,
                                        const at::Tensor& gradient) {
  std::function<void()> end;  // before `lock`, so that it is destroyed without the lock
  std::lock_guard lock(mutex_);
  if (state_ != PassState::kIdle && context_pass_ == context.pass()) {
    return store_locked(index, gradient);
  }
  if (begin_of_context_locked(index, context, end)) store_locked(index, gradient);
}

// Begins the reduction for a context's pass. Returns false if the pass has failed: a reduction must
// not begin then, because nothing would end the reduction.
bool Reducer::Impl::begin_of_context_locked(size_t index, const autograd::ContextRef& context,
                                            std::function<void()>& end) {
  if (!context.runs()) return false;
  const auto it = contexts_.find(context.id());
  if (it != contexts_.end() && it->second.stays_local()) {
    locally_used_.insert(index);
    return false;
  }
  try {
    if (it == contexts_.end()) {
      throw base::Exception(invalid(
          "a pass of an autograd context reached parameter '" + names_[index] + "' on rank " +
          std::to_string(world_rank()) +
          ", but its gradients are not averaged: call the DistributedDataParallel's forward() in "
          "that context (not its module's), while training and with gradients enabled"));
    }
    uint64_t pass = it->second.expected;
    if (pass == 0) {
      pass = ++last_pass_;
      end = end_of(pass, context);
      if (!context.on_pass_end(end)) return false;
    }
    begin_locked(pass, {});
    it->second.expected = 0;
    number_ = number_by(it->second.count, context.id());
  } catch (const base::Exception& e) {
    // Refuse this pass's collectives, because other ranks wait for them. If expect() announced the
    // pass, its failure destroys the function of end_of(), and then give_up() refuses them.
    if (it == contexts_.end() && std::exchange(unannounced_, context.id()) != context.id()) {
      ++announced_;
      plain_.forward = plain_numbered_;  // drops plain forwards, which were meant for the context
    }
    if (it == contexts_.end() || it->second.expected == 0) {
      owed_refusals_.push_back(e.error());
      if (state_ == PassState::kIdle) send_owed_refusals_locked();
    }
    throw;
  }
  context_pass_ = context.pass();
  return true;
}

void Reducer::Impl::give_up(uint64_t pass, const char* why) {
  int left = 0;
  {
    std::lock_guard lock(mutex_);
    if (AnnouncedContext* const announced = expecting_locked(pass)) {
      announced->expected = 0;
      const bool ended = announced->context.ended();
      owed_refusals_.push_back(given_up_error(
          ended ? "never came: the autograd context of its forward pass ended without it" : why));
      if (!ended && state_ == PassState::kIdle) send_owed_refusals_locked();
      return;
    }
    if (pass != pass_ || state_ == PassState::kIdle || state_ == PassState::kFinalising) return;
    transition_locked(PassState::kFinalising);
    gave_up_ = true;
    left = collectives_locked() - made_;
  }
  // Started allreduces go on, because other ranks may need this rank's data.
  group_->refuse(left, given_up_error(why));
  std::lock_guard lock(mutex_);
  for (Bucket& bucket : buckets_) bucket.drop();
  transition_locked(PassState::kIdle);
}

Reducer::Reducer(const std::vector<NamedParameter>& parameters,
                 std::shared_ptr<collective::ReduceGroup> group, Options options)
    : impl_(std::make_shared<Impl>(parameters, std::move(group), options)) {
  for (size_t i = 0; i < impl_->parameters_.size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(impl_->parameters_[i],
                                                   std::make_unique<Hook>(impl_, i));
  }
}

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

void Reducer::expect(const autograd::ContextRef& context, bool is_local) {
  impl_->expect(context, is_local);
}

void Reducer::count_forward(bool is_local) {
  std::lock_guard lock(impl_->mutex_);
  impl_->plain_ = {impl_->plain_.forward + 1, 0, is_local};
  impl_->expects_plain_ = impl_->expects_plain_ || !is_local;
}

void Reducer::set_step(uint64_t step) {
  std::lock_guard lock(impl_->mutex_);
  impl_->step_ = step;
}

void Reducer::scale_means(double factor) {
  std::lock_guard lock(impl_->mutex_);
  impl_->mean_factor_ = factor;
}

collective::ReduceGroup& Reducer::group() const { return *impl_->group_; }

at::Tensor Reducer::used() const {
  std::lock_guard lock(impl_->mutex_);
  return impl_->used_.defined() ? impl_->used_.round().to(at::kInt) : impl_->used_;
}

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
