#pragma once

#include <string>

#include "distrain/job/definition.h"

namespace distrain::scenario {

/// Options of `distrain rnn`. The defaults are those of the PyTorch RPC tutorial, for random
/// batches. With `data` the command line uses those of PyTorch's word language model.
struct RnnOptions : job::TrainerOptions {
  RnnOptions() {
    trainers = 1;
    epochs = 10;
    batch_size = 5;
    lr = 0.05;
  }
  static void describe(job::OptionList<RnnOptions>& list);

  int batches = 5;      ///< per epoch; random data only
  int bptt = 10;        ///< words per column in a batch; random data: rows
  int vocab_size = 10;  ///< including `<unk>` and `<eos>`
  int emsize = 2;
  int nhid = 3;
  int nlayers = 4;
  double dropout = 0.5;
  std::string data;                   ///< text file; empty: random batches
  std::string valid_data, test_data;  ///< as `data`; empty: no such evaluation
  int generate = 0;                   ///< number of words of the final sample
  std::string prompt;
};

void train_rnn(job::Rank& rank, const RnnOptions& options);
void expose_rnn(rpc::Agent& agent);
/// Trains in one process without RPC: the reference for correctness and speed.
void train_rnn_local(job::SingleProcess& local, const RnnOptions& options);
/// Predicts the words that follow lines of text, with the model of a checkpoint.
void predict_rnn(job::Predictions& predictions, const RnnOptions& options);

}  // namespace distrain::scenario
