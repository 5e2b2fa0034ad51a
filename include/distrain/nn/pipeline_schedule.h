#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace distrain::nn {

/// One piece of a stage's work: a micro-batch's forward or backward pass through it.
struct PipelineStep {
  enum class Kind : uint8_t { kForward = 0, kBackward = 1 };
  Kind kind = Kind::kForward;
  int64_t micro_batch = 0;  ///< from 0
  /// The autograd context of the micro-batch, which tells the batches of a schedule apart; 0: any.
  uint64_t context = 0;
  static constexpr auto kFields =
      std::tuple(&PipelineStep::kind, &PipelineStep::micro_batch, &PipelineStep::context);
  bool operator==(const PipelineStep&) const = default;
};

/// What each stage of a pipeline does in one batch, and in which order.
///
/// A stage begins a step as soon as the step before it in its own row is done and what it needs has
/// come: the forward pass of the stage before, or the backward pass of the stage behind.
struct PipelineSchedule {
  std::string name;
  int64_t micro_batches = 0;
  std::vector<std::vector<PipelineStep>> stages;  ///< a row for each, first stage first
};

/// `gpipe` (Huang et al., NeurIPS 2019): all forward passes, then all backward passes. `1f1b`
/// (PipeDream-Flush; Narayanan et al., ICML 2021): as soon as a stage can, it alternates, so that
/// stage s of p (from 1) never holds more than p - s + 1 micro-batches. `naive`: one micro-batch at
/// a time is in the pipeline. Throws `invalid` for another name.
PipelineSchedule make_schedule(const std::string& name, int stages, int64_t micro_batches);

/// A schedule as it runs when each step takes one unit of time.
struct PipelineTimeline {
  std::vector<std::vector<int64_t>> begin;  ///< of each step, by stage
  int64_t length = 0;
  double bubble = 0;                 ///< share of the stages' time in which they wait
  std::vector<int64_t> activations;  ///< micro-batches that a stage holds at most
};

/// Runs through a schedule. Throws `invalid` if it is none: a step that is missing, there twice or
/// of no micro-batch, a backward pass before its forward pass, stages that wait for each other.
PipelineTimeline simulate(const PipelineSchedule& schedule);

/// Its timeline for people: a line for each stage, a column for each unit of time.
std::string to_text(const PipelineSchedule& schedule);

/// Cuts a row of layers, by the time of each, into `stages` stages so that the slowest is as quick
/// as can be. Returns the first layer of each stage but the first.
std::vector<size_t> balanced_cuts(const std::vector<double>& costs, size_t stages);

}  // namespace distrain::nn
