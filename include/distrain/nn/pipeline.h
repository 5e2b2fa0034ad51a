#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/nn/pipeline_schedule.h"
#include "distrain/rpc/agent.h"

namespace distrain::nn {

/// What one stage did in a batch.
struct StageReport {
  /// In which a step had the turn; none on an accelerator, which is only told then what to do.
  std::optional<double> compute_s;
  int64_t activations = 0;  ///< micro-batches that it held at most, between their two passes
  static constexpr auto kFields = std::tuple(&StageReport::compute_s, &StageReport::activations);
};

/// The passes of a batch's micro-batches through one stage of a pipeline, on the stage's rank.
///
/// A step of the schedule runs when it has its turn: a forward pass once its input is here, a
/// backward pass once its gradients are. Until then it holds no thread. Inputs are fetched ahead of
/// their turn, so that a transfer and another micro-batch's computing overlap.
///
/// A step of an earlier batch that comes late is refused. A step whose output does not depend on
/// its input fails with `invalid`, naming the rank.
class StagePasses {
 public:
  /// Lets an agent have stages; before join().
  static void install(rpc::Agent& agent);

  /// `function` is what an error of a forward pass says it happened in.
  explicit StagePasses(std::string function);

  /// A batch follows: micro-batches in the order of `row`. The current context is the one that
  /// gathers the gradients of the micro-batches' contexts.
  void begin(rpc::Agent& agent, std::vector<PipelineStep> row);
  /// When the agent's device has done all that it has been given, for an update too.
  StageReport end();

  /// What the stage makes of its input. Kept until that is done, or the agent has ended.
  using Compute = std::function<at::Tensor(const at::Tensor& input)>;
  /// In the micro-batch's own context: fetches its input, passes it through, and gives the output
  /// as `next_rank` takes it. Its backward pass has its turn when gradients come back.
  base::Future<at::Tensor> forward(rpc::Agent& agent, const rpc::RRef<at::Tensor>& input,
                                   int64_t micro_batch, int next_rank, Compute compute);

 private:
  struct Batch;
  struct State;
  class OfAgent;
  const std::shared_ptr<State> state_;
};

namespace detail {

/// Begins a batch on all stages. `schedule` names the context of each micro-batch.
using Begin = std::function<void(const PipelineSchedule& schedule)>;
using Forward = std::function<base::Future<at::Tensor>(size_t micro_batch)>;
using Loss = std::function<at::Tensor(size_t micro_batch, const at::Tensor& output)>;
void check_counts(const PipelineSchedule& schedule, size_t stages, size_t micro_batches);
std::vector<at::Tensor> run_passes(rpc::Agent& agent, PipelineSchedule schedule, const Begin& begin,
                                   const Forward& forward, const Loss& loss);

}  // namespace detail

/// The stages of a model, each on a rank of its own, as the rank that trains it calls them. `Stage`
/// is a class that all ranks have exposed, with these functions, which do as StagePasses':
///
///   void begin_batch(rpc::CallContext&, std::vector<PipelineStep> row, int64_t samples);
///   base::Future<at::Tensor> forward(rpc::CallContext&, const rpc::RRef<at::Tensor>& input,
///                                    int64_t micro_batch);
///
/// Calls have no deadline: nobody knows how long a stage computes.
template <class Stage>
class Pipeline {
 public:
  explicit Pipeline(rpc::Agent& agent) : agent_(agent) {}

  /// The next stage, made on `rank`.
  template <class... Args>
  void add(int rank, const Args&... args) {
    stages_.push_back(agent_.remote_new<Stage>(rpc::To(rank).without_deadline(), args...));
  }
  void clear() { stages_.clear(); }
  size_t size() const { return stages_.size(); }

  /// F of one of them.
  template <auto F, class... Args>
  auto call(size_t stage, const Args&... args) const {
    return agent_.rpc_async<F>(to(stage), stages_[stage], args...);
  }
  /// F of all at once; gives back their results, in order.
  template <auto F, class... Args>
  auto call_all(const Args&... args) const {
    std::vector<decltype(call<F>(0, args...))> calls;
    for (size_t i = 0; i < size(); ++i) calls.push_back(call<F>(i, args...));
    base::wait_all(calls);
    using Value = decltype(calls[0].wait());
    if constexpr (!std::is_void_v<Value>) {
      std::vector<Value> results;
      for (const auto& one : calls) results.push_back(one.wait());
      return results;
    }
  }
  /// F of one after the other, each of what the one before gave; to fetch from the last.
  template <auto F, class... Args>
  base::Future<at::Tensor> chain(const at::Tensor& input, const Args&... args) const {
    rpc::RRef<at::Tensor> value = agent_.make_rref(input);
    for (size_t i = 0; i < size(); ++i) value = agent_.remote<F>(to(i), stages_[i], value, args...);
    return value.to_here_async(std::chrono::nanoseconds::max());
  }

  /// Both passes of all micro-batches at once: the stages see to it that each step has its turn.
  /// `loss` of what the last stage gives is what the micro-batch adds to the batch's loss; the
  /// gradients gather in the current context. Gives back what `loss` was given, on this rank's
  /// device. `loss` owns what it uses: if a pass fails, others may not be through when this throws;
  /// none of them waits for anything any more. Throws `invalid` if `schedule` is for other numbers
  /// of stages or micro-batches, or cannot run, or if a stage or `loss` cuts the graph.
  std::vector<at::Tensor> train(const PipelineSchedule& schedule,
                                const std::vector<at::Tensor>& micro_batches,
                                const detail::Loss& loss) const {
    detail::check_counts(schedule, size(), micro_batches.size());
    int64_t samples = 0;
    for (const at::Tensor& inputs : micro_batches) samples += inputs.size(0);
    const detail::Begin begin = [&](const PipelineSchedule& with_contexts) {
      std::vector<base::Future<void>> begun;
      for (size_t i = 0; i < size(); ++i) {
        begun.push_back(call<&Stage::begin_batch>(i, with_contexts.stages[i], samples));
      }
      base::wait_all(begun);
    };
    const detail::Forward forward = [&](size_t m) {
      return chain<&Stage::forward>(micro_batches[m], static_cast<int64_t>(m));
    };
    return detail::run_passes(agent_, schedule, begin, forward, loss);
  }

 private:
  rpc::To to(size_t stage) const { return rpc::To(stages_[stage].owner()).without_deadline(); }

  rpc::Agent& agent_;
  std::vector<rpc::RRef<Stage>> stages_;
};

}  // namespace distrain::nn
