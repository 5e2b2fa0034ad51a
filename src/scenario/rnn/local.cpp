// distrain rnn in one process without RPC (--local, with the same updates), and predict.

#include <algorithm>
#include <map>

#include "data.h"
#include "language_model.h"

namespace distrain::scenario {

namespace {

constexpr int64_t kLikeliest = 5;

/// The whole model in this process.
struct WholeModel {
  WholeModel(const RnnOptions& options, int64_t words, c10::Device device)
      : embedding(words, options.emsize, options.seed, device),
        decoder(words, options.nhid, options.seed, device),
        middle(options, device,
               {[this](const at::Tensor& each) { return embedding.lookup(each); },
                [this](const at::Tensor& hidden, const at::Tensor& targets) {
                  return Decoder::loss_of(decoder.weight(), decoder.bias(), hidden, targets);
                },
                [this](const at::Tensor& hidden) {
                  return Decoder::scores_of(decoder.weight(), decoder.bias(), hidden);
                }}) {}
  WholeModel(const WholeModel&) = delete;

  rpc::NamedTensors parameters() const {
    rpc::NamedTensors all = middle.lstm_parameters();
    all.merge(embedding.named_parameters());
    all.merge(decoder.named_parameters());
    return all;
  }

  WordEmbedding embedding;
  Decoder decoder;
  LanguageModel middle;
};

job::Json likeliest(const at::Tensor& chances, const data::Vocabulary& vocabulary) {
  const auto [scores, words] = chances.topk(std::min(kLikeliest, chances.size(0)));
  job::Json fields{{"words", job::Json::array()}, {"scores", job::Json::array()}};
  for (int64_t i = 0; i < words.size(0); ++i) {
    fields["words"].push_back(std::string(vocabulary.word(words[i].item<int64_t>())));
    fields["scores"].push_back(scores[i].item<double>());
  }
  return fields;
}

}  // namespace

void train_rnn_local(job::SingleProcess& local, const RnnOptions& options) {
  const RnnData data(options);
  WholeModel whole(options, data.words(), local.device());
  LanguageModel& model = whole.middle;
  const rpc::NamedTensors lstm = model.lstm_parameters();
  job::SingleProcessOptimizer optimizer(options.rule(), options.mode,
                                        in_order(whole.embedding, whole.decoder),
                                        {lstm.begin(), lstm.end()});
  std::map<int, LstmState> states;  // by trainer
  for (int t = 0; t < options.trainers; ++t) {
    states[t] = model.lstm().zero_state(options.batch_size);
  }

  job::SingleProcessTraining training(local, data.plan(), options.trainers);
  data.agree(training);
  training.keep("encoder", job::part_of(whole.embedding.named_parameters()));
  training.keep("decoder", job::part_of(whole.decoder.named_parameters()));
  training.keep("rnn", job::part_of(lstm));
  training.keep(optimizer);
  training.keep("", job::part_of_each([&](int trainer) { return named(states.at(trainer)); }));
  model.evaluate_in(training, data);
  training.run(optimizer, [&](const job::Step& step) {
    const WordBatch batch = data.batch(step);
    const at::Tensor loss = model.training_loss(batch, step, states.at(step.shard));
    return job::Result{loss, batch.targets.numel()};
  });
  if (!training.stopped()) model.tell_sample(data, local.sink());
}

void predict_rnn(job::Predictions& predictions, const RnnOptions& options) {
  const RnnData data(options, predictions.snapshot(), predictions.input());
  const WholeModel whole(options, data.words(), predictions.device());
  const LanguageModel& model = whole.middle;
  predictions.load(whole.parameters());
  for (const std::vector<int64_t>& line : data.test().lines()) {
    LstmState state = model.lstm().zero_state(1);
    predictions.tell(options.generate > 0
                         ? job::Json{{"text", model.continued("", line, data.vocabulary())}}
                         : likeliest(model.next(line, state), data.vocabulary()));
  }
  // Uses the shares of the trainers, as the evaluation did, because sums depend on them.
  job::Evaluation evaluation;
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    evaluation.add(model.evaluate(data.test(), {trainer, options.trainers}));
  }
  predictions.evaluated(evaluation, job::Unit::kWords);
}

}  // namespace distrain::scenario
