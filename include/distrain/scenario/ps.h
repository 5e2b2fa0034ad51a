#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "distrain/job/definition.h"

namespace distrain::scenario {

/// Options of `distrain ps`; the defaults are the PyTorch tutorial's.
struct PsOptions : job::TrainerOptions {
  PsOptions();
  static void describe(job::OptionList<PsOptions>& list);

  bool dropout = true;
  bool verify_grads = false;
  std::string data;   ///< folder with IDX files
  int64_t limit = 0;  ///< training examples; 0: all
  double mean = 0.1307;
  double std = 0.3081;
  std::optional<int> num_gpus;  ///< of the server; none: as `--device` says
};

/// Rank 0 is the parameter server, ranks 1..T the trainers.
const job::Definition<PsOptions>& ps_job();

}  // namespace distrain::scenario
