#include "run.h"

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/nn/sized_by.h"
#include "distrain/rpc/to_device.h"
#include "resnet.h"

namespace distrain::scenario {

at::Tensor loss_share(const PipelineOptions& options, const at::Tensor& scores,
                      const at::Tensor& wherever) {
  const base::TraceScope scope("loss");
  const at::Tensor labels = rpc::to_device(wherever, scores.device());
  const auto samples = static_cast<double>(options.batch_size);
  if (options.loss == "ce") {
    return at::cross_entropy_loss(scores, labels, {}, at::Reduction::Sum) / samples;
  }
  const at::Tensor wanted = at::one_hot(labels, options.classes).to(scores.scalar_type());
  return at::mse_loss(scores, wanted, at::Reduction::Sum) /
         (samples * static_cast<double>(options.classes));
}

BatchResult judge(const PipelineOptions& options, const std::vector<at::Tensor>& scores,
                  const data::ImageBatch& batch, int64_t index) {
  const at::NoGradGuard no_grad;
  const at::Tensor all = at::cat(scores);
  BatchResult result;
  result.loss = job::checked_loss(loss_share(options, all, batch.labels), 1, index + 1);
  if (!options.data.empty()) {
    const at::Tensor labels = rpc::to_device(batch.labels, all.device());
    result.accuracy = all.argmax(1).eq(labels).to(at::kDouble).mean().item<double>();
  }
  return result;
}

PipelineRun::PipelineRun(const PipelineOptions& options, const PipelineData& data,
                         PipelineModel& model, job::EventSink& sink)
    : options_(options),
      data_(data),
      model_(model),
      sink_(sink),
      lines_(sink, "step", options.log_interval),
      lr_schedule_(options.rule().schedule) {
  if (const size_t models = options.num_split.size(); models > 1) {
    sink.progress({{"note", fmt::format("trains {} models in turn, {} batches each: one for each "
                                        "number in --micro-batches",
                                        models, batches())}});
  }
  begin(options.num_split.front());
}

job::Plan PipelineRun::plan() const {
  job::Plan plan =
      job::Plan::of_steps(options_, batches() * static_cast<int64_t>(options_.num_split.size()),
                          options_.epochs > 0 ? "--epochs" : "--batches");
  plan.used["batches"] = batches();
  if (!options_.data.empty() && options_.num_split.size() == 1) {
    plan.steps_per_epoch = data_.batches_per_epoch();
    plan.epochs = (plan.steps + plan.steps_per_epoch - 1) / plan.steps_per_epoch;
  }
  return plan;
}

void PipelineRun::keep_in(job::TrainingPlan& training) {
  training.agree("data", std::to_string(data_.content_hash()));
  const job::Json images = data_.describe();
  training.agree("images", images.dump());
  training.agree("format", images["data"].get<std::string>());
  job::Part part;
  part.take = [this](int) { return model_.state(); };
  part.give = [this](int, const rpc::NamedTensors& saved) {
    check_weights(options_.model, options_.classes, saved);
    model_.load(saved);
  };
  training.keep("", std::move(part));
  const auto of = [this](const data::ImageSet& images) {
    return [this, &images](const job::Share& share) {
      job::Evaluation evaluation;
      data_.each_batch(images, share, [&](const data::ImageBatch& batch) {
        const at::Tensor scores = model_.scores(batch.images);
        const at::Tensor share_of_loss = loss_share(options_, scores, batch.labels);
        evaluation.add(scores, rpc::to_device(batch.labels, scores.device()),
                       share_of_loss.item<double>() * static_cast<double>(options_.batch_size));
      });
      return evaluation;
    };
  };
  training.evaluate_epochs(of(data_.valid()));
  training.evaluate_at_end(of(data_.test()));
}

job::Result PipelineRun::step(const job::Step& step) {
  const auto split = static_cast<size_t>(step.total / batches());
  const int64_t index = step.total % batches();
  if (split_ != split) {
    if (split_) {  // otherwise the constructor has begun the first model
      end_split();
      begin(options_.num_split[split]);
    }
    split_ = split;
    split_begun_ = base::Clock::now();
    if (steps_ == 0) begun_ = split_begun_;
  }
  const auto sized = [](const auto& make) {
    return nn::sized_by("--batch-size or --image-size, or more --micro-batches,", make);
  };
  const data::ImageBatch batch =
      base::traced("data", [&] { return sized([&] { return data_.batch(index); }); });
  const double factor = lr_schedule_.factor(index, 0);  // each model starts the schedule anew
  const BatchResult& result =
      results_.emplace_back(sized([&] { return model_.train(batch, index, factor); }));
  ++steps_;
  job::Json fields{{"epoch", options_.data.empty() ? 1 : 1 + index / data_.batches_per_epoch()},
                   {"step", index + 1},
                   {"num_split", options_.num_split[split]},
                   {"loss", result.loss},
                   {"lr", options_.lr * factor}};
  if (result.accuracy) fields["accuracy"] = *result.accuracy;
  fields["batch_s"] = result.batch_s;
  fields["samples_per_s"] = static_cast<double>(options_.batch_size) / result.batch_s;
  lines_.add(index + 1, [fields] { return fields; });
  return {.loss = at::scalar_tensor(result.loss, at::kDouble),
          .samples = options_.batch_size,
          .progress = {{"num_split", options_.num_split[split]}}};
}

void PipelineRun::end_split() {
  if (results_.empty()) return;
  lines_.end();
  train_s_ = base::seconds_since(begun_);
  const std::vector<BatchResult> results = std::exchange(results_, {});
  const auto median_of = [&](const auto& value) {
    std::vector<double> values;
    for (const BatchResult& result : results) values.push_back(value(result));
    // Omits the first batch, which includes one-time costs, unless it is the only one.
    if (values.size() > 1) values.erase(values.begin());
    return at::tensor(values).quantile(0.5).item<double>();
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
