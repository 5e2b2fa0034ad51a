// distrain pipeline --local: the same model, micro-batches and updates in one process.

#include <optional>

#include "distrain/base/trace.h"
#include "distrain/data/named_tensors.h"
#include "distrain/job/local_trainers.h"
#include "distrain/models/resnet.h"
#include "distrain/optim/update_rule.h"
#include "distrain/rpc/device.h"
#include "distrain/scenario/pipeline.h"
#include "loss.h"
#include "run.h"

namespace distrain::scenario {

namespace {

class LocalModel final : public PipelineModel {
 public:
  LocalModel(const PipelineOptions& options, int64_t num_split, c10::Device device)
      : options_(options),
        num_split_(num_split),
        module_(options.model, options.classes, models::whole_resnet(options.model), options.seed,
                device),
        rule_(optim::make_update_rule(optim::Sgd{.lr = options.lr})) {}

  BatchResult train(const PipelineBatch& batch, int64_t index) override {
    const base::TimePoint begun = base::Clock::now();
    std::vector<at::Tensor> scores;
    for (const PipelineBatch& part : micro_batches(batch, num_split_)) {
      const at::Tensor out = base::traced("forward", [&] { return module_.forward(part.images); });
      scores.push_back(out.detach());
      const at::Tensor loss = loss_share(options_, out, part.labels);
      base::traced("backward", [&] { loss.backward(); });
    }
    const double compute_s = base::seconds_since(begun);
    BatchResult result = judge(options_, scores, batch, index);
    update();
    const c10::Device device = module_.parameters().front().device();
    rpc::StreamPoint::mark(device).wait_on_host();
    result.batch_s = base::seconds_since(begun);
    // A device has only been told by then what to compute.
    result.stage_s = {rpc::is_accelerator(device) ? std::nullopt : std::optional(compute_s)};
    result.activations = {1};
    return result;
  }

  data::NamedTensors state() override {
    data::NamedTensors all = module_.named_parameters();
    all.merge(module_.named_buffers());
    return data::on_host(all);
  }
  void load(const data::NamedTensors& state) override { module_.load(state); }

 private:
  void update() {
    const base::TraceScope scope("update");
    std::vector<at::Tensor> parameters = module_.parameters();
    const std::vector<at::Tensor> gradients = job::take_gradients(parameters);
    if (options_.on_gradients) {
      data::NamedTensors named;
      for (size_t i = 0; i < gradients.size(); ++i) {
        named[module_.parameter_names()[i]] = gradients[i];
      }
      options_.on_gradients(data::on_host(named));
    }
    for (size_t i = 0; i < gradients.size(); ++i) rule_->apply(i, parameters[i], gradients[i]);
  }

  const PipelineOptions& options_;
  const int64_t num_split_;
  models::ResNetStage module_;
  std::unique_ptr<optim::UpdateRule> rule_;
};

}  // namespace

job::Outcome run_pipeline_local(const PipelineOptions& options, const job::Job& job,
                                job::EventSink& sink) {
  if (!options.checkpoint.dir.empty()) job.stop->arm();
  PipelineRun run(options, job, sink);
  run.run([&](int64_t num_split) {
    return std::make_unique<LocalModel>(options, num_split, job.device());
  });
  job::Outcome outcome;
  run.add_to(outcome);
  return job::without_rpc(std::move(outcome));
}

}  // namespace distrain::scenario
