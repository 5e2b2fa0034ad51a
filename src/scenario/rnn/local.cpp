// distrain rnn --local: the same model, batches and updates in one process, without RPC.

#include <vector>

#include "data.h"
#include "distrain/models/language_model.h"
#include "language_model.h"
#include "rnn.h"

namespace distrain::scenario {

void train_rnn_local(job::Local& local, const RnnOptions& options) {
  const RnnData data(options);
  const WholeModel model(options, data.words(), local.device());
  const data::NamedTensors middle = model.lstm->named();
  job::LocalUpdates updates(options.rule(), options.mode, in_order(model.embedding, model.decoder),
                            {middle.begin(), middle.end()});
  std::vector<LanguageModel> trainers;
  for (int t = 0; t < options.trainers; ++t) {
    trainers.emplace_back(options, model.lstm, model.ends());
  }
  const auto of = [&](int trainer) -> LanguageModel& {
    return trainers[static_cast<size_t>(trainer)];
  };

  job::LocalTraining training(local, data.plan(), options.trainers);
  data.agree(training);
  training.keep("encoder", job::part_of(model.embedding.named_parameters()));
  training.keep("decoder", job::part_of(model.decoder.named_parameters()));
  training.keep("rnn", job::part_of(middle));
  training.keep(updates);
  training.keep("", part_of_states(of));
  training.evaluate_epochs([&](const job::Share& share) { return of(0).evaluate(data, share); });
  training.run(updates, [&](const job::Step& step) {
    const WordBatch batch = data.batch(step.shard, step.number);
    return job::Result{of(step.shard).training_loss(batch, step), batch.targets.numel()};
  });
  if (!training.stopped()) of(0).tell_sample(data, local.sink());
}

}  // namespace distrain::scenario
