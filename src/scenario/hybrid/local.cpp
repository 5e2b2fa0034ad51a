// distrain hybrid --local: the same model, batches and updates in one process, without RPC.

#include <vector>

#include <ATen/Functions.h>

#include "data.h"
#include "distrain/base/trace.h"
#include "hybrid.h"
#include "model.h"

namespace distrain::scenario {

void train_hybrid_local(job::Local& local, const HybridOptions& options) {
  const c10::Device device = local.device();
  HybridData data(options);
  const HybridDataInfo info = data.info();
  models::EmbeddingTable table(info.rows, options.embedding_dim, embedding_range(options),
                               options.seed, device.str());
  models::Dense dense = make_dense(options, info.classes, device);
  const data::NamedTensors rows = table.named_parameters();
  job::LocalUpdates updates(options.rule(), options.mode, {rows.begin(), rows.end()},
                            {{"fc.weight", dense->weight}, {"fc.bias", dense->bias}});
  const auto forward = [&](const HybridBatch& batch) {
    return dense->forward(table.lookup(batch.indices, batch.offsets));
  };

  job::LocalTraining training(local, options, data.steps_per_epoch());
  data.agree(training);
  training.keep("embedding", job::part_of(rows));
  training.keep("fc", *dense);
  training.keep(updates);
  data.evaluate_in(training, [&](const HybridBatch& batch) { return forward(batch.on(device)); });
  training.run(updates, [&](const job::Step& step) {
    const HybridBatch batch = data.batch(step.shard, step.epoch, step.number).on(device);
    const at::Tensor scores = base::traced("forward", [&] { return forward(batch); });
    const at::Tensor loss =
        base::traced("loss", [&] { return at::cross_entropy_loss(scores, batch.targets); });
    return job::Result{loss, batch.targets.numel()};
  });
  if (options.on_finished) {
    auto parameters = data::on_host(data::named_tensors("fc", *dense));
    parameters.merge(data::on_host(rows));
    options.on_finished(parameters);
  }
}

}  // namespace distrain::scenario
