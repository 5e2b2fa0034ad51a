#pragma once

#include <cmath>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "buckets.h"
#include "distrain/base/error.h"
#include "distrain/ddp/reducer.h"
#include "distrain/rpc/error.h"

namespace distrain::ddp {

using base::Error;
using base::ErrorKind;

// Note [Life of a pass]
//
//   Idle ───> Accumulating ───> Reducing ───> Finalising ───> Idle
//                   └──────────────────────────────^
//
//   Idle          no pass. The first gradient of a plain pass or a context's pass begins one.
//   Accumulating  gradients are copied into their buckets; no allreduce has started.
//   Reducing      at least one allreduce has started.
//   Finalising    one thread waits for the allreduces, without the lock, and hands out the means,
//                 or gives up. No other thread touches the pass.
//
// Gradients arrive on any thread. `mutex_` keeps the order of allreduces equal on all ranks.
//
// In each pass, every rank takes part in one collective for each bucket and, until a pass has
// succeeded, in one more that agrees on the order of gradients. If a rank gets no gradient or a
// sparse one for a parameter, or if its pass throws, which destroys the function of end_of()
// uncalled, the rank refuses the collectives that it has not started (ReduceGroup::refuse). So the
// other ranks get its error, and the group stays in step.
//
// expect() gives a context the function of end_of() before the pass begins. If the context destroys
// it uncalled, a forward had no backward, and this rank owes the other ranks a refusal. A context
// may end on any thread between any collectives, so the rank sends the refusal before its next pass
// or expect(), or in the destructor: all ranks come there in the same order.
//
// Note [Numbers of passes]
//
// If a rank leaves out a pass, its next pass would be averaged with an older pass of the other
// ranks. So a pass carries a collective::PassNumber, which all ranks count in the same way:
//
//   plain pass      the number of plain forwards so far;
//   context's pass  the number of forwards that had announced a context when its own did. A context
//                   that was not announced is an error, but takes a number, so that later passes
//                   agree again;
//   both            the number of earlier passes since that forward, because a graph may be used
//                   twice, and the job's step if set_step() was called.
//
// Only forwards in training mode with gradients enabled count, because evaluations differ between
// ranks. If a Reducer is used without forwards, plain passes have no number.
enum class PassState { kIdle, kAccumulating, kReducing, kFinalising };

/// Stores a parameter's mean gradient for the pass. If null, the mean goes to `.grad`.
using Deliver = std::function<void(const at::Tensor& parameter, const at::Tensor& mean)>;

inline Deliver into(const autograd::ContextRef& context) {
  return std::bind_front(&autograd::ContextRef::set_gradient, context);
}

class Reducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(const std::vector<NamedParameter>& parameters,
       std::shared_ptr<collective::ReduceGroup> group, Options options)
      : group_(group->duplicate()), options_(options) {
    if (!group_) group_ = std::move(group);
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

  void expect(const autograd::ContextRef& context) {
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
      pass = announced.expected = ++last_pass_;
      announced.count = {++announced_, 0};
    }
    context.on_pass_end(end_of(pass, into(context)));
  }

  void on_accumulated(size_t index, const at::Tensor& variable) {
    std::lock_guard lock(mutex_);
    const int graph_task = torch::autograd::get_current_graph_task_id();
    if (state_ == PassState::kIdle || graph_task != graph_task_) {
      begin_locked(++last_pass_, {}, graph_task);
      if (AnnouncedContext* const announced = answer_expectation_locked()) {
        number_ = number_by(announced->count, announced->context.id());
      } else {
        number_ = number_by(plain_, 0);
        plain_numbered_ = plain_.forward;
      }
      torch::autograd::Engine::get_default_engine().queue_callback(end_of(pass_, nullptr));
    }
    store_locked(index, variable.grad());
  }

  void on_context_gradient(size_t index, const autograd::ContextRef& context,
                           const at::Tensor& gradient) {
    std::function<void()> end;  // before `lock`, so that it is destroyed without the lock
    std::lock_guard lock(mutex_);
    if (state_ != PassState::kIdle && context_pass_ == context.pass()) {
      return store_locked(index, gradient);
    }
    if (begin_of_context_locked(index, context, end)) store_locked(index, gradient);
  }

