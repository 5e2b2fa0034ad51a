#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "distrain/data/named_tensors.h"
#include "distrain/job/checkpoint_options.h"
#include "distrain/job/job.h"

namespace distrain::scenario {

/// Options of `distrain hybrid`; the defaults are the PyTorch tutorial's.
struct HybridOptions {
  int trainers = 2;
  int epochs = 100;
  int64_t steps = 0;         ///< of each trainer; 0: as many as the epochs have
  int batches = 10;          ///< an epoch and trainer, random data only
  int num_embeddings = 100;  ///< random data only; with a file: its words
  int embedding_dim = 16;
  int classes = 8;  ///< random data only; with a file: its labels
  double lr = 0.05;
  std::string optimizer = "sgd";  ///< sgd, adagrad, adam
  std::string mode = "async";     ///< async, sync
  std::string data;               ///< fastText-format file; empty: random batches
  std::string test_data;
  int batch_size = 32;  ///< examples a batch and trainer, with a file
  uint64_t seed = 1;
  int threads = 0;       ///< intra-op; 0: cores / ranks on this host
  int log_interval = 0;  ///< steps; 0: once an epoch
  job::CheckpointOptions checkpoint;
  /// Not an option of the command line: told the final parameters, on trainer 0.
  std::function<void(const data::NamedTensors&)> on_finished;
};

/// Ranks 0..T-1 trainers, T master, T+1 parameter server.
int hybrid_world_size(const HybridOptions& options);
std::string hybrid_role(const HybridOptions& options, int rank);

/// Runs one rank of the job to its end; throws base::Exception. `adopt` turns rank 0's options into
/// a HybridOptions (`--data` and `--test-data` stay this rank's own if it was given them).
job::Outcome run_hybrid(const HybridOptions& own, const job::Job& job,
                        const std::function<HybridOptions(const job::OptionMap&)>& adopt,
                        job::EventSink& sink);

/// The same training in one process without RPC: the reference for correctness and speed.
job::Outcome run_hybrid_local(const HybridOptions& options, const job::Job& job,
                              job::EventSink& sink);

}  // namespace distrain::scenario
