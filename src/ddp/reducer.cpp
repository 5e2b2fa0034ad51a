#include "distrain/ddp/reducer.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <optional>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "buckets.h"
#include "distrain/collective/staged_reduce_group.h"

namespace distrain::ddp {

using base::Error;
using base::ErrorKind;

// Note [Life of a pass]
//
//   Idle ───> Accumulating ───> Reducing ───> Finalising ───> Idle
//                   └──────────────────────────────^
//
//   Idle          no pass. The first gradient of a plain pass, or attach(), begins one.
//   Accumulating  gradients are copied into their buckets; no bucket is complete.
//   Reducing      the allreduce of at least one bucket has started.
//   Finalising    the pass has ended: one thread waits for the allreduces and hands out the means,
//                 or gives up. It alone touches the pass.
//
// Threads: gradients come on whatever thread computed them; `mutex_` guards all, also while an
// allreduce is started, because the order of the buckets must be the same on all ranks. The end of
// a pass runs on the thread of its backward, and waits without the lock.
//
// Every rank takes part in exactly one collective for each bucket and pass. One that cannot
// refuses: ReduceGroup::refuse takes the place of all its buckets that are not started, so the
// other ranks get its error there and the group stays in step. This covers a parameter without
// gradient, a sparse gradient, and a pass that dies by an exception: its callback is destroyed
// without being called, and with it the PassEnd that it owns.
enum class PassState { kIdle, kAccumulating, kReducing, kFinalising };

class Reducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(const std::vector<NamedParameter>& parameters,
       std::shared_ptr<collective::ReduceGroup> group, Options options);

  void install_hooks();
  void remove_hooks();
  void attach(GradientPass& source);
  void on_accumulated(size_t index, const at::Tensor& variable);
  void on_gradient(uint64_t pass, size_t index, const at::Tensor& gradient);
  void finish(uint64_t pass, GradientPass* source);
  void give_up(uint64_t pass, const char* why);
  void give_up_current(const char* why);
  std::vector<std::vector<std::string>> bucket_names() const;

 private:
  struct Place {
    size_t bucket = 0;
    size_t slot = 0;
    uint64_t last_pass = 0;  // the one that it last got a gradient in
  };

  static constexpr int kNoGraphTask = -1;

  void transition_locked(PassState to);
  void begin_locked(int graph_task);
  void store_locked(size_t index, const at::Tensor& gradient);
  void start_complete_buckets_locked();
  void make_buckets(const std::vector<int64_t>& order);
  void hand_out(GradientPass* source);
  void rebuild();
  Error missing_error_locked() const;
  Error invalid(std::string message) const;
  std::string place_text() const;
  int world_rank() const { return group_->world_rank(group_->rank()); }

  const std::shared_ptr<collective::ReduceGroup> group_;
  const Options options_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;

  mutable std::mutex mutex_;
  PassState state_ = PassState::kIdle;
  uint64_t pass_ = 0;
  int graph_task_ = kNoGraphTask;  // of the plain pass under way
  std::vector<Place> places_;      // by parameter
  std::vector<Bucket> buckets_;
  size_t started_ = 0;            // buckets whose allreduce has started
  std::optional<Error> failure_;  // of this rank, in this pass
  std::vector<int64_t> arrival_;  // parameters in the order of their gradients
  uint64_t measured_pass_ = 0;    // the pass that the buckets were built from; 0: none yet
};

namespace {

/// Owned by what will end a pass; if that dies first, so does the pass.
template <class Impl>
class PassEnd {
 public:
  PassEnd(std::weak_ptr<Impl> impl, uint64_t pass, GradientPass* source)
      : impl_(std::move(impl)), pass_(pass), source_(source) {}
  ~PassEnd() {
    if (auto impl = impl_.lock()) impl->give_up(pass_, "failed before its end");
  }
  PassEnd(const PassEnd&) = delete;
  PassEnd& operator=(const PassEnd&) = delete;

  void operator()() {
    if (auto impl = impl_.lock()) impl->finish(pass_, source_);
  }

 private:
  std::weak_ptr<Impl> impl_;
  const uint64_t pass_;
  GradientPass* const source_;
};

constexpr bool is_allowed(PassState from, PassState to) {
  using enum PassState;
  switch (from) {
    case kIdle:
      return to == kAccumulating;
    case kAccumulating:
      return to == kReducing || to == kFinalising;
    case kReducing:
      return to == kFinalising;
    case kFinalising:
      return to == kIdle;
  }
  return false;
}

}  // namespace

struct Reducer::Hook final : torch::autograd::PostAccumulateGradHook {
  Hook(std::weak_ptr<Impl> impl_in, size_t index_in) : impl(std::move(impl_in)), index(index_in) {}
  void operator()(const at::Tensor& variable) override {
    if (auto strong = impl.lock()) strong->on_accumulated(index, variable);
  }
  const std::weak_ptr<Impl> impl;
  const size_t index;
};