  void finish(uint64_t pass, const Deliver& deliver) {
    std::optional<Error> error;
    int left = 0;
    {
      std::lock_guard lock(mutex_);
      if (AnnouncedContext* const announced = expecting_locked(pass)) {  // reached no parameter
        begin_locked(pass, number_by(announced->count, announced->context.id()));
        announced->expected = 0;
      }
      if (pass != pass_ || state_ == PassState::kIdle || state_ == PassState::kFinalising) return;
      // A plain pass may have begun on an engine thread, which has no current context.
      if (!deliver) answer_expectation_locked();
      transition_locked(PassState::kFinalising);
      error = std::move(failure_);
      if (!error && started_ < buckets_.size()) error = missing_error_locked();
      left = collectives_left_locked();
    }
    const auto refuse_the_rest = [&] { group_->refuse(std::exchange(left, 0), *error); };
    if (error) refuse_the_rest();
    for (size_t i = 0; i < started_; ++i) {
      try {
        buckets_[i].wait();
      } catch (...) {
        if (!error) error = rpc::error_in_flight(ErrorKind::kInternal);
      }
    }
    if (error) refuse_the_rest();
    if (!error) {
      try {
        std::vector<int64_t> order;
        if (std::exchange(left, 0) > 0) order = agreed_order();
        store_means(deliver);
        std::lock_guard lock(mutex_);
        if (!order.empty()) {
          make_buckets(order);
          measured_pass_ = pass_;
        }
      } catch (...) {
        error = rpc::error_in_flight(ErrorKind::kInternal);
      }
    }
    std::unique_lock lock(mutex_);
    if (error) std::ranges::for_each(buckets_, &Bucket::drop);
    transition_locked(PassState::kIdle);
    lock.unlock();
    if (error) throw base::Exception(std::move(*error));
  }

