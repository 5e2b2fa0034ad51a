// distrain rnn --local: the same model, batches and updates in one process, without RPC.

#include <vector>

#include <ATen/Functions.h>

#include "data.h"
#include "distrain/base/trace.h"
#include "distrain/models/language_model.h"
#include "language_model.h"
#include "rnn.h"

namespace distrain::scenario {

void train_rnn_local(job::Local& local, const RnnOptions& options) {
  using models::Decoder;
  const RnnData data(options);
  const models::WordEmbedding embedding(data.words(), options.emsize, options.seed, local.device());
  const Decoder decoder(data.words(), options.nhid, options.seed, local.device());
  const models::Lstm lstm = make_lstm(options, local.device());
  const data::NamedTensors middle = lstm->named();
  job::LocalUpdates updates(options.rule(), options.mode, in_order(embedding, decoder),
                            {middle.begin(), middle.end()});

  const LanguageModel::Ends ends = {
      [&](const at::Tensor& words) { return embedding.lookup(words); },
      [&](const at::Tensor& hidden, const at::Tensor& targets) {
        return Decoder::loss_of(decoder.weight(), decoder.bias(), hidden, targets);
      },
      [&](const at::Tensor& hidden) {
        return Decoder::scores_of(decoder.weight(), decoder.bias(), hidden);
      },
      {}};
  std::vector<LanguageModel> trainers;
  for (int t = 0; t < options.trainers; ++t) trainers.emplace_back(options, lstm, ends);
  const auto of = [&](int trainer) -> LanguageModel& {
    return trainers[static_cast<size_t>(trainer)];
  };

  job::LocalTraining training(local, data.plan(), options.trainers);
  data.agree(training);
  training.keep("encoder", job::part_of(embedding.named_parameters()));
  training.keep("decoder", job::part_of(decoder.named_parameters()));
  training.keep("rnn", job::part_of(middle));
  training.keep(updates);
  training.keep("", part_of_states(of));
  training.evaluate_epochs([&](const job::Share& share) { return of(0).evaluate(data, share); });
  training.run([&](const std::vector<job::Step>& steps) {
    double loss_sum = 0;
    int64_t words = 0;
    for (const job::Step& step : steps) {
      const WordBatch batch = data.batch(step.shard, step.number);
      const at::Tensor loss = of(step.shard).training_loss(batch, step);
      loss_sum += loss.item<double>();
      words += batch.targets.numel();
      base::traced("backward", [&] { loss.backward(); });
      updates.gather();
    }
    updates.step();
    return job::Result{at::scalar_tensor(loss_sum / static_cast<double>(steps.size()), at::kDouble),
                       words};
  });
  if (!training.stopped()) of(0).tell_sample(data, local.sink());
}

}  // namespace distrain::scenario
