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

#include "distrain/rpc/agent.h"

namespace distrain::nn {

/// The forward or the backward pass of one micro-batch through one stage.
struct PipelineStep {
  enum class Kind : uint8_t { kForward = 0, kBackward = 1 };
  Kind kind = Kind::kForward;
  int64_t micro_batch = 0;  ///< from 0
  /// The autograd context of the micro-batch, which identifies the batch; 0 matches any context.
  uint64_t context = 0;
  static constexpr auto kFields =
      std::tuple(&PipelineStep::kind, &PipelineStep::micro_batch, &PipelineStep::context);
  bool operator==(const PipelineStep&) const = default;
};

/// The steps of each stage of a pipeline in one batch.
///
/// A stage begins a step when the stage's previous step is done and the input has arrived: the
/// output of the previous stage's forward pass, or the gradients of the next stage's backward pass.
struct PipelineSchedule {
  std::string name;
  int64_t micro_batches = 0;
  std::vector<std::vector<PipelineStep>> stages;  ///< a row of steps for each stage
};

/// Creates a schedule. `gpipe` (Huang et al., NeurIPS 2019): all forward passes, then all backward
/// passes. `1f1b` (PipeDream-Flush; Narayanan et al., ICML 2021): stages alternate between forward
/// and backward passes as soon as they can, so stage s of p (from 1) holds at most p - s + 1
/// micro-batches. `naive`: one micro-batch at a time. Throws `invalid` for any other `name`.
PipelineSchedule make_schedule(const std::string& name, int stages, int64_t micro_batches);

/// The timeline of a schedule in which each step takes one unit of time.
struct PipelineTimeline {
  std::vector<std::vector<int64_t>> begin;  ///< start time of each step, by stage
  int64_t length = 0;
  double bubble = 0;                 ///< fraction of the stages' time that is idle
  std::vector<int64_t> activations;  ///< maximum number of micro-batches that each stage holds
};

/// Simulates a schedule. Throws `invalid` if a step is missing, repeated or of an unknown
/// micro-batch, if a backward pass precedes its forward pass, or if stages wait for each other.
PipelineTimeline simulate(const PipelineSchedule& schedule);

/// Formats the timeline, with a line for each stage and a column for each unit of time.
std::string to_text(const PipelineSchedule& schedule);

/// Divides a sequence of layers with the given costs into `stages` stages, so that the cost of the
/// most expensive stage is minimal. Returns the first layer's index for each stage but the first.
std::vector<size_t> balanced_cuts(const std::vector<double>& costs, size_t stages);

/// Statistics of one stage in one batch.
struct StageReport {
  /// Seconds that the stage spent in steps. Unset on an accelerator, where a step only queues work.
  std::optional<double> compute_s;
  int64_t activations = 0;  ///< maximum number of micro-batches whose activations the stage held
  static constexpr auto kFields = std::tuple(&StageReport::compute_s, &StageReport::activations);
};

/// Runs the passes of a batch's micro-batches through one pipeline stage, on the stage's rank.
///
/// Steps run in the order of the schedule: a forward pass when its input has arrived, a backward
/// pass when its gradients have. A waiting step holds no thread. Inputs are fetched early, so that
/// their transfer overlaps with another micro-batch's computation.
///
/// A late step of an earlier batch fails with `cancelled`. A step whose output does not depend on
/// its input fails with `invalid`, and the error names the rank.
class StagePasses {
 public:
  /// Prepares `agent` for pipeline stages. Call it before join().
  static void install(rpc::Agent& agent);

  /// Errors of a forward pass name `function` as the function that failed.
  explicit StagePasses(std::string function);

  /// Begins a batch whose steps run in the order of `row`. Each backward pass moves its gradients
  /// from the micro-batch's autograd context to the one in which begin() was called.
  void begin(rpc::Agent& agent, std::vector<PipelineStep> row);
  /// Waits until the device has finished its queued work, updates included, and returns the report.
  StageReport end();

  /// Computes the stage's output. Destroyed after the forward pass or when the agent ends.
  using Compute = std::function<at::Tensor(const at::Tensor& input)>;
  /// Fetches the input, computes the output and returns it on a device that `next_rank` accepts.
  /// Call it in the micro-batch's autograd context. Arriving gradients start the backward pass.
  base::Future<at::Tensor> forward(rpc::Agent& agent, const rpc::RRef<at::Tensor>& input,
                                   int64_t micro_batch, int next_rank, Compute compute);

 private:
  struct Batch;
  struct State;
  class OfAgent;
  const std::shared_ptr<State> state_;
};

namespace detail {

/// Begins a batch on all stages. Each step of `schedule` has its micro-batch's autograd context.
using Begin = std::function<void(const PipelineSchedule& schedule)>;
using Forward = std::function<base::Future<at::Tensor>(size_t micro_batch)>;
using Loss = std::function<at::Tensor(size_t micro_batch, const at::Tensor& output)>;
void check_counts(const PipelineSchedule& schedule, size_t stages, size_t micro_batches);
std::vector<at::Tensor> run_passes(rpc::Agent& agent, PipelineSchedule schedule, const Begin& begin,
                                   const Forward& forward, const Loss& loss);

}  // namespace detail

/// Calls the stages of a model, each on a rank of its own, from the rank that trains the model.
/// `Stage` is a class that all ranks expose, with functions that forward to StagePasses:
///
///   void begin_batch(rpc::CallContext&, std::vector<PipelineStep> row, int64_t samples);
///   base::Future<at::Tensor> forward(rpc::CallContext&, const rpc::RRef<at::Tensor>& input,
///                                    int64_t micro_batch);
///
/// Calls have no deadline, because a stage may compute for any time.
template <class Stage>
class Pipeline {
 public:
  explicit Pipeline(rpc::Agent& agent) : agent_(agent) {}

  /// Creates the next stage of the model on `rank`.
  template <class... Args>
  void add(int rank, const Args&... args) {
    stages_.push_back(agent_.remote_new<Stage>(rpc::To(rank).without_deadline(), args...));
  }
  void clear() { stages_.clear(); }
  size_t size() const { return stages_.size(); }

  template <auto F, class... Args>
  auto call(size_t stage, const Args&... args) const {
    return agent_.rpc_async<F>(to(stage), stages_[stage], args...);
  }
  /// Calls member function F of all stages concurrently and returns the results in stage order.
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
  /// Calls F of each stage with the previous stage's result, and fetches the last stage's result.
  template <auto F, class... Args>
  base::Future<at::Tensor> chain(const at::Tensor& input, const Args&... args) const {
    rpc::RRef<at::Tensor> value = agent_.make_rref(input);
    for (size_t i = 0; i < size(); ++i) value = agent_.remote<F>(to(i), stages_[i], value, args...);
    return value.timeout(std::chrono::nanoseconds::max()).to_here_async();
  }

  /// Runs the forward and backward passes of all micro-batches in the order of `schedule`. `loss`
  /// computes a micro-batch's share of the batch's loss from the last stage's output. Adds the
  /// gradients to the current autograd context. Returns the outputs of the last stage, on this
  /// rank's device. `loss` must own all that it uses, because passes may still run after train()
  /// has thrown. Throws `invalid` if `schedule` does not fit the stages or micro-batches, or if an
  /// output or loss does not depend on its input.
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