  void give_up(uint64_t pass, const char* why) {
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
      left = collectives_left_locked();
    }
    // Started allreduces go on, because other ranks may need this rank's data.
    group_->refuse(left, given_up_error(why));
    std::lock_guard lock(mutex_);
    std::ranges::for_each(buckets_, &Bucket::drop);
    transition_locked(PassState::kIdle);
  }

 private:
  friend class Reducer;

  struct BucketSlot {
    size_t bucket = 0;
    size_t slot = 0;
    uint64_t last_pass = 0;  // the last pass in which the parameter got a gradient
  };

  /// The number of a forward and its passes so far. See Note [Numbers of passes].
  struct ForwardCount {
    uint64_t forward = 0;
    uint64_t passes = 0;
  };

  /// A context that expect() has announced.
  struct AnnouncedContext {
    autograd::ContextRef context;
    uint64_t expected = 0;  // the pass that must come next; 0: none
    ForwardCount count = {};
  };

  static constexpr int kNoGraphTask = -1;

  void make_buckets(const std::vector<int64_t>& order) {
    buckets_.clear();
    slots_.assign(parameters_.size(), {});
    for (auto& members : assign_buckets(parameters_, order, options_.first_bucket_bytes,
                                        options_.bucket_cap_bytes)) {
      for (size_t slot = 0; slot < members.size(); ++slot) {
        slots_[members[slot]] = {buckets_.size(), slot, 0};
      }
      buckets_.emplace_back(std::move(members), parameters_);
    }
  }

  void transition_locked(PassState to) {
    using enum PassState;
    static constexpr std::pair<PassState, PassState> kAllowed[] = {{kIdle, kAccumulating},
                                                                   {kAccumulating, kReducing},
                                                                   {kAccumulating, kFinalising},
                                                                   {kReducing, kFinalising},
                                                                   {kFinalising, kIdle}};
    if (std::ranges::find(kAllowed, std::pair(state_, to)) == std::end(kAllowed)) {
      throw base::Exception(
          ErrorKind::kInternal,
          fmt::format("Reducer: impossible change of state {} to {}", int(state_), int(to)));
    }
    state_ = to;
  }

  void store_locked(size_t index, const at::Tensor& gradient) {
    if (state_ != PassState::kAccumulating && state_ != PassState::kReducing) return;
    const at::Tensor& parameter = parameters_[index];
    BucketSlot& target = slots_[index];
    const auto fail = [&](const std::string& what) {
      if (!failure_) failure_ = invalid("parameter '" + names_[index] + "' " + what + pass_text());
    };
    if (!gradient.defined()) return;
    if (std::exchange(target.last_pass, pass_) == pass_) return fail("got a second gradient");
    if (gradient.layout() != at::kStrided)
      return fail("got a sparse gradient, not supported here,");
    if (gradient.scalar_type() != parameter.scalar_type() ||
        gradient.sizes() != parameter.sizes() || gradient.device() != parameter.device()) {
      return fail("got a gradient of another shape, dtype or device");
    }
    arrival_.push_back(static_cast<int64_t>(index));
    buckets_[target.bucket].store(target.slot, gradient);
    for (; started_ < buckets_.size() && buckets_[started_].complete(); ++started_) {
      if (state_ == PassState::kAccumulating) transition_locked(PassState::kReducing);
      buckets_[started_].start_average(*group_, number_);
    }
  }

  void begin_locked(uint64_t pass, const collective::PassNumber& number,
                    int graph_task = kNoGraphTask) {
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
    failure_.reset();
    arrival_.clear();
    for (Bucket& bucket : buckets_) bucket.begin();
  }

  // Returns the function that ends a pass. Gives up the pass if its last copy is destroyed
  // uncalled.
  std::function<void()> end_of(uint64_t pass, Deliver deliver) {
    const std::weak_ptr<Impl> weak = weak_from_this();
    std::shared_ptr<void> open(nullptr, [weak, pass](void*) {
      if (const auto impl = weak.lock()) impl->give_up(pass, "failed before its end");
    });
    return [weak, pass, open = std::move(open), deliver = std::move(deliver)] {
      if (const auto impl = weak.lock()) impl->finish(pass, deliver);
    };
  }

  AnnouncedContext* expecting_locked(uint64_t pass) {
    for (auto& [id, announced] : contexts_) {
      if (announced.expected == pass) return &announced;
    }
    return nullptr;
  }

  // Returns the number of collectives of the current pass that have not started.
  int collectives_left_locked() const {
    const bool measures = measured_pass_ == 0 && buckets_.size() > 1;
    return static_cast<int>(buckets_.size() - started_) + (measures ? 1 : 0);
  }

  void send_owed_refusals_locked() {
    started_ = 0;  // refuses all collectives of a pass
    for (const Error& error : std::exchange(owed_refusals_, {})) {
      group_->refuse(collectives_left_locked(), error);
    }
  }

  // If this thread's current context expects a pass, counts the current plain pass as that pass.
  AnnouncedContext* answer_expectation_locked() {
    const auto it = contexts_.find(rpc::current_context());
    if (it == contexts_.end() || std::exchange(it->second.expected, 0) == 0) return nullptr;
    return &it->second;
  }

  collective::PassNumber number_by(ForwardCount& count, uint64_t context) const {
    return {step_, count.forward, count.passes++, context};
  }

  // Returns false if the context's pass has failed, because nothing would end a pass that begins
  // now.
  bool begin_of_context_locked(size_t index, const autograd::ContextRef& context,
                               std::function<void()>& end) {
    if (!context.runs()) return false;
    const auto it = contexts_.find(context.id());
    try {
      if (it == contexts_.end()) {
        throw base::Exception(invalid(fmt::format(
            "a pass of an autograd context reached parameter '{}' on rank {}, but its gradients "
            "are not averaged: call the DistributedDataParallel's forward() in that context (not "
            "its module's), while training and with gradients enabled",
            names_[index], world_rank())));
      }
      uint64_t pass = it->second.expected;
      if (pass == 0) {
        pass = ++last_pass_;
        end = end_of(pass, into(context));
        if (!context.on_pass_end(end)) return false;
      }
      begin_locked(pass, {});
      it->second.expected = 0;
      number_ = number_by(it->second.count, context.id());
    } catch (const base::Exception& e) {
      // The other ranks wait for this rank's pass. If it is still expected, its end_of() refuses
      // it.
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

  void store_means(const Deliver& deliver) {
    for (Bucket& bucket : buckets_) {
      for (size_t slot = 0; slot < bucket.members().size(); ++slot) {
        const at::Tensor& parameter = parameters_[bucket.members()[slot]];
        if (deliver) {
          deliver(parameter, bucket.view(slot));
        } else if (parameter.grad().defined()) {
          bucket.load(slot, parameter.grad());
        }
      }
      bucket.end();
    }
  }

  // Returns rank 0's arrival order on all ranks, because the ranks' orders may differ. Uses a mean,
  // exact in doubles, because a mean, unlike a broadcast, succeeds on all ranks or on none.
  std::vector<int64_t> agreed_order() {
    const at::Tensor shared = at::zeros({static_cast<int64_t>(parameters_.size())}, at::kDouble);
    auto* const values = shared.data_ptr<double>();
    if (group_->rank() == 0) {
      for (size_t i = 0; i < arrival_.size(); ++i) {
        values[i] = static_cast<double>(arrival_[i] * group_->size());
      }
    }
    group_->average_async(shared, number_)->wait();
    std::vector<int64_t> agreed(parameters_.size());
    std::transform(values, values + agreed.size(), agreed.begin(),
                   [](double place) { return std::llround(place); });
    std::vector<int64_t> sorted = agreed, places(agreed.size());
    std::ranges::sort(sorted);
    std::iota(places.begin(), places.end(), 0);
    if (sorted != places) {
      throw base::Exception(
          ErrorKind::kProtocol,
          fmt::format("rank {} sent an order of gradients that is none", group_->world_rank(0)));
    }
    return agreed;
  }

  Error missing_error_locked() const {
    std::string missing;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].last_pass != pass_)
        missing += (missing.empty() ? "'" : ", '") + names_[i] + "'";
    }
    return invalid("no gradient came for " + missing + pass_text() +
                   ": every parameter must take part in the loss");
  }

  Error given_up_error(const char* why) const {
    return Error{ErrorKind::kRemoteFailed,
                 fmt::format("the backward pass of rank {} {}", world_rank(), why), world_rank(),
                 "Reducer"};
  }

  Error invalid(std::string message) const {
    return Error{ErrorKind::kInvalid, std::move(message), world_rank(), "Reducer"};
  }

  std::string pass_text() const {
    return fmt::format(" in the backward pass of rank {}", world_rank());
  }

  int world_rank() const { return group_->world_rank(group_->rank()); }

  std::shared_ptr<collective::ReduceGroup> group_;
  const Options options_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;

  mutable std::mutex mutex_;
  PassState state_ = PassState::kIdle;
  uint64_t pass_ = 0;              // the current pass, or the last one if there is none
  uint64_t last_pass_ = 0;         // the newest pass that has begun or is expected
  collective::PassNumber number_;  // the current pass's number for the other ranks
  ForwardCount plain_;
  uint64_t plain_numbered_ = 0;    // the forward of the last plain pass
  uint64_t announced_ = 0;         // forwards that have announced a context
  uint64_t unannounced_ = 0;       // the last context that took a number without being announced
  uint64_t step_ = 0;              // the job's step
  int graph_task_ = kNoGraphTask;  // torch's id of the current plain pass
  uint64_t context_pass_ = 0;      // the context's number of the current pass; 0: a plain pass
  std::unordered_map<uint64_t, AnnouncedContext> contexts_;
  std::vector<Error> owed_refusals_;  // errors of passes to refuse before the next pass
  std::vector<BucketSlot> slots_;     // by parameter
  std::vector<Bucket> buckets_;
  size_t started_ = 0;            // buckets whose allreduce has started
  std::optional<Error> failure_;  // this rank's error in the current pass
  std::vector<int64_t> arrival_;  // parameters in the order in which their gradients arrived
  uint64_t measured_pass_ = 0;    // the pass whose arrival order built the buckets; 0: none yet
};

}  // namespace distrain::ddp
