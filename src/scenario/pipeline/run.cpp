#include "run.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "distrain/base/trace.h"
#include "distrain/job/checkpoints.h"
#include "distrain/models/resnet.h"
#include "distrain/rpc/placed.h"
#include "loss.h"

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

int64_t PipelineRun::batches() const {
  if (options_.epochs == 0) return options_.batches;
  return options_.epochs * inputs_.images.batches_per_epoch();
}

job::Plan PipelineRun::plan() const {
  job::Plan plan =
      job::Plan::of_steps(options_, batches() * static_cast<int64_t>(options_.num_split.size()));
  if (!options_.data.empty() && options_.num_split.size() == 1) {
    plan.steps_per_epoch = inputs_.images.batches_per_epoch();
    plan.epochs = (plan.steps + plan.steps_per_epoch - 1) / plan.steps_per_epoch;
  }
  return plan;
}

void PipelineRun::keep_in(job::TrainingPlan& training) {
  training.agree("data", std::to_string(inputs_.images.content_hash()));
  const job::Json images = inputs_.images.describe();
  training.agree("images", images.dump());
  training.agree("format", images["data"].get<std::string>());
  job::Part part;
  part.take = [this](int) { return model_.state(); };
  part.give = [this](int, const data::NamedTensors& saved) {
    models::check_weights(options_.model, options_.classes, saved);
    model_.load(saved);
  };
  training.keep("", std::move(part));
  if (inputs_.images.valid_count() == 0) return;
  training.evaluate_epochs([this](const job::Share& share) { return evaluate(share); });
}

job::Evaluation PipelineRun::evaluate(const job::Share& share) {
  const int64_t end = share.end(inputs_.images.valid_count());
  job::Evaluation evaluation;
  for (int64_t first = share.first(inputs_.images.valid_count()); first < end;) {
    const int64_t next = std::min(first + options_.batch_size, end);
    const PipelineBatch batch = inputs_.images.valid_batch(first, next);
    const at::Tensor scores = model_.scores(batch.images);
    const at::Tensor share_of_loss = loss_share(options_, scores, batch.labels);
    evaluation.add(scores, rpc::placed(batch.labels, scores.device()),
                   share_of_loss.item<double>() * static_cast<double>(options_.batch_size));
    first = next;
  }
  return evaluation;
}

void PipelineRun::begin(int64_t num_split) {
  model_.begin(num_split);
  if (!inputs_.weights.empty()) model_.load(inputs_.weights);
}

job::Result PipelineRun::step(const job::Step& step) {
  const auto split = static_cast<size_t>(step.total / batches());
  const int64_t index = step.total % batches();
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
  const bool has_epochs = !options_.data.empty();
  log_.batch(result, has_epochs ? 1 + index / inputs_.images.batches_per_epoch() : 1, index + 1);
  return {at::scalar_tensor(result.loss, at::kDouble), options_.batch_size};
}

void PipelineRun::add_to(job::Json& fields) {
  log_.end_split();
  log_.add_to(fields);
}

}  // namespace distrain::scenario