Reducer::Impl::Impl(const std::vector<NamedParameter>& parameters,
                    std::shared_ptr<collective::ReduceGroup> group, Options options)
    : group_(std::move(group)), options_(options) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.requires_grad() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (!tensor.is_leaf() || tensor.layout() != at::kStrided) {
      throw base::Exception(invalid("parameter '" + name + "' is not a dense leaf tensor"));
    }
    if (torch::autograd::impl::post_acc_grad_hooks(tensor)) {
      throw base::Exception(invalid("parameter '" + name +
                                    "' has a post-accumulate hook already: is it in another "
                                    "Reducer?"));
    }
    names_.push_back(name);
    parameters_.push_back(tensor);
  }
  std::vector<int64_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  make_buckets(order);
}

void Reducer::Impl::install_hooks() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameters_[i],
                                                   std::make_unique<Hook>(weak_from_this(), i));
  }
}

void Reducer::Impl::remove_hooks() {
  for (const at::Tensor& parameter : parameters_) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
  }
}

void Reducer::Impl::make_buckets(const std::vector<int64_t>& order) {
  buckets_.clear();
  places_.assign(parameters_.size(), {});
  for (auto& members :
       assign_buckets(parameters_, order, options_.first_bucket_bytes, options_.bucket_cap_bytes)) {
    for (size_t slot = 0; slot < members.size(); ++slot) {
      places_[members[slot]] = {buckets_.size(), slot, 0};
    }
    buckets_.emplace_back(std::move(members), parameters_);
  }
}

void Reducer::Impl::transition_locked(PassState to) {
  if (!is_allowed(state_, to)) {
    throw base::Exception(ErrorKind::kInternal, "Reducer: impossible change of state " +
                                                    std::to_string(int(state_)) + " to " +
                                                    std::to_string(int(to)));
  }
  state_ = to;
}

void Reducer::Impl::begin_locked(int graph_task) {
  if (state_ != PassState::kIdle) {
    throw base::Exception(
        invalid("another backward pass over these parameters is under way; one at a time"));
  }
  transition_locked(PassState::kAccumulating);
  ++pass_;
  graph_task_ = graph_task;
  started_ = 0;
  failure_.reset();
  arrival_.clear();
  for (Bucket& bucket : buckets_) bucket.begin();
}

void Reducer::Impl::attach(GradientPass& source) {
  uint64_t pass = 0;
  {
    std::lock_guard lock(mutex_);
    begin_locked(kNoGraphTask);
    pass = pass_;
  }
  auto end = std::make_shared<PassEnd<Impl>>(weak_from_this(), pass, &source);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    source.on_gradient_ready(parameters_[i],
                             [weak = weak_from_this(), pass, i](const at::Tensor& gradient) {
                               if (auto impl = weak.lock()) impl->on_gradient(pass, i, gradient);
                             });
  }
  source.on_pass_end([end] { (*end)(); });
}

void Reducer::Impl::on_accumulated(size_t index, const at::Tensor& variable) {
  std::lock_guard lock(mutex_);
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (state_ == PassState::kIdle || graph_task != graph_task_) {
    begin_locked(graph_task);
    auto end = std::make_shared<PassEnd<Impl>>(weak_from_this(), pass_, nullptr);
    torch::autograd::Engine::get_default_engine().queue_callback([end] { (*end)(); });
  }
  store_locked(index, variable.grad());
}

void Reducer::Impl::on_gradient(uint64_t pass, size_t index, const at::Tensor& gradient) {
  std::lock_guard lock(mutex_);
  if (pass == pass_) store_locked(index, gradient);
}

void Reducer::Impl::store_locked(size_t index, const at::Tensor& gradient) {
  if (state_ != PassState::kAccumulating && state_ != PassState::kReducing) return;
  const at::Tensor& parameter = parameters_[index];
  Place& place = places_[index];
  const auto fail = [&](const std::string& what) {
    if (!failure_) failure_ = invalid("parameter '" + names_[index] + "' " + what + place_text());
  };
  if (!gradient.defined()) return;
  if (std::exchange(place.last_pass, pass_) == pass_) return fail("got a second gradient");
  if (gradient.layout() != at::kStrided) return fail("got a sparse gradient, not supported here,");
  if (gradient.scalar_type() != parameter.scalar_type() || gradient.sizes() != parameter.sizes() ||
      gradient.device() != parameter.device()) {
    return fail("got a gradient of another shape, dtype or device");
  }
  arrival_.push_back(static_cast<int64_t>(index));
  buckets_[place.bucket].store(place.slot, gradient);
  start_complete_buckets_locked();
}

void Reducer::Impl::start_complete_buckets_locked() {
  while (started_ < buckets_.size() && buckets_[started_].complete()) {
    if (state_ == PassState::kAccumulating) transition_locked(PassState::kReducing);
    buckets_[started_].start(*group_);
    ++started_;
  }
}

