#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/models/language_model.h"
#include "distrain/optim/local_updates.h"

namespace distrain::scenario {

/// What a trainer makes of its LSTM and of the two ends of the model, wherever they are.
class LanguageModel {
 public:
  /// The embedding and the decoder: over RPC, or directly in one process.
  struct Ends {
    std::function<at::Tensor(const at::Tensor& words)> embed;
    std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& targets)> loss;
    std::function<at::Tensor(const at::Tensor& hidden)> scores;
  };

  /// With a `group` all its trainers share the LSTM, by DistributedDataParallel.
  LanguageModel(const RnnOptions& options, c10::Device device, Ends ends,
                const job::Group* group = nullptr);

  /// The loss of a training batch; carries the state on to the next.
  at::Tensor training_loss(const WordBatch& batch, const job::Step& step, models::LstmState& state);
  /// Has the texts of both evaluations evaluated. To outlive the training, as the data.
  void evaluate_in(job::TrainingPlan& training, const RnnData& data) const;
  /// From a fresh state, without gradients.
  job::Evaluation evaluate(const data::Corpus& text, const job::Share& share) const;
  /// The `text` line, if one is asked for and there are words to write with.
  void tell_sample(const RnnData& data, job::EventSink& sink) const;

  /// What may follow these words: the probability of each of the vocabulary.
  at::Tensor next(const std::vector<int64_t>& words, models::LstmState& state) const;
  /// `text` and `--generate` words more, drawn by their probabilities. `words` are the text's.
  std::string continued(std::string text, std::vector<int64_t> words,
                        const data::Vocabulary& vocabulary) const;

  const models::LstmImpl& lstm() const { return *lstm_; }

 private:
  at::Tensor hidden_of(const at::Tensor& words, models::LstmState& state) const;

  const RnnOptions options_;
  mutable models::Lstm lstm_;
  const Ends ends_;
  std::optional<ddp::DistributedDataParallel<models::Lstm>> parallel_;
};

/// For a checkpoint.
inline data::NamedTensors named(const models::LstmState& state) {
  return {{"hidden", state.hidden}, {"cell", state.cell}};
}

/// The server's parameters in the order of the optimizer.
optim::NamedParameters in_order(const models::WordEmbedding& embedding,
                                const models::Decoder& decoder);

}  // namespace distrain::scenario
