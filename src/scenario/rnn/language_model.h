#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

#include "data.h"
#include "distrain/models/language_model.h"
#include "distrain/optim/update_rule.h"
#include "distrain/scenario/rnn.h"

namespace distrain::scenario {

/// The sum of losses of some words.
struct WordLoss {
  int64_t words = 0;
  double loss_sum = 0;
  static constexpr auto kFields = std::tuple(&WordLoss::words, &WordLoss::loss_sum);
  void add(const WordLoss& other);
  double mean() const { return loss_sum / static_cast<double>(words); }
  job::Json fields() const;  ///< loss, perplexity, samples; empty when there are no words
};

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
                             models::Dropout& dropout)>
        lstm;
  };

  LanguageModel(const RnnOptions& options, models::Lstm lstm, Ends ends)
      : options_(options), lstm_(std::move(lstm)), ends_(std::move(ends)) {}

  /// The loss of a training batch; carries the state on to the next.
  at::Tensor training_loss(const WordBatch& batch, const job::Task& task);
  /// From a fresh state, without gradients.
  WordLoss evaluate(const RnnData& data, int trainer) const;
  /// `options.prompt` and `options.generate` words more, drawn by their probabilities.
  std::string generate(const data::Vocabulary& vocabulary) const;

  models::LstmState& state() { return state_; }

 private:
  const RnnOptions options_;
  mutable models::Lstm lstm_;
  const Ends ends_;
  models::LstmState state_;
};

models::Lstm make_lstm(const RnnOptions& options, c10::Device device);
optim::OptimizerOptions optimizer_options(const RnnOptions& options);

/// What makes `lr` of --lr.
double lr_factor(const RnnOptions& options, double lr);

}  // namespace distrain::scenario
