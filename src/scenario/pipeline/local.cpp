// distrain pipeline in one process without RPC (--local, with the same updates), and predict.

#include <optional>

#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/trace.h"
#include "distrain/job/training.h"
#include "distrain/rpc/device.h"
#include "distrain/store/named_tensors.h"
#include "resnet.h"
#include "run.h"

namespace distrain::scenario {

namespace {

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

  /// The reference stays valid after begin(), and then refers to the optimizer of the new model.
  job::SingleProcessOptimizer& optimizer() { return *optimizer_; }
  void set_lr_factor(double factor) override { optimizer_->set_lr_factor(factor); }

  BatchResult train(const data::ImageBatch& batch, int64_t index) override {
    const base::TimePoint begun = base::Clock::now();
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
    if (options_.on_gradients) {
      rpc::NamedTensors gradients;
      for (const auto& [name, tensor] : module_->parameters()) gradients[name] = tensor.grad();
      options_.on_gradients(store::on_host(gradients));
    }
    base::traced("update", [&] {
      optimizer_->gather();
      optimizer_->step();
    });
    rpc::StreamPoint::mark(device_).wait_on_host();
    result.batch_s = base::seconds_since(begun);
    // A device computes asynchronously, so the host time says nothing about it.
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

void train_pipeline_local(job::SingleProcess& local, const PipelineOptions& options) {
  const PipelineData data(options);
  LocalModel model(options, local.device());
  PipelineRun run(options, data, model, local.sink());
  job::SingleProcessTraining training(local, run.plan(), 1);
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
