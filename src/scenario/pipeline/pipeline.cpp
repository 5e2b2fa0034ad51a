// distrain pipeline: a ResNet cut into stages, one per worker, through which micro-batches flow.

#include "pipeline.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/rpc/to_device.h"
#include "run.h"
#include "stage.h"

namespace distrain::scenario {

namespace {

/// Returns the blocks of each stage.
std::vector<BlockRange> cut(const PipelineOptions& options) {
  return cut_resnet(options.model, options.stages, options.split, options.classes,
                    options.image_size);
}

job::Json explain(const PipelineOptions& options, const nn::PipelineSchedule& schedule) {
  const nn::PipelineTimeline timeline = nn::simulate(schedule);
  const std::vector<std::string> blocks = resnet_blocks(options.model);
  const std::vector<BlockRange> ranges = cut(options);
  job::Json rows = job::Json::array();
  for (size_t stage = 0; stage < ranges.size(); ++stage) {
    job::Json steps = job::Json::array();
    for (const nn::PipelineStep& step : schedule.stages[stage]) {
      const bool forward = step.kind == nn::PipelineStep::Kind::kForward;
      steps.push_back({{"op", forward ? "forward" : "backward"},
                       {"micro_batch", step.micro_batch},
                       {"begin", timeline.begin[stage][steps.size()]}});
    }
    const auto own =
        std::span(blocks).subspan(ranges[stage].first, ranges[stage].last - ranges[stage].first);
    rows.push_back({{"stage", stage + 1},
                    {"activations", timeline.activations[stage]},
                    {"steps", std::move(steps)},
                    {"blocks", std::vector(own.begin(), own.end())}});
  }
  return {{"schedule", schedule.name},           {"stages", schedule.stages.size()},
          {"num_split", schedule.micro_batches}, {"length", timeline.length},
          {"bubble", timeline.bubble},           {"table", std::move(rows)}};
}

/// The model on its workers, and its optimizer.
class Pipeline final : public PipelineModel {
 public:
  Pipeline(rpc::Agent& agent, const PipelineOptions& options)
      : agent_(agent), options_(options), cut_(cut(options)), stages_(agent) {}

  void begin(int64_t num_split) override {
    schedule_ = nn::make_schedule(options_.schedule, options_.stages, num_split);
    nn::simulate(schedule_);  // throws if the schedule cannot run
    optimizer_.reset();       // before the next model, to save memory
    stages_.clear();
    for (size_t i = 0; i < cut_.size(); ++i) {
      const int rank = static_cast<int>(i) + 1;
      stages_.add(rank, options_.model, options_.classes, options_.image_size, cut_[i].first,
                  cut_[i].last, options_.seed, agent_.device_of(rank));
    }
    std::vector<rpc::RRef<at::Tensor>> parameters;
    for (const auto& its : stages_.call_all<&PipelineStage::parameter_rrefs>()) {
      parameters.insert(parameters.end(), its.begin(), its.end());
    }
    optimizer_.emplace(agent_, parameters, std::vector<at::Tensor>(), options_.rule());
  }

  /// Returns the names of the parameters of all stages, in the order of the optimizer.
  std::vector<std::string> parameter_names() const {
    const ResNetStage whole(options_.model, 1, whole_resnet(options_.model), 0, c10::kMeta);
    std::vector<std::string> names;
    for (const auto& [name, parameter] : whole.parameters()) names.push_back(name);
    return names;
  }
  /// Returns the optimizer. After begin(), the same reference refers to the new model's optimizer.
  optim::DistributedOptimizer& optimizer() { return *optimizer_; }

  /// Makes one update by the gradients of all micro-batches.
  BatchResult train(const data::ImageBatch& batch, int64_t index, double lr_factor) override {
    const base::TimePoint begun = base::Clock::now();
    optimizer_->set_lr_factor(lr_factor);
    const autograd::Context whole(agent_);  // collects the gradients of all micro-batches
    const auto loss =
        [options = options_, labels = batch.labels.tensor_split(schedule_.micro_batches)](
            size_t m, const at::Tensor& scores) { return loss_share(options, scores, labels[m]); };
    BatchResult result =
        judge(options_,
              stages_.train(schedule_, batch.images.tensor_split(schedule_.micro_batches), loss),
              batch, index);
    optimizer_->step(whole);
    const std::vector<nn::StageReport> reports = stages_.call_all<&PipelineStage::end_batch>();
    result.batch_s = base::seconds_since(begun);
    for (const nn::StageReport& report : reports) {
      result.stage_s.push_back(report.compute_s);
      result.activations.push_back(report.activations);
    }
    return result;
  }

  at::Tensor scores(const at::Tensor& images) override {
    const int64_t parts = std::min(images.size(0), schedule_.micro_batches);
    std::vector<base::Future<at::Tensor>> scores;
    for (const at::Tensor& part : images.tensor_split(parts)) {
      scores.push_back(stages_.chain<&PipelineStage::infer>(part));
    }
    base::wait_all(scores);
    std::vector<at::Tensor> values;
    for (const auto& part : scores) values.push_back(rpc::to_device(part.wait(), agent_.device()));
    return at::cat(values);
  }

  job::Held state() override {
    job::Held held(stages_.call_all<&PipelineStage::hold_state>());
    held.trained = parameter_names();
    return held;
  }
  void load(const rpc::NamedTensors& state) override {
    std::vector<base::Future<void>> loads;
    for (size_t i = 0; i < stages_.size(); ++i) {
      loads.push_back(
          stages_.call<&PipelineStage::load>(i, weights_of(options_.model, cut_[i], state)));
    }
    base::wait_all(loads);
  }

