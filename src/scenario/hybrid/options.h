#pragma once

#include <string>

#include "distrain/job/definition.h"

namespace distrain::scenario {

/// Options of `distrain hybrid`. The defaults are those of the PyTorch tutorial.
struct HybridOptions : job::TrainerOptions {
  HybridOptions() {
    epochs = 100;
    lr = 0.05;
  }
  static void describe(job::OptionList<HybridOptions>& list);

  int batches = 10;          ///< per epoch and trainer, without a file
  int num_embeddings = 100;  ///< with a file: one per word
  int embedding_dim = 16;
  int classes = 8;                    ///< with a file: one per label
  std::string data;                   ///< fastText-format file; empty: random batches; or kTeacher
  std::string valid_data, test_data;  ///< as `data`; empty: no such evaluation

  /// Value of `data` for random batches with labels from a hidden teacher.
  static constexpr const char* kTeacher = "teacher";
  bool has_teacher() const { return data == kTeacher; }
  bool has_text() const { return !data.empty() && !has_teacher(); }

  /// Bound of the uniform initial values of the table; 0: standard normal, as in the tutorial. With
  /// data it is fastText's bound, so that the sum over a long text does not dominate.
  double embedding_range() const { return data.empty() ? 0.0 : 1.0 / embedding_dim; }
};

void train_hybrid(job::Rank& rank, const HybridOptions& options);
void expose_hybrid(rpc::Agent& agent);
/// Trains in one process without RPC: the reference for correctness and speed.
void train_hybrid_local(job::SingleProcess& local, const HybridOptions& options);
/// Labels examples with the model of a checkpoint.
void predict_hybrid(job::Predictions& predictions, const HybridOptions& options);

}  // namespace distrain::scenario
