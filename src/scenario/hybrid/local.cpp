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
  const data::NamedTensors rows = {{"embedding.weight", table.parameters()[0]}};
  job::LocalUpdates updates(options.rule(), options.mode,
                            {{"embedding.weight", table.parameters()[0]}},
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
  training.run([&](const std::vector<job::Step>& steps) {
    double loss_sum = 0;
    int64_t samples = 0;
    for (const job::Step& step : steps) {
      const HybridBatch batch = data.batch(step.shard, step.epoch, step.number).on(device);
      const at::Tensor scores = base::traced("forward", [&] { return forward(batch); });
      const at::Tensor loss =
          base::traced("loss", [&] { return at::cross_entropy_loss(scores, batch.targets); });
      loss_sum += loss.item<double>();
      samples += batch.targets.numel();
      base::traced("backward", [&] { loss.backward(); });
      updates.gather();
    }
    updates.step();
    return job::Result{at::scalar_tensor(loss_sum / static_cast<double>(steps.size()), at::kDouble),
                       samples};
  });
  if (options.on_finished) {
    auto parameters = data::on_host(job::named_tensors("fc", *dense));
    parameters.merge(data::on_host(rows));
    options.on_finished(parameters);
  }
}

}  // namespace distrain::scenario
