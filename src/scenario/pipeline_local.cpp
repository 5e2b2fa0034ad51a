// distrain pipeline --local: the same model, micro-batches and updates in one process.

#include "distrain/optim/update_rule.h"
#include "distrain/scenario/pipeline.h"
#include "local_trainers.h"
#include "pipeline_data.h"
#include "pipeline_loss.h"
#include "resnet.h"
#include "split_log.h"

namespace distrain::scenario {

namespace {

class LocalModel {
 public:
  LocalModel(const PipelineOptions& options, const NamedTensors& weights)
      : options_(options),
        module_(options.model, options.classes, whole_resnet(options.model), options.seed),
        rule_(optim::make_update_rule(optim::Sgd{.lr = options.lr})) {
    if (!weights.empty()) module_.load(weights);
  }

  BatchResult train(const PipelineBatch& batch, int64_t index, int64_t num_split) {
    const base::TimePoint begun = base::Clock::now();
    std::vector<at::Tensor> scores;
    for (const PipelineBatch& part : micro_batches(batch, num_split)) {
      const at::Tensor out = module_.forward(part.images);
      scores.push_back(out.detach());
      loss_share(options_, out, part.labels).backward();
    }
    const double compute_s = base::seconds_since(begun);
    BatchResult result = judge(options_, scores, batch, index);
    update();
    result.batch_s = base::seconds_since(begun);
    result.stage_s = {compute_s};
    result.activations = {1};
    return result;
  }

 private:
  void update() {
    std::vector<at::Tensor> parameters = module_.parameters();
    const std::vector<at::Tensor> gradients = take_gradients(parameters);
    if (options_.on_gradients) {
      NamedTensors named;
      for (size_t i = 0; i < gradients.size(); ++i) {
        named[module_.parameter_names()[i]] = gradients[i];
      }
      options_.on_gradients(named);
    }
    for (size_t i = 0; i < gradients.size(); ++i) rule_->apply(i, parameters[i], gradients[i]);
  }

  const PipelineOptions& options_;
  ResNetStage module_;
  std::unique_ptr<optim::UpdateRule> rule_;
};

}  // namespace

Outcome run_pipeline_local(const PipelineOptions& options, const Job&, EventSink& sink) {
  const PipelineData data(options);
  const NamedTensors weights = initial_weights(options);
  SplitLog log(options, sink);
  for (const int64_t num_split : options.num_split) {
    log.begin_split(num_split);
    LocalModel model(options, weights);
    for (int64_t i = 0; i < options.batches; ++i) {
      log.batch(model.train(data.batch(i), i, num_split));
    }
    log.end_split();
  }
  Outcome outcome;
  log.add_to(outcome);
  return without_rpc(std::move(outcome));
}

}  // namespace distrain::scenario
