#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "distrain/job/checkpoint_options.h"
#include "distrain/job/job.h"

namespace distrain::scenario {

/// Options of `distrain rnn`; the defaults are the PyTorch tutorial's, for random batches. With
/// `data` the command line has others (those of PyTorch's word language model).
struct RnnOptions {
  int trainers = 1;
  int epochs = 10;
  int64_t steps = 0;    ///< of each trainer; 0: as many as the epochs have
  int batches = 5;      ///< an epoch, random data only
  int batch_size = 5;   ///< columns of text a trainer
  int bptt = 35;        ///< words a batch and column; random data: 10 (rows below)
  int vocab_size = 10;  ///< words that are told apart, `<unk>` and `<eos>` included
  int emsize = 2;
  int nhid = 3;
  int nlayers = 4;
  double dropout = 0.5;
  double lr = 0.05;
  double clip = 0;             ///< of the gradient's norm over all ranks; 0: none
  std::string mode = "async";  ///< async, sync
  std::string data;            ///< text; empty: random batches
  std::string valid_data;
  int generate = 0;  ///< words of a sample at the end
  std::string prompt;
  uint64_t seed = 1;
  int threads = 0;       ///< intra-op; 0: cores / ranks on this host
  int log_interval = 0;  ///< steps; 0: once an epoch
  job::CheckpointOptions checkpoint;
};

/// Rank 0 is the parameter server, ranks 1..T the trainers.
int rnn_world_size(const RnnOptions& options);
std::string rnn_role(int rank);

/// Runs one rank of the job to its end; throws base::Exception. `adopt` turns rank 0's options into
/// an RnnOptions (`--data` and `--valid-data` stay this rank's own if it was given them).
job::Outcome run_rnn(const RnnOptions& own, const job::Job& job,
                     const std::function<RnnOptions(const job::OptionMap&)>& adopt,
                     job::EventSink& sink);

/// The same training in one process without RPC: the reference for correctness and speed.
job::Outcome run_rnn_local(const RnnOptions& options, const job::Job& job, job::EventSink& sink);

}  // namespace distrain::scenario