void Reducer::Impl::finish(uint64_t pass, GradientPass* source) {
  std::optional<Error> error;
  {
    std::lock_guard lock(mutex_);
    if (pass != pass_ || state_ == PassState::kIdle || state_ == PassState::kFinalising) return;
    transition_locked(PassState::kFinalising);
    error = std::move(failure_);
    if (!error && started_ < buckets_.size()) error = missing_error_locked();
  }
  if (error) group_->refuse(static_cast<int>(buckets_.size() - started_), *error);
  for (size_t i = 0; i < started_; ++i) {
    try {
      buckets_[i].wait();
    } catch (...) {
      if (!error) error = base::current_error(ErrorKind::kInternal);
    }
  }
  if (!error) {
    try {
      hand_out(source);
      if (measured_pass_ == 0 && buckets_.size() > 1) rebuild();
    } catch (...) {
      error = base::current_error(ErrorKind::kInternal);
    }
  }
  {
    std::lock_guard lock(mutex_);
    if (error) {
      for (Bucket& bucket : buckets_) bucket.drop();
    }
    transition_locked(PassState::kIdle);
  }
  if (error) throw base::Exception(std::move(*error));
}

void Reducer::Impl::hand_out(GradientPass* source) {
  for (Bucket& bucket : buckets_) {
    for (size_t slot = 0; slot < bucket.members().size(); ++slot) {
      const at::Tensor& parameter = parameters_[bucket.members()[slot]];
      if (source) {
        source->set_gradient(parameter, bucket.view(slot));
      } else if (parameter.grad().defined()) {
        bucket.load(slot, parameter.grad());
      }
    }
    bucket.end();
  }
}

// The order in which gradients came may differ between ranks; rank 0's is as good as any.
void Reducer::Impl::rebuild() {
  const at::Tensor order = at::empty({static_cast<int64_t>(parameters_.size())}, at::kLong);
  std::copy(arrival_.begin(), arrival_.end(), order.data_ptr<int64_t>());
  group_->broadcast(order, 0)->wait();
  const auto* begin = order.data_ptr<int64_t>();
  std::vector<int64_t> agreed(begin, begin + order.numel());
  std::vector<int64_t> sorted = agreed;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] != static_cast<int64_t>(i)) {
      throw base::Exception(ErrorKind::kProtocol, "rank " + std::to_string(group_->world_rank(0)) +
                                                      " sent an order of gradients that is none");
    }
  }
  std::lock_guard lock(mutex_);
  make_buckets(agreed);
  measured_pass_ = pass_;
}

void Reducer::Impl::give_up(uint64_t pass, const char* why) {
  int left = 0;
  {
    std::lock_guard lock(mutex_);
    if (pass != pass_ || state_ == PassState::kIdle || state_ == PassState::kFinalising) return;
    transition_locked(PassState::kFinalising);
    left = static_cast<int>(buckets_.size() - started_);
  }
  // What has started goes on without us: other ranks may need our part of it.
  group_->refuse(left,
                 Error{ErrorKind::kRemoteFailed,
                       "the backward pass of rank " + std::to_string(world_rank()) + " " + why,
                       world_rank(), "Reducer"});
  std::lock_guard lock(mutex_);
  for (Bucket& bucket : buckets_) bucket.drop();
  transition_locked(PassState::kIdle);
}

void Reducer::Impl::give_up_current(const char* why) {
  uint64_t pass = 0;
  {
    std::lock_guard lock(mutex_);
    pass = pass_;
  }
  give_up(pass, why);
}

Error Reducer::Impl::missing_error_locked() const {
  std::string missing;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].last_pass != pass_) missing += (missing.empty() ? "'" : ", '") + names_[i] + "'";
  }
  return invalid("no gradient came for " + missing + place_text() +
                 ": every parameter must take part in the loss");
}

Error Reducer::Impl::invalid(std::string message) const {
  return Error{ErrorKind::kInvalid, std::move(message), world_rank(), "Reducer"};
}

std::string Reducer::Impl::place_text() const {
  return " in the backward pass of rank " + std::to_string(world_rank());
}

std::vector<std::vector<std::string>> Reducer::Impl::bucket_names() const {
  std::lock_guard lock(mutex_);
  std::vector<std::vector<std::string>> result;
  for (const Bucket& bucket : buckets_) {
    result.emplace_back();
    for (size_t index : bucket.members()) result.back().push_back(names_[index]);
  }
  return result;
}

Reducer::Reducer(const std::vector<NamedParameter>& parameters,
                 std::shared_ptr<collective::ReduceGroup> group, Options options)
    : impl_(std::make_shared<Impl>(parameters, std::move(group), options)) {
  impl_->install_hooks();
}

Reducer::Reducer(const std::vector<NamedParameter>& parameters,
                 c10::intrusive_ptr<collective::Backend> backend, Options options)
    : Reducer(parameters, std::make_shared<collective::StagedReduceGroup>(std::move(backend)),
              options) {}

Reducer::~Reducer() {
  impl_->remove_hooks();
  impl_->give_up_current("ended with its Reducer");
}

void Reducer::attach(GradientPass& pass) { impl_->attach(pass); }

std::vector<std::vector<std::string>> Reducer::buckets() const { return impl_->bucket_names(); }

}  // namespace distrain::ddp
