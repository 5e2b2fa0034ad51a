#pragma once

#include <string>

#include "distrain/job/definition.h"

namespace distrain::scenario {

/// Options of `distrain hybrid`; the defaults are the PyTorch tutorial's.
struct HybridOptions : job::TrainerOptions {
  HybridOptions() {
    epochs = 100;
    lr = 0.05;
  }
  static void describe(job::OptionList<HybridOptions>& list);

  int batches = 10;          ///< an epoch and trainer, not with a file
  int num_embeddings = 100;  ///< with a file: its words
  int embedding_dim = 16;
  int classes = 8;   ///< with a file: its labels
  std::string data;  ///< fastText-format file; empty: random batches; kTeacher: with its labels
  std::string valid_data, test_data;  ///< as data; empty: no such evaluation

  /// `data` for random batches whose labels a hidden teacher makes.
  static constexpr const char* kTeacher = "teacher";
  bool has_teacher() const { return data == kTeacher; }
  bool has_text() const { return !data.empty() && !has_teacher(); }

  /// Bound of the table's initial values. With data it is fastText's, so that the sum over a long
  /// text does not dominate; with random labels it is the tutorial's.
  double embedding_range() const { return data.empty() ? 0.0 : 1.0 / embedding_dim; }
};

/// What a trainer does.
void train_hybrid(job::Rank& rank, const HybridOptions& options);
/// What the master and the server do for the trainers.
void expose_hybrid(rpc::Agent& agent);
/// The same training in one process without RPC: the reference for correctness and speed.
void train_hybrid_local(job::Local& local, const HybridOptions& options);
/// Labels examples with the model of a checkpoint.
void predict_hybrid(job::Predictions& predictions, const HybridOptions& options);

/// Ranks 0..T-1 trainers, T master, T+1 parameter server.
const job::Definition<HybridOptions>& hybrid_job();

}  // namespace distrain::scenario