 private:
  rpc::Agent& agent_;
  const PipelineOptions& options_;
  const std::vector<BlockRange> cut_;
  nn::PipelineSchedule schedule_;
  nn::Pipeline<PipelineStage> stages_;
  std::optional<optim::DistributedOptimizer> optimizer_;
};

class LocalModel final : public PipelineModel {
 public:
  LocalModel(const PipelineOptions& options, c10::Device device)
      : options_(options), device_(device) {}

  void begin(int64_t num_split) override {
    num_split_ = num_split;
    optimizer_.reset();
    module_.emplace(options_.model, options_.classes, whole_resnet(options_.model), options_.seed,
                    device_);
    optimizer_.emplace(options_.rule(), "async", module_->parameters());
  }

  /// Returns the optimizer. After begin(), the same reference refers to the new model's optimizer.
  job::SingleProcessOptimizer& optimizer() { return *optimizer_; }

  BatchResult train(const data::ImageBatch& batch, int64_t index, double lr_factor) override {
    const base::TimePoint begun = base::Clock::now();
    optimizer_->set_lr_factor(lr_factor);
    const std::vector<at::Tensor> images = batch.images.tensor_split(num_split_);
    const std::vector<at::Tensor> labels = batch.labels.tensor_split(num_split_);
    std::vector<at::Tensor> scores;
    for (size_t m = 0; m < images.size(); ++m) {
      const at::Tensor out = base::traced("forward", [&] { return module_->forward(images[m]); });
      scores.push_back(out.detach());
      const at::Tensor loss = loss_share(options_, out, labels[m]);
      base::traced("backward", [&] { loss.backward(); });
    }
    const double compute_s = base::seconds_since(begun);
    BatchResult result = judge(options_, scores, batch, index);
    base::traced("update", [&] {
      optimizer_->gather();
      optimizer_->step();
    });
    rpc::StreamPoint::mark(device_).wait_on_host();
    result.batch_s = base::seconds_since(begun);
    // Do not report the host's time for a device, because the device computes asynchronously.
    result.stage_s = {rpc::is_accelerator(device_) ? std::nullopt : std::optional(compute_s)};
    result.activations = {1};
    return result;
  }

  at::Tensor scores(const at::Tensor& images) override {
    const at::NoGradGuard no_grad;
    return module_->forward(images, false);
  }

  job::Held state() override { return store::copies_on_host(module_->state()); }
  void load(const rpc::NamedTensors& state) override { module_->load(state); }

 private:
  const PipelineOptions& options_;
  const c10::Device device_;
  int64_t num_split_ = 1;
  std::optional<ResNetStage> module_;
  std::optional<job::SingleProcessOptimizer> optimizer_;
};

}  // namespace

void check_pipeline(const PipelineOptions& options) {
  cut(options);
  const bool saves = !options.checkpoint.dir.empty() || !options.checkpoint.resume.empty();
  const bool evaluates = !options.valid_data.empty() || !options.test_data.empty();
  if ((saves || evaluates) && options.num_split.size() > 1) {
    base::invalid(std::string(saves                         ? "--checkpoint and --resume need"
                              : !options.valid_data.empty() ? "--valid-data needs"
                                                            : "--test-data needs") +
                  " a single number in --micro-batches: each number trains a separate model");
  }
  for (const int64_t num_split : options.num_split) {
    if (num_split > options.batch_size) {
      base::invalid("--micro-batches " + std::to_string(num_split) + ": a batch has only " +
                    std::to_string(options.batch_size) +
                    " images: give fewer, or a larger --batch-size");
    }
    check_resnet_input(options.image_size, options.batch_size / num_split);
    nn::simulate(nn::make_schedule(options.schedule, options.stages, num_split));
  }
  job::Plan::of_steps(options, options.batches);
}

std::string explain_pipeline(const PipelineOptions& options, bool for_people) {
  check_pipeline(options);
  std::string text;
  for (const int64_t num_split : options.num_split) {
    const auto schedule = nn::make_schedule(options.schedule, options.stages, num_split);
    text += for_people ? nn::to_text(schedule) : explain(options, schedule).dump() + '\n';
  }
  return text;
}

void train_pipeline(job::Rank& rank, const PipelineOptions& options) {
  Pipeline pipeline(rank.agent(), options);
  PipelineRun run(options, rank.agent().local<PipelineData>(), pipeline, rank.sink());
  job::Training training(rank, run.plan());
  run.keep_in(training);
  training.keep(pipeline.optimizer(), pipeline.parameter_names());
  training.run([&](const job::Step& step) { return run.step(step); });
  run.add_to(rank.fields());
}

void train_pipeline_local(job::SingleProcess& local, const PipelineOptions& options) {
  const PipelineData data(options);
  LocalModel model(options, local.device());
  PipelineRun run(options, data, model, local.sink());
  job::SingleProcessTraining training(local, run.plan());
  run.keep_in(training);
  training.keep(model.optimizer());
  training.run([&](const std::vector<job::Step>& steps) { return run.step(steps[0]); });
  run.add_to(local.fields());
}

void predict_pipeline(job::Predictions& predictions, const PipelineOptions& options) {
  const PipelineData images(options, predictions.snapshot(), predictions.input());
  const ResNetStage model(options.model, options.classes, whole_resnet(options.model), options.seed,
                          predictions.device());
  predictions.load(model.state());
  images.each_batch(images.test(), {}, [&](const data::ImageBatch& batch) {
    predictions.tell_labels(model.forward(batch.images, false), batch.labels);
  });
}

}  // namespace distrain::scenario
