#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
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
//   Idle          no pass. The first gradient of a plain pass or of one of a context, or attach(),
//                 begins one.
//   Accumulating  gradients are copied into their buckets; no bucket is complete.
//   Reducing      the allreduce of at least one bucket has started.
//   Finalising    the pass has ended: one thread waits for the allreduces and hands out the means,
//                 or gives up. It alone touches the pass.
//
// Threads: gradients come on whatever thread computed them; `mutex_` guards all, also while an
// allreduce is started, because the order of the buckets must be the same on all ranks. The end of
// a pass runs on the thread of its backward, and waits without the lock.
//
// Every rank takes part in exactly one collective for each bucket and pass, and until a pass has
// succeeded in one more, on the order of the gradients. One that cannot refuses:
// ReduceGroup::refuse takes the place of all that it has not started, so the other ranks get its
// error there and the group stays in step. This covers a parameter without
// gradient, a sparse gradient, and a pass that dies by an exception: its end_of() is destroyed
// without being called.
//
// expect() gives a context an end_of() before its pass begins. One that is destroyed with the
// context tells of a forward whose backward never came. This rank then owes the others a refusal.
// It is not sent there and then: a context may end on any thread, between whatever collectives, and
// while an exception is on its way that says better what went wrong. It is sent where all ranks
// come to in the same order: before the next pass, or the next expect(), or by the destructor.
//
// Note [Numbers of passes]
//
// The order of collectives alone would pair any pass of a rank with any of another's: that of a
// rank which leaves one out with the others' one before. So a pass carries a number
// (collective::PassNumber) that follows from what all ranks do alike:
//
//   a plain pass     the number of plain forwards until it began;
//   a context's      the number of the forward by which its context was announced, among such ones.
//                    A context that was not announced, which is an error, takes the number that
//                    it would have got, so that the ranks agree again after it;
//   both             the passes since that forward, as one graph may be used twice, and the step of
//                    the job if the user has told it.
//
// Forwards are counted while training and with gradients enabled only: evaluations differ between
// ranks. Without a forward, as where a Reducer is used by itself, plain passes have no number.
enum class PassState { kIdle, kAccumulating, kReducing, kFinalising };

/// Puts the mean of a parameter's gradients where the pass has its own; null: into `.grad`.
using Deliver = std::function<void(const at::Tensor& parameter, const at::Tensor& mean)>;

class Reducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(const std::vector<NamedParameter>& parameters,
       std::shared_ptr<collective::ReduceGroup> group, Options options);

  void attach(GradientPass& source);
  void expect(const autograd::ContextRef& context);
  void on_accumulated(size_t index, const at::Tensor& variable);
  void on_context_gradient(size_t index, const autograd::ContextRef& context,
                           const at::Tensor& gradient);
  void finish(uint64_t pass, const Deliver& deliver);
  void give_up(uint64_t pass, const char* why);

 private:
  friend class Reducer;

  struct Place {
    size_t bucket = 0;
    size_t slot = 0;
    uint64_t last_pass = 0;  // the one that it last got a gradient in
  };

  /// The forwards that passes are numbered by, of a kind. See Note [Numbers of passes].
  struct ForwardCount {
    uint64_t forward = 0;
    uint64_t passes = 0;  // since
  };

  /// A context that expect() was told of.
  struct Known {
    autograd::ContextRef context;
    uint64_t expected = 0;  // the pass that has to come; 0: none has to
    ForwardCount count = {};
  };

  static constexpr int kNoGraphTask = -1;

  void transition_locked(PassState to);
  void begin_locked(uint64_t pass, const collective::PassNumber& number,
                    int graph_task = kNoGraphTask);
  collective::PassNumber number_by(ForwardCount& count, uint64_t context) const;
  bool begin_of_context_locked(size_t index, const autograd::ContextRef& context,
                               std::function<void()>& end);
  std::function<void()> end_of(uint64_t pass, Deliver deliver);
  Known* expecting_locked(uint64_t pass);
  void settle_debts_locked();
  Known* answer_expectation_locked();
  void store_locked(size_t index, const at::Tensor& gradient);
  void make_buckets(const std::vector<int64_t>& order);
  void hand_out(const Deliver& deliver);
  int collectives_left_locked() const;
  std::vector<int64_t> agreed_order();
  Error missing_error_locked() const;
  Error given_up_error(const char* why) const;
  Error invalid(std::string message) const;
  std::string place_text() const;
  int world_rank() const { return group_->world_rank(group_->rank()); }

  const std::shared_ptr<collective::ReduceGroup> group_;
  const Options options_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;

  mutable std::mutex mutex_;
  PassState state_ = PassState::kIdle;
  uint64_t pass_ = 0;              // the one under way, or the last
  uint64_t last_pass_ = 0;         // that was begun or is expected
  collective::PassNumber number_;  // of the one under way, for the other ranks
  ForwardCount plain_;
  uint64_t plain_numbered_ = 0;    // the forward of the last plain pass
  uint64_t announced_ = 0;         // forwards that have announced a context
  uint64_t unannounced_ = 0;       // the last context that took a number without
  uint64_t step_ = 0;              // of the job
  int graph_task_ = kNoGraphTask;  // of the plain pass under way
  uint64_t context_pass_ = 0;      // the autograd context's pass under way; 0: a plain one
  std::unordered_map<uint64_t, Known> contexts_;
  std::vector<Error> debts_;   // passes to be refused before the next one
  std::vector<Place> places_;  // by parameter
  std::vector<Bucket> buckets_;
  size_t started_ = 0;            // buckets whose allreduce has started
  std::optional<Error> failure_;  // of this rank, in this pass
  std::vector<int64_t> arrival_;  // parameters in the order of their gradients
  uint64_t measured_pass_ = 0;    // the pass that the buckets were built from; 0: none yet
};

}  // namespace distrain::ddp
