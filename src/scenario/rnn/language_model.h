#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/optim/single_process_optimizer.h"
#include "lstm.h"

namespace distrain::scenario {

/// A language model: an LSTM in this process, and an embedding and a decoder that may be remote.
class LanguageModel {
 public:
  /// The embedding and the decoder, called over RPC or directly.
  struct Ends {
    std::function<at::Tensor(const at::Tensor& words)> embed;
    std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& targets)> loss;
    std::function<at::Tensor(const at::Tensor& hidden)> scores;
  };

  /// With a `group`, its trainers replicate the LSTM by DistributedDataParallel.
  LanguageModel(const RnnOptions& options, c10::Device device, Ends ends,
                const job::Group* group = nullptr);

  /// Returns the loss of a training batch, and updates the state for the next batch.
  at::Tensor training_loss(const WordBatch& batch, const job::Step& step, LstmState& state);
  /// Adds the evaluations of both texts. This object and `data` must outlive the training.
  void evaluate_in(job::TrainingPlan& training, const RnnData& data) const;
  /// Evaluates a share of `text` from a zero state, without gradients.
  job::Evaluation evaluate(const data::Corpus& text, const job::Share& share) const;
  /// Prints the `text` line, if --generate asks for it and there is a vocabulary.
  void tell_sample(const RnnData& data, job::EventSink& sink) const;

  /// Returns the probability of each word of the vocabulary to follow `words`.
  at::Tensor next(const std::vector<int64_t>& words, LstmState& state) const;
  /// Returns `text` (as tokens: `words`) and `--generate` more words, sampled by probability.
  std::string continued(std::string text, std::vector<int64_t> words,
                        const data::Vocabulary& vocabulary) const;

  const LstmImpl& lstm() const { return *lstm_; }
  rpc::NamedTensors lstm_parameters() const { return store::named_tensors("rnn", *lstm_); }

 private:
  at::Tensor hidden_of(const at::Tensor& words, LstmState& state) const;

  const RnnOptions options_;
  mutable Lstm lstm_;
  const Ends ends_;
  std::optional<ddp::DistributedDataParallel<Lstm>> parallel_;
};

/// Names the tensors of a state for checkpoints.
inline rpc::NamedTensors named(const LstmState& state) {
  return {{"hidden", state.hidden}, {"cell", state.cell}};
}

/// Returns the parameters of the server in the order of the optimizer.
optim::NamedParameters in_order(const WordEmbedding& embedding, const Decoder& decoder);

}  // namespace distrain::scenario
