#include "run.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "distrain/base/trace.h"
#include "distrain/models/resnet.h"
#include "distrain/rpc/placed.h"

namespace distrain::scenario {

namespace {

data::NamedTensors initial_weights(const PipelineOptions& options) {
  if (options.weights.empty()) return {};
  data::NamedTensors weights = models::read_weights(options.weights);
  data::naming_file(options.weights,
                    [&] { models::check_weights(options.model, options.classes, weights); });
  return weights;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace

PipelineInputs::PipelineInputs(const PipelineOptions& options)
    : images(options), weights(initial_weights(options)) {}

PipelineRun::PipelineRun(const PipelineOptions& options, const PipelineInputs& inputs,
                         PipelineModel& model, job::EventSink& sink)
    : options_(options),
      inputs_(inputs),
      model_(model),
      sink_(sink),
      lr_schedule_(options.rule().schedule) {
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
    if (split_) {  // the first one has begun
      end_split();
      begin(options_.num_split[split]);
    }
    split_ = split;
    split_begun_ = base::Clock::now();
    if (steps_ == 0) begun_ = split_begun_;
  }
  const PipelineBatch batch = base::traced("data", [&] { return inputs_.images.batch(index); });
  model_.set_lr_factor(lr_schedule_.factor(index, 0));  // each model's from its beginning
  results_.push_back(model_.train(batch, index));
  ++steps_;
  const bool has_epochs = !options_.data.empty();
  log(results_.back(), has_epochs ? 1 + index / inputs_.images.batches_per_epoch() : 1, index + 1);
  return {at::scalar_tensor(results_.back().loss, at::kDouble), options_.batch_size};
}

void PipelineRun::log(const BatchResult& result, int64_t epoch, int64_t step) {
  if (options_.log_interval == 0 || step % options_.log_interval != 0) return;
  job::Json fields{{"epoch", epoch},
                   {"step", step},
                   {"num_split", options_.num_split[*split_]},
                   {"loss", result.loss}};
  if (result.accuracy) fields["accuracy"] = *result.accuracy;
  fields["batch_s"] = result.batch_s;
  fields["samples_per_s"] = static_cast<double>(options_.batch_size) / result.batch_s;
  sink_.emit("step", fields);
}

void PipelineRun::end_split() {
  if (results_.empty()) return;
  train_s_ = base::seconds_since(begun_);
  const std::vector<BatchResult> results = std::exchange(results_, {});
  const auto median_of = [&](const auto& value) {
    std::vector<double> values;
    for (const BatchResult& result : results) values.push_back(value(result));
    // The first batch pays for what is done once; one alone has to do.
    if (values.size() > 1) values.erase(values.begin());
    return median(std::move(values));
  };
  const BatchResult& result = results.back();
  const double batch_s = median_of([](const BatchResult& r) { return r.batch_s; });
  job::Json stage_s = job::Json::array();
  for (size_t i = 0; i < result.stage_s.size(); ++i) {
    const auto of_stage = [i](const BatchResult& r) { return *r.stage_s[i]; };
    stage_s.push_back(result.stage_s[i] ? job::Json(median_of(of_stage)) : job::Json());
  }
  last_ = {{"num_split", options_.num_split[*split_]},
           {"schedule", options_.schedule},
           {"batches", results.size()},
           {"batch_size", options_.batch_size},
           {"wall_s", base::seconds_since(split_begun_)},
           {"batch_s", batch_s},
           {"stage_s", std::move(stage_s)},
           {"activations", result.activations},
           {"samples_per_s", static_cast<double>(options_.batch_size) / batch_s},
           {"loss", result.loss}};
  if (result.accuracy) last_["accuracy"] = *result.accuracy;
  sink_.emit("split", last_);
  if (best_.is_null() || batch_s < best_["batch_s"]) {
    best_ = {{"num_split", last_["num_split"]}, {"batch_s", batch_s}};
  }
}

void PipelineRun::add_to(job::Json& fields) {
  end_split();
  fields["steps"] = steps_;
  fields["train_s"] = train_s_;
  if (last_.is_null()) return;
  for (const char* name : {"loss", "accuracy", "num_split", "batch_s", "samples_per_s"}) {
    if (last_.contains(name)) fields[name] = last_[name];
  }
  fields["best"] = best_;
}

}  // namespace distrain::scenario
