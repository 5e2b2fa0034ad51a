#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "buckets.h"
#include "distrain/autograd/context.h"
#include "distrain/base/error.h"
#include "distrain/ddp/reducer.h"

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
// Every rank takes part in collectives_locked() collectives in each pass. If a rank gets no
// gradient for a parameter, or one of another kind, or if its hook or pass throws, which destroys
// the function of end_of() uncalled, it refuses those that it has not started
// (ReduceGroup::refuse). So the other ranks get its error, and the group stays in step.
//
// expect() gives a context the function of end_of() before the pass begins. If the context destroys
// it uncalled, a forward had no backward, and this rank owes the other ranks a refusal. A context
// may end on any thread between any collectives, so the rank sends the refusal before its next pass
// or expect(), or in the destructor, because all ranks reach these calls in the same order.
//
// Note [Numbers of passes]
//
// If a rank leaves out a pass, its next pass would be averaged with an older pass of the other
// ranks. So a pass carries a collective::PassNumber, which all ranks count in the same way:
//
//   plain pass      the number of plain forwards so far;
//   context's pass  the number of forwards that had announced contexts, its own included. One that
//                   was not announced fails, but counts, so that later passes agree again;
//   both            the number of passes since that forward (a graph may be used twice), and the
//                   job's step if set_step() was called.
//
// Only forwards in training mode with gradients enabled count, because evaluations differ between
// ranks. If a Reducer is used without forwards, plain passes have no number.
enum class PassState { kIdle, kAccumulating, kReducing, kFinalising };

/// Where a pass finds and leaves gradients: in a context or, if unset, in `.grad`.
using Target = std::optional<autograd::ContextRef>;

class Reducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(const std::vector<NamedParameter>& parameters,
       std::shared_ptr<collective::ReduceGroup> group, Options options);

  void expect(const autograd::ContextRef& context, bool is_local);
  void on_accumulated(size_t index, const at::Tensor& variable);
  void on_context_gradient(size_t index, const autograd::ContextRef& context,
                           const at::Tensor& gradient);
  void finish(uint64_t pass, const Target& target);
  void give_up(uint64_t pass, const char* why);

 private:
  friend class Reducer;

  struct BucketSlot {
    size_t bucket = 0;
    size_t slot = 0;
    uint64_t last_pass = 0;  // the last pass in which the parameter got a gradient
  };

  /// The index of a forward pass, and the number of backward passes that it has had. See Note
  /// [Numbers of passes].
  struct ForwardCount {
    uint64_t forward = 0;
    uint64_t passes = 0;
    bool is_local = false;  // not averaged
  };

  /// A context that expect() has announced.
  struct AnnouncedContext {
    autograd::ContextRef context;
    uint64_t expected = 0;  // the pass that must come next; 0: none
    ForwardCount count = {};
    bool stays_local() const { return count.is_local && expected == 0; }
  };

  static constexpr int kNoGraphTask = -1;
  static constexpr auto kNotStatic = "got a gradient, but none in its static graph's first pass,";

  void transition_locked(PassState to);
  void begin_locked(uint64_t pass, const collective::PassNumber& number,
                    int graph_task = kNoGraphTask);
  collective::PassNumber number_by(ForwardCount& count, uint64_t context) const {
    return {step_, count.forward, count.passes++, context};
  }
  bool begin_of_context_locked(size_t index, const autograd::ContextRef& context,
                               std::function<void()>& end);
  std::function<void()> end_of(uint64_t pass, Target target);
  AnnouncedContext* expecting_locked(uint64_t pass) {
    for (auto& [id, announced] : contexts_) {
      if (announced.expected == pass) return &announced;
    }
    return nullptr;
  }
  void send_owed_refusals_locked() {
    for (const Error& error : std::exchange(owed_refusals_, {})) {
      group_->refuse(collectives_locked(), error);
    }
  }
  // Lets the current plain pass count as the pass that expect() announced for this thread's current
  // context. Returns that context, or null if no pass was announced.
  AnnouncedContext* answer_expectation_locked() {
    const auto it = contexts_.find(rpc::current_context());
    if (it == contexts_.end() || std::exchange(it->second.expected, 0) == 0) return nullptr;
    return &it->second;
  }
  void fail_locked(size_t index, const std::string& what) {
    if (!failure_) failure_ = invalid("parameter '" + names_[index] + "' " + what + pass_text());
  }
  void store_locked(size_t index, const at::Tensor& gradient, bool is_unused = false);
  void make_buckets(std::vector<int64_t> order);
  void start_next_bucket_locked();
  collective::ReduceGroup::WorkPtr average(const at::Tensor& tensor) {
    if (gave_up_) throw base::Exception(ErrorKind::kCancelled, "this pass has failed");
    auto work = group_->average_async(tensor, number_);
    ++made_;
    return work;
  }
  void store_unused_locked(const Target& target, const std::function<bool(size_t)>& is_unused);
  void store_unused_of_graph_locked();
  at::Tensor sparse_mean(const at::Tensor& mine);
  void store_means(const Target& target);
  bool measures_locked() const { return measured_pass_ == 0 && buckets_.size() > 1; }
  bool finds_unused() const { return options_.static_graph || options_.find_unused_parameters; }
  bool counts_use_locked() const { return finds_unused() && !knows_unused_; }
  bool waits_for_hooks() const { return options_.hook.run && options_.hook.may_fail_late; }
  // Returns the number of collectives of a pass: those of the buckets and of sparse gradients, and
  // one each for the order of gradients, the use of parameters, and the success of hooks.
  int collectives_locked() const {
    return static_cast<int>(buckets_.size()) * options_.hook.averages +
           static_cast<int>(sparse_.size()) * 3 + (measures_locked() ? 1 : 0) +
           (counts_use_locked() ? 1 : 0) + (waits_for_hooks() ? 1 : 0);
  }
  std::vector<int64_t> agreed_order();
  std::optional<Error> missing_error_locked() const;
  Error hook_error(size_t bucket) const;
  Error given_up_error(const char* why) const {
    return Error{ErrorKind::kRemoteFailed,
                 "the backward pass of rank " + std::to_string(world_rank()) + " " + why,
                 world_rank(), "Reducer"};
  }
  Error invalid(std::string message) const {
    return Error{ErrorKind::kInvalid, std::move(message), world_rank(), "Reducer"};
  }
  std::string pass_text() const {
    return " in the backward pass of rank " + std::to_string(world_rank());
  }
  int world_rank() const { return group_->world_rank(group_->rank()); }

  std::shared_ptr<collective::ReduceGroup> group_;
  const Options options_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::set<size_t> sparse_;  // the indices of parameters with sparse gradients

  mutable std::mutex mutex_;
  PassState state_ = PassState::kIdle;
  uint64_t pass_ = 0;              // the current pass, or the last one if there is none
  uint64_t last_pass_ = 0;         // the newest pass that has begun or is expected
  collective::PassNumber number_;  // the current pass's number for the other ranks
  ForwardCount plain_;
  bool expects_plain_ = false;     // a plain forward that is not local had no backward pass yet
  int local_task_ = kNoGraphTask;  // torch's id of the last local plain pass
  std::set<size_t> locally_used_;  // parameters in local passes since the last pass
  uint64_t plain_numbered_ = 0;    // the forward pass number of the last plain pass
  uint64_t announced_ = 0;         // number of forward passes that announced a context
  uint64_t unannounced_ = 0;       // the last context that took a number without being announced
  uint64_t step_ = 0;              // the job's step
  double mean_factor_ = 1;         // see Reducer::scale_means()
  int graph_task_ = kNoGraphTask;  // torch's id of the current plain pass
  uint64_t context_pass_ = 0;      // the current pass's ContextRef::pass(); 0: a plain pass
  std::unordered_map<uint64_t, AnnouncedContext> contexts_;
  std::vector<Error> owed_refusals_;  // errors of passes to refuse before the next pass
  std::vector<BucketSlot> slots_;     // one per parameter
  std::vector<Bucket> buckets_;
  size_t started_ = 0;                        // buckets whose allreduce has started
  std::atomic<int> made_ = 0;                 // collectives of the current pass that have started
  std::atomic<bool> gave_up_ = false;         // the others of the current pass are refused
  std::vector<at::Tensor> sparse_gradients_;  // of the current pass, as `sparse_`
  std::optional<Error> failure_;              // this rank's error in the current pass
  at::Tensor used_;            // see Reducer::used(); undefined if all parameters must be used
  std::vector<bool> unused_;   // on this rank, in the current pass or, if known, in the first one
  bool knows_unused_ = false;  // a pass has succeeded with static_graph
  std::vector<int64_t> arrival_;  // parameters in the order in which their gradients arrived
  uint64_t measured_pass_ = 0;    // the pass whose arrival order built the buckets; 0: none yet
};

}  // namespace distrain::ddp
