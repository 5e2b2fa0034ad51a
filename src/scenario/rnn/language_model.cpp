#include <algorithm>

#include "rnn.h"

namespace distrain::scenario {

at::Tensor LanguageModel::training_loss(const WordBatch& batch, const job::Step& step,
                                        const job::Share& part, LstmState& state) {
  const base::TraceScope scope("forward");
  const int64_t first = part.first(options_.step_size()), end = part.end(options_.step_size());
  // Each epoch starts the text again with a zero state. A resumed job restores the state.
  if (step.number + part.index == 0) state = lstm_->zero_state(options_.step_size());
  LstmState own{state.hidden.slice(1, first, end).contiguous(),
                state.cell.slice(1, first, end).contiguous()};
  nn::Dropout dropout({options_.seed, static_cast<uint64_t>(step.epoch),
                       static_cast<uint64_t>(step.shard),
                       static_cast<uint64_t>(step.number * part.count + part.index)});
  const at::Tensor embedded = dropout(ends_.embed(batch.inputs), options_.dropout);
  const at::Tensor hidden = parallel_ ? parallel_->forward(embedded, own, dropout)
                                      : lstm_->forward(embedded, own, dropout);
  // Copies the state, because the graph of the LSTM has saved the former one.
  state = {state.hidden.slice_scatter(own.hidden, 1, first, end),
           state.cell.slice_scatter(own.cell, 1, first, end)};
  const at::Tensor dropped = dropout(hidden, options_.dropout).flatten(0, 1);
  return ends_.loss(dropped, batch.targets) / part.count;
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
