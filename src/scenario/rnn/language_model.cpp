#include "language_model.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/trace.h"
#include "distrain/rpc/placed.h"

namespace distrain::scenario {

namespace {

constexpr uint64_t kSampleSeed = 4;

}  // namespace

at::Tensor LanguageModel::training_loss(const WordBatch& batch, const job::Step& step) {
  const base::TraceScope scope("forward");
  // The text begins anew with each epoch; a resumed job brings the state along.
  if (step.number == 0) state_ = lstm_->zero_state(batch.columns());
  nn::Dropout dropout({options_.seed, static_cast<uint64_t>(step.epoch),
                       static_cast<uint64_t>(step.shard), static_cast<uint64_t>(step.number)});
  const at::Tensor embedded = dropout(ends_.embed(batch.inputs), options_.dropout);
  const at::Tensor hidden = ends_.lstm ? ends_.lstm(embedded, state_, dropout)
                                       : lstm_->forward(embedded, state_, dropout);
  const at::Tensor output = dropout(hidden, options_.dropout);
  return ends_.loss(output.reshape({-1, output.size(2)}), batch.targets);
}

job::Evaluation LanguageModel::evaluate(const RnnData& data, const job::Share& share) const {
  job::Evaluation evaluation;
  if (data.valid_columns(share) == 0) return evaluation;
  models::LstmState state = lstm_->zero_state(data.valid_columns(share));
  nn::Dropout none;
  for (int64_t step = 0; step < data.valid_steps(); ++step) {
    const WordBatch batch = data.valid_batch(share, step);
    const at::Tensor output = lstm_->forward(ends_.embed(batch.inputs), state, none);
    const at::Tensor mean = ends_.loss(output.reshape({-1, output.size(2)}), batch.targets);
    const int64_t words = batch.targets.numel();
    evaluation.samples += words;
    evaluation.loss_sum += mean.item<double>() * static_cast<double>(words);
  }
  return evaluation;
}

void LanguageModel::tell_sample(const RnnData& data, job::EventSink& sink) const {
  if (options_.generate == 0 || options_.data.empty()) return;
  sink.emit("text", {{"text", continued(options_.prompt,
                                        data::to_tokens(options_.prompt, data.vocabulary()),
                                        data.vocabulary())}});
}

/// Of the word after `words` [length, 1].
at::Tensor LanguageModel::chances(const at::Tensor& words, models::LstmState& state) const {
  const at::NoGradGuard no_grad;
  nn::Dropout none;
  const at::Tensor output = lstm_->forward(ends_.embed(words), state, none);
  return rpc::placed(at::softmax(ends_.scores(output[-1])[0], 0), c10::kCPU);
}

at::Tensor LanguageModel::next(const std::vector<int64_t>& words) const {
  models::LstmState state = lstm_->zero_state(1);
  return chances(at::tensor(words, at::kLong).view({-1, 1}), state);
}

std::string LanguageModel::continued(std::string text, std::vector<int64_t> words,
                                     const data::Vocabulary& vocabulary) const {
  if (words.empty()) words.push_back(data::kEndOfLine);
  models::LstmState state = lstm_->zero_state(1);
  at::Generator generator = nn::keyed_generator({options_.seed, kSampleSeed});
  at::Tensor next = at::tensor(words, at::kLong).view({-1, 1});
  for (int i = 0; i < options_.generate; ++i) {
    at::Tensor weights = chances(next, state);
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

WholeModel::WholeModel(const RnnOptions& options, int64_t words, c10::Device device)
    : embedding(words, options.emsize, options.seed, device),
      decoder(words, options.nhid, options.seed, device),
      lstm(make_lstm(options, device)) {}

LanguageModel::Ends WholeModel::ends() const {
  using models::Decoder;
  return {[this](const at::Tensor& words) { return embedding.lookup(words); },
          [this](const at::Tensor& hidden, const at::Tensor& targets) {
            return Decoder::loss_of(decoder.weight(), decoder.bias(), hidden, targets);
          },
          [this](const at::Tensor& hidden) {
            return Decoder::scores_of(decoder.weight(), decoder.bias(), hidden);
          },
          {}};
}

data::NamedTensors WholeModel::named() const {
  data::NamedTensors all = lstm->named();
  all.merge(embedding.named_parameters());
  all.merge(decoder.named_parameters());
  return all;
}

job::LocalUpdates::Named in_order(const models::WordEmbedding& embedding,
                                  const models::Decoder& decoder) {
  const at::Tensor encoder = embedding.named_parameters().at("encoder.weight");
  return {{"encoder.weight", encoder},
          {"decoder.weight", decoder.weight()},
          {"decoder.bias", decoder.bias()}};
}

std::vector<std::string> parameter_names(const models::Lstm& lstm) {
  std::vector<std::string> names = {"encoder.weight", "decoder.weight", "decoder.bias"};
  for (const auto& [name, parameter] : lstm->named()) names.push_back(name);
  return names;
}

job::Part part_of_states(std::function<LanguageModel&(int trainer)> of) {
  job::Part part;
  part.file = "state";
  part.each_own = true;
  part.take = [of](int trainer) { return of(trainer).state(); };
  part.give = [of](int trainer, const data::NamedTensors& saved) {
    data::copy_into(of(trainer).state(), saved);
  };
  return part;
}

}  // namespace distrain::scenario
