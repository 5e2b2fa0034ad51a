#pragma once

#include <functional>
#include <string>

#include "distrain/data/named_tensors.h"
#include "distrain/job/definition.h"

namespace distrain::scenario {

/// Options of `distrain hybrid`; the defaults are the PyTorch tutorial's.
struct HybridOptions : job::TrainerOptions {
  HybridOptions();
  static void describe(job::OptionList<HybridOptions>& list);

  int batches = 10;          ///< an epoch and trainer, random data only
  int num_embeddings = 100;  ///< random data only; with a file: its words
  int embedding_dim = 16;
  int classes = 8;                    ///< random data only; with a file: its labels
  std::string data;                   ///< fastText-format file; empty: random batches
  std::string valid_data, test_data;  ///< as data; empty: no such evaluation
  /// Not an option of the command line: told the final parameters, on trainer 0.
  std::function<void(const data::NamedTensors&)> on_finished;
};

/// Ranks 0..T-1 trainers, T master, T+1 parameter server.
const job::Definition<HybridOptions>& hybrid_job();

}  // namespace distrain::scenario
