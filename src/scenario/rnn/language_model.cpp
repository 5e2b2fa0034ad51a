#include "language_model.h"

#include <cmath>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/trace.h"
#include "distrain/rpc/placed.h"

namespace distrain::scenario {

namespace {

constexpr uint64_t kSampleSeed = 4;

}  // namespace

void WordLoss::add(const WordLoss& other) {
  words += other.words;
  loss_sum += other.loss_sum;
}

job::Json WordLoss::fields() const {
  if (words == 0) return job::Json::object();
  return {{"loss", mean()}, {"perplexity", std::exp(mean())}, {"samples", words}};
}

at::Tensor LanguageModel::training_loss(const WordBatch& batch, const job::Task& task) {
  const base::TraceScope scope("forward");
  // The text begins anew with each epoch; a resumed job brings the state along.
  if (task.step == 0 || !state_.hidden.defined()) state_ = lstm_->zero_state(batch.columns());
  models::Dropout dropout({options_.seed, static_cast<uint64_t>(task.epoch),
                           static_cast<uint64_t>(task.shard), static_cast<uint64_t>(task.step)});
  const at::Tensor embedded = dropout(ends_.embed(batch.inputs), options_.dropout);
  const at::Tensor hidden = ends_.lstm ? ends_.lstm(embedded, state_, dropout)
                                       : lstm_->forward(embedded, state_, dropout);
  const at::Tensor output = dropout(hidden, options_.dropout);
  return ends_.loss(output.reshape({-1, output.size(2)}), batch.targets);
}

WordLoss LanguageModel::evaluate(const RnnData& data, int trainer) const {
  const base::TraceScope scope("evaluate");
  const at::NoGradGuard no_grad;
  WordLoss total;
  if (data.valid_columns(trainer) == 0) return total;
  models::LstmState state = lstm_->zero_state(data.valid_columns(trainer));
  models::Dropout none;
  for (int64_t step = 0; step < data.valid_steps(); ++step) {
    const WordBatch batch = data.valid_batch(trainer, step);
    const at::Tensor output = lstm_->forward(ends_.embed(batch.inputs), state, none);
    const at::Tensor loss = ends_.loss(output.reshape({-1, output.size(2)}), batch.targets);
    const int64_t words = batch.targets.numel();
    total.add({words, loss.item<double>() * static_cast<double>(words)});
  }
  return total;
}

std::string LanguageModel::generate(const data::Vocabulary& vocabulary) const {
  const at::NoGradGuard no_grad;
  std::string text = options_.prompt;
  std::vector<int64_t> given = data::to_tokens(options_.prompt, vocabulary);
  if (given.empty()) given.push_back(data::kEndOfLine);
  models::LstmState state = lstm_->zero_state(1);
  models::Dropout none;
  at::Generator generator = models::keyed_generator({options_.seed, kSampleSeed});
  at::Tensor next = at::tensor(given, at::kLong).view({-1, 1});
  for (int i = 0; i < options_.generate; ++i) {
    const at::Tensor output = lstm_->forward(ends_.embed(next), state, none);
    at::Tensor weights = rpc::placed(at::softmax(ends_.scores(output[-1])[0], 0), c10::kCPU);
    weights[data::kUnknownWord] = 0;
    const auto word = weights.multinomial(1, false, generator).item<int64_t>();
    if (word == data::kEndOfLine) {
      text += '\n';
    } else {
      if (!text.empty() && text.back() != '\n') text += ' ';
      text += vocabulary.word(word);
    }
    next = at::full({1, 1}, word, at::kLong);
  }
  return text;
}

models::Lstm make_lstm(const RnnOptions& options, c10::Device device) {
  return models::Lstm(options.emsize, options.nhid, options.nlayers, options.dropout, options.seed,
                      device);
}

optim::OptimizerOptions optimizer_options(const RnnOptions& options) {
  return optim::Sgd{.lr = options.lr};
}

double lr_factor(const RnnOptions& options, double lr) {
  return options.lr > 0 ? lr / options.lr : 1;  // a rate of 0 stays so
}

}  // namespace distrain::scenario
