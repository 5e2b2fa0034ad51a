#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "distrain/job/checkpoint_options.h"
#include "distrain/job/job.h"

namespace distrain::scenario {

/// Options of `distrain ps`; the defaults are the PyTorch tutorial's.
struct PsOptions {
  int trainers = 2;
  int epochs = 1;
  int64_t steps = 0;  ///< of each trainer; 0: as many as the epochs have
  int batch_size = 32;
  double lr = 0.03;
  std::string mode = "async";  ///< async, sync, ssp
  int64_t staleness = 1;       ///< ssp: steps that a trainer may be ahead of the slowest
  bool dropout = true;
  bool verify_grads = false;
  std::string data;   ///< folder with IDX files
  int64_t limit = 0;  ///< training examples; 0: all
  double mean = 0.1307;
  double std = 0.3081;
  uint64_t seed = 1;
  int threads = 0;       ///< intra-op; 0: cores / ranks on this host
  int log_interval = 5;  ///< steps; 0: once an epoch
  job::CheckpointOptions checkpoint;
};

/// Rank 0 is the parameter server, ranks 1..T the trainers.
int ps_world_size(const PsOptions& options);
std::string ps_role(int rank);

/// Runs one rank of the job to its end; throws base::Exception. `adopt` turns rank 0's options into
/// a PsOptions (`--data` stays this rank's own if it was given it).
job::Outcome run_ps(const PsOptions& own, const job::Job& job,
                    const std::function<PsOptions(const job::OptionMap&)>& adopt,
                    job::EventSink& sink);

/// The same training in one process without RPC: the reference for correctness and speed.
job::Outcome run_ps_local(const PsOptions& options, const job::Job& job, job::EventSink& sink);

}  // namespace distrain::scenario
