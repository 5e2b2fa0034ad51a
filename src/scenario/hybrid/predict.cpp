// distrain predict, of a checkpoint of hybrid: the labels of examples.

#include "data.h"
#include "hybrid.h"
#include "model.h"

namespace distrain::scenario {

void predict_hybrid(job::Predictions& predictions, const HybridOptions& options) {
  const c10::Device device = predictions.device();
  const HybridData data(options, predictions.snapshot(), predictions.input());
  models::EmbeddingTable table(data.info().rows, options.embedding_dim, embedding_range(options),
                               options.seed, device.str());
  models::Dense dense = make_dense(options, data.info().classes, device);
  data::NamedTensors model = data::named_tensors("fc", *dense);
  model["embedding.weight"] = table.parameters()[0];
  predictions.load(model);
  // In the trainers' shares, one after the other: the same batches that they evaluated.
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    data.each_test_batch({trainer, options.trainers}, [&](const HybridBatch& examples) {
      const HybridBatch batch = examples.on(device);
      predictions.tell_labels(dense->forward(table.lookup(batch.indices, batch.offsets)),
                              batch.targets, data.labels());
    });
  }
}

}  // namespace distrain::scenario
