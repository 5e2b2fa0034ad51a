#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "data.h"
#include "distrain/job/local_training.h"
#include "distrain/models/language_model.h"
#include "distrain/scenario/rnn.h"

namespace distrain::scenario {

/// What a trainer makes of its LSTM and of the two ends of the model, wherever they are.
class LanguageModel {
 public:
  /// The embedding and the decoder: over RPC, or directly with `--local`. And how the LSTM is run
  /// while training: empty, as it is elsewhere.
  struct Ends {
    std::function<at::Tensor(const at::Tensor& words)> embed;
    std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& targets)> loss;
    std::function<at::Tensor(const at::Tensor& hidden)> scores;
    std::function<at::Tensor(const at::Tensor& embedded, models::LstmState& state,
                             nn::Dropout& dropout)>
        lstm;
  };

  LanguageModel(const RnnOptions& options, models::Lstm lstm, Ends ends)
      : options_(options),
        lstm_(std::move(lstm)),
        ends_(std::move(ends)),
        state_(lstm_->zero_state(options.batch_size)) {}

  /// The loss of a training batch; carries the state on to the next.
  at::Tensor training_loss(const WordBatch& batch, const job::Step& step);
  /// From a fresh state, without gradients.
  job::Evaluation evaluate(const RnnData& data, const job::Share& share) const;
  /// The `text` line, if one is asked for and there are words to write with.
  void tell_sample(const RnnData& data, job::EventSink& sink) const;

  /// What may follow these words: the probability of each of the vocabulary.
  at::Tensor next(const std::vector<int64_t>& words) const;
  /// `text` and what `--generate` words more make of it, drawn by their probabilities. `words` are
  /// the text's.
  std::string continued(std::string text, std::vector<int64_t> words,
                        const data::Vocabulary& vocabulary) const;

  /// What it carries from batch to batch.
  data::NamedTensors state() const { return {{"hidden", state_.hidden}, {"cell", state_.cell}}; }

 private:
  at::Tensor chances(const at::Tensor& words, models::LstmState& state) const;

  const RnnOptions options_;
  mutable models::Lstm lstm_;
  const Ends ends_;
  models::LstmState state_;
};

models::Lstm make_lstm(const RnnOptions& options, c10::Device device);

/// All of the model in one process.
struct WholeModel {
  WholeModel(const RnnOptions& options, int64_t words, c10::Device device);
  /// They refer to this object.
  LanguageModel::Ends ends() const;
  data::NamedTensors named() const;

  models::WordEmbedding embedding;
  models::Decoder decoder;
  models::Lstm lstm;
};

/// The server's parameters in the order of the optimizer, and the names of all.
job::LocalUpdates::Named in_order(const models::WordEmbedding& embedding,
                                  const models::Decoder& decoder);
std::vector<std::string> parameter_names(const models::Lstm& lstm);

/// The state of each trainer's model, for a checkpoint.
job::Part part_of_states(std::function<LanguageModel&(int trainer)> of);

}  // namespace distrain::scenario
