// distrain hybrid in one process without RPC (--local, with the same updates), and predict.

#include <ATen/Functions.h>

#include "data.h"
#include "distrain/base/trace.h"
#include "distrain/rpc/to_device.h"
#include "embedding_table.h"

namespace distrain::scenario {

namespace {

struct WholeModel {
  WholeModel(const HybridOptions& options, const HybridData& data, c10::Device device)
      : table(data.rows(), options.embedding_dim, options.embedding_range(), options.seed,
              device.str()),
        dense(options.embedding_dim, data.classes(), options.seed + 1, device) {}

  at::Tensor forward(const data::Batch& batch) const {
    return dense->forward(table.lookup(batch.indices, batch.offsets));
  }
  rpc::NamedTensors parameters() const {
    rpc::NamedTensors all = store::named_tensors("fc", *dense);
    all.merge(table.named_parameters());
    return all;
  }

  EmbeddingTable table;
  Dense dense;
};

}  // namespace

void train_hybrid_local(job::SingleProcess& local, const HybridOptions& options) {
  HybridData data(options);
  if (data.evaluates_text()) local.fields()["unknown_words"] = data.unknown_words();
  const WholeModel model(options, data, local.device());
  const rpc::NamedTensors rows = model.table.named_parameters();
  job::SingleProcessOptimizer optimizer(
      options.rule(), options.mode, {rows.begin(), rows.end()},
      {{"fc.weight", model.dense->weight}, {"fc.bias", model.dense->bias}});

  job::SingleProcessTraining training(local, options, data.steps_per_epoch());
  data.agree(training);
  training.keep("", job::part_of(model.parameters()));
  training.keep(optimizer);
  data.evaluate_in(training, [&](const data::Batch& batch) { return model.forward(batch); });
  training.run(optimizer, [&](const job::Step& step) {
    const data::Batch batch = data.batch(step);
    const at::Tensor targets = rpc::to_device(batch.targets, local.device());
    const at::Tensor scores = base::traced("forward", [&] { return model.forward(batch); });
    const at::Tensor loss =
        base::traced("loss", [&] { return at::cross_entropy_loss(scores, targets); });
    return job::Result{loss, batch.size()};
  });
}

void predict_hybrid(job::Predictions& predictions, const HybridOptions& options) {
  const HybridData data(options, predictions.snapshot(), predictions.input());
  const WholeModel model(options, data, predictions.device());
  predictions.load(model.parameters());
  predictions.add("unknown_words", data.unknown_words());
  // Uses the shares of the trainers in turn, so that the batches are those of the evaluation.
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    data.each_batch(data.test(), {trainer, options.trainers}, [&](const data::Batch& batch) {
      predictions.tell_labels(model.forward(batch), batch.targets, data.labels());
    });
  }
}

}  // namespace distrain::scenario
