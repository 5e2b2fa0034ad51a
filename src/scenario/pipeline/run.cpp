#include "run.h"

#include <ATen/Functions.h>

#include "distrain/base/trace.h"
#include "distrain/job/checkpoints.h"
#include "distrain/models/resnet.h"

namespace distrain::scenario {

namespace {

data::NamedTensors initial_weights(const PipelineOptions& options) {
  if (options.weights.empty()) return {};
  data::NamedTensors weights = models::read_weights(options.weights);
  job::naming_checkpoint(options.weights,
                         [&] { models::check_weights(options.model, options.classes, weights); });
  return weights;
}

}  // namespace

PipelineInputs::PipelineInputs(const PipelineOptions& options)
    : images(options), weights(initial_weights(options)) {}

PipelineRun::PipelineRun(const PipelineOptions& options, const PipelineInputs& inputs,
                         PipelineModel& model, job::EventSink& sink)
    : options_(options),
      inputs_(inputs),
      model_(model),
      lr_schedule_(options.rule().schedule),
      log_(options, sink) {
  begin(options.num_split.front());
}

job::Plan PipelineRun::plan() const {
  return job::Plan::of_steps(options_,
                             options_.batches * static_cast<int64_t>(options_.num_split.size()));
}

void PipelineRun::keep_in(job::TrainingPlan& training) {
  training.agree("data", std::to_string(inputs_.images.content_hash()));
  training.agree("images", inputs_.images.describe().dump());
  job::Part part;
  part.take = [this](int) { return model_.state(); };
  part.give = [this](int, const data::NamedTensors& saved) {
    models::check_weights(options_.model, options_.classes, saved);
    model_.load(saved);
  };
  training.keep("", std::move(part));
}

void PipelineRun::begin(int64_t num_split) {
  model_.begin(num_split);
  if (!inputs_.weights.empty()) model_.load(inputs_.weights);
}

job::Result PipelineRun::step(const job::Step& step) {
  const auto split = static_cast<size_t>(step.total / options_.batches);
  const int64_t index = step.total % options_.batches;
  if (split_ != split) {
    const int64_t num_split = options_.num_split[split];
    if (split_) {  // the first one has begun
      log_.end_split();
      begin(num_split);
    }
    split_ = split;
    log_.begin_split(num_split);
  }
  const PipelineBatch batch = base::traced("data", [&] { return inputs_.images.batch(index); });
  model_.set_lr_factor(lr_schedule_.factor(index, 0));  // each model's from its beginning
  const BatchResult result = model_.train(batch, index);
  log_.batch(result, index + 1);
  return {at::scalar_tensor(result.loss, at::kDouble), options_.batch_size};
}

void PipelineRun::add_to(job::Json& fields) {
  log_.end_split();
  log_.add_to(fields);
}

}  // namespace distrain::scenario
