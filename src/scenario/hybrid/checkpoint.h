#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data.h"
#include "distrain/job/checkpoints.h"
#include "distrain/scenario/hybrid.h"

namespace distrain::scenario {

/// How far a job has come. All trainers go at one pace.
struct HybridProgress {
  int64_t epoch = 1;
  int64_t step = 0;   ///< made in this epoch
  int64_t total = 0;  ///< made since the job's beginning
  static constexpr auto kFields =
      std::tuple(&HybridProgress::epoch, &HybridProgress::step, &HybridProgress::total);

  bool over(const HybridOptions& options) const {
    return options.steps > 0 ? total >= options.steps : epoch > options.epochs;
  }
  void count_step(int64_t steps_per_epoch) {
    ++total;
    if (++step < steps_per_epoch) return;
    ++epoch;
    step = 0;
  }
  /// After a step: whether a checkpoint is due.
  bool save_due(const HybridOptions& options) const;
};

/// The names of the parameters, in the order of the optimizer: the server's, then the trainers'.
const std::vector<std::string>& hybrid_parameter_names();

job::Snapshot hybrid_snapshot(const HybridOptions& options, const HybridDataInfo& data,
                              const HybridProgress& progress, const data::NamedTensors& model,
                              const std::vector<optim::ParameterState>& optimizer);

/// What a snapshot holds, checked against the job. Throws `bad_data`.
struct HybridResume {
  HybridProgress progress;
  data::NamedTensors model;
  std::vector<optim::ParameterState> optimizer;
};
HybridResume read_hybrid(const job::Snapshot& snapshot, const HybridOptions& options,
                         const HybridDataInfo& data, int64_t steps_per_epoch);

}  // namespace distrain::scenario
