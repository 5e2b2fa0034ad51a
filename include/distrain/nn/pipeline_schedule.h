#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace distrain::nn {

/// The forward or the backward pass of one micro-batch through one stage.
struct PipelineStep {
  enum class Kind : uint8_t { kForward = 0, kBackward = 1 };
  Kind kind = Kind::kForward;
  int64_t micro_batch = 0;  ///< from 0
  /// The autograd context of the micro-batch, which also identifies the batch; 0: any context.
  uint64_t context = 0;
  static constexpr auto kFields =
      std::tuple(&PipelineStep::kind, &PipelineStep::micro_batch, &PipelineStep::context);
  bool operator==(const PipelineStep&) const = default;
};

/// The steps of each stage of a pipeline in one batch.
///
/// A stage begins a step when the step before it in its row is done and the input has arrived: the
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
/// most expensive stage is minimal. Returns the first layer of each stage after the first.
std::vector<size_t> balanced_cuts(const std::vector<double>& costs, size_t stages);

}  // namespace distrain::nn
