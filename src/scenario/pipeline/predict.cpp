// distrain predict, of a checkpoint of pipeline: the classes of images, by all stages in one.

#include <algorithm>

#include "data.h"
#include "distrain/models/resnet.h"
#include "pipeline.h"

namespace distrain::scenario {

void predict_pipeline(job::Predictions& predictions, const PipelineOptions& options) {
  const PipelineData images(options, predictions.snapshot(), predictions.input());
  models::ResNetStage model(options.model, options.classes, models::whole_resnet(options.model),
                            options.seed, predictions.device());
  predictions.load(model.state());
  std::vector<std::string> classes;
  for (int64_t i = 0; i < options.classes; ++i) classes.push_back(std::to_string(i));
  for (int64_t first = 0; first < images.valid_count(); first += options.batch_size) {
    const PipelineBatch batch =
        images.valid_batch(first, std::min(first + options.batch_size, images.valid_count()));
    predictions.tell_labels(model.forward(batch.images, false), batch.labels, classes);
  }
}

}  // namespace distrain::scenario
