#include <algorithm>

#include "rnn.h"

namespace distrain::scenario {

at::Tensor LanguageModel::training_loss(const WordBatch& batch, const job::Step& step,
                                        LstmState& state) {
  const base::TraceScope scope("forward");
  // Each epoch starts the text again with a zero state. A resumed job restores the state.
  if (step.number == 0) state = lstm_->zero_state(batch.inputs.size(1));
  nn::Dropout dropout({options_.seed, static_cast<uint64_t>(step.epoch),
                       static_cast<uint64_t>(step.shard), static_cast<uint64_t>(step.number)});
  const at::Tensor embedded = dropout(ends_.embed(batch.inputs), options_.dropout);
  const at::Tensor hidden = parallel_ ? parallel_->forward(embedded, state, dropout)
                                      : lstm_->forward(embedded, state, dropout);
  return ends_.loss(dropout(hidden, options_.dropout).flatten(0, 1), batch.targets);
}

job::Evaluation LanguageModel::evaluate(const data::Tokens& text, const job::Share& share) const {
  constexpr int64_t kColumns = 10;  // as in PyTorch's word language model
  const int64_t all = std::min(kColumns, text.size() / 2);
  const int64_t first = share.first(all), count = share.end(all) - first;
  job::Evaluation evaluation;
  if (count == 0) return evaluation;
  const data::TokenColumns columns(text, all, first, count);
  LstmState state = lstm_->zero_state(count);
  for (int64_t step = 0; step < columns.steps(options_.bptt); ++step) {
    const WordBatch batch = columns.batch(step, options_.bptt);
    const at::Tensor mean = ends_.loss(hidden_of(batch.inputs, state).flatten(0, 1), batch.targets);
    const int64_t words = batch.targets.numel();
    evaluation.samples += words;
    evaluation.loss_sum += mean.item<double>() * static_cast<double>(words);
  }
  return evaluation;
}

std::string LanguageModel::continued(std::string text, std::vector<int64_t> words,
                                     const data::Vocabulary& vocabulary) const {
  constexpr uint64_t kSampleSeed = 4;
  const bool is_text = data::has_reserved_words(vocabulary);
  if (words.empty()) words.push_back(data::kEndOfLine);
  LstmState state = lstm_->zero_state(1);
  at::Generator generator = nn::keyed_generator({options_.seed, kSampleSeed});
  for (int i = 0; i < options_.generate; ++i) {
    at::Tensor weights = next(words, state);
    if (is_text) weights[data::kUnknownWord] = 0;
    const auto word = weights.multinomial(1, false, generator).item<int64_t>();
    if (is_text && word == data::kEndOfLine) {
      text += '\n';
    } else {
      if (!text.empty() && text.back() != '\n') text += ' ';
      text += vocabulary.word(word);
    }
    words = {word};
  }
  return text;
}

}  // namespace distrain::scenario
