#pragma once

#include <optional>
#include <string>

#include "distrain/job/definition.h"

namespace distrain::scenario {

/// Options of `distrain ps`. The defaults are those of the PyTorch tutorial.
struct PsOptions : job::TrainerOptions {
  PsOptions() { lr = 0.03; }
  static void describe(job::OptionList<PsOptions>& list);

  std::optional<double> dropout;  ///< of both layers; nullopt: the tutorial's 0.25 and 0.5
  bool verify_grads = false;
  std::string data;                   ///< folder with IDX files
  std::string valid_data, test_data;  ///< as `data`; empty: the test images of `data`; no test
  int64_t limit = 0;                  ///< training examples; 0: all
  double mean = 0.1307;
  double std = 0.3081;
  std::optional<int> num_gpus;  ///< of the server; nullopt: see `--device`
};

void train_ps(job::Rank& rank, const PsOptions& options);
void expose_ps(rpc::Agent& agent);
/// Trains in one process without RPC: the reference for correctness and speed.
void train_ps_local(job::SingleProcess& local, const PsOptions& options);
/// Classifies images with the model of a checkpoint.
void predict_ps(job::Predictions& predictions, const PsOptions& options);

}  // namespace distrain::scenario
