// distrain pipeline: a ResNet cut into stages, one on each worker, micro-batches flowing through.
//
// After PyTorch's tutorial "Distributed Pipeline Parallelism Using RPC".

#include "pipeline.h"

#include <algorithm>
#include <memory>
#include <optional>

#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "distrain/base/clock.h"
#include "distrain/job/training.h"
#include "distrain/models/resnet.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/placed.h"
#include "run.h"
#include "schedule.h"
#include "stages.h"

namespace distrain::scenario {

namespace {

/// What the passes of a batch work on, for as long as any of them goes on: one may have failed
/// before the others are through.
struct Passes {
  PipelineOptions options;
  std::vector<PipelineBatch> inputs;
  std::vector<std::unique_ptr<autograd::Context>> contexts;
  std::vector<at::Tensor> scores;
};

/// The loss of micro-batch `m`, and its backward pass.
base::Future<void> backward(rpc::Agent& agent, const std::shared_ptr<Passes>& passes, size_t m,
                            const at::Tensor& scores) {
  const at::Tensor here = rpc::placed(scores, agent.device());
  passes->scores[m] = here.detach();
  const at::Tensor loss = loss_share(passes->options, here, passes->inputs[m].labels);
  return autograd::backward_async(*passes->contexts[m], {loss}, {.timeout = kAsLongAsItTakes})
      .then(agent.inline_executor(), [passes] {});
}

/// The model on its workers, and its optimizer.
class Pipeline final : public PipelineModel {
 public:
  Pipeline(rpc::Agent& agent, const PipelineOptions& options)
      : agent_(agent),
        options_(options),
        cut_(models::cut_resnet(options.model, options.stages, options.split, options.classes,
                                options.image_size)),
        stages_(agent) {}

  void begin(int64_t num_split) override {
    schedule_ = make_schedule(options_.schedule, options_.stages, num_split);
    simulate(schedule_);  // refuses what would not run
    optimizer_.reset();   // not two models at a time
    stages_.clear();
    for (size_t i = 0; i < cut_.size(); ++i) {
      stages_.add(options_.model, options_.classes, options_.image_size, cut_[i].first,
                  cut_[i].last, options_.seed, agent_.device_of(Stages::rank_of(i)));
    }
    optimizer_.emplace(agent_, stages_.row_of_all<&PipelineStage::parameter_rrefs>(),
                       std::vector<at::Tensor>(), options_.rule());
  }

  std::vector<std::string> parameter_names() {
    return stages_.row_of_all<&PipelineStage::parameter_names>();
  }
  /// Of the model that was begun last, whichever that is by then.
  optim::DistributedOptimizer& optimizer() { return *optimizer_; }
  void set_lr_factor(double factor) override { optimizer_->set_lr_factor(factor); }

  /// One update by the gradients of all micro-batches.
  BatchResult train(const PipelineBatch& batch, int64_t index) override {
    const base::TimePoint begun = base::Clock::now();
    const autograd::Context whole(agent_);  // gathers the gradients
    std::vector<base::Future<void>> begin;
    for (size_t i = 0; i < stages_.size(); ++i) {
      begin.push_back(
          stages_.call<&PipelineStage::begin_batch>(i, schedule_.stages[i], batch.images.size(0)));
    }
    base::wait_all(begin);
    BatchResult result = judge(
        options_, run_micro_batches(micro_batches(batch, schedule_.micro_batches)), batch, index);
    if (options_.on_gradients) options_.on_gradients(merged<&PipelineStage::gradients>());
    optimizer_->step(whole);
    const std::vector<StageReport> reports = stages_.call_all<&PipelineStage::end_batch>();
    result.batch_s = base::seconds_since(begun);
    for (const StageReport& report : reports) {
      result.stage_s.push_back(report.compute_s);
      result.activations.push_back(report.activations);
    }
    return result;
  }

  at::Tensor scores(const at::Tensor& images) override {
    const int64_t parts = std::min(images.size(0), int64_t{schedule_.micro_batches});
    std::vector<base::Future<at::Tensor>> scores;
    for (const at::Tensor& part : images.tensor_split(parts)) {
      scores.push_back(stages_.chain<&PipelineStage::infer>(part));
    }
    base::wait_all(scores);
    std::vector<at::Tensor> values;
    for (const auto& part : scores) values.push_back(rpc::placed(part.wait(), agent_.device()));
    return at::cat(values);
  }

  data::NamedTensors state() override { return merged<&PipelineStage::state>(); }
  void load(const data::NamedTensors& state) override {
    std::vector<base::Future<void>> loads;
    for (size_t i = 0; i < stages_.size(); ++i) {
      loads.push_back(stages_.call<&PipelineStage::load>(
          i, models::weights_of(options_.model, cut_[i], state)));
    }
    base::wait_all(loads);
  }

 private:
  /// All of them at once: the stages see to it that each step has its turn. Gives back the scores.
  std::vector<at::Tensor> run_micro_batches(std::vector<PipelineBatch> inputs) {
    const auto passes = std::make_shared<Passes>();
    passes->options = options_;
    passes->inputs = std::move(inputs);
    passes->contexts.resize(passes->inputs.size());
    passes->scores.resize(passes->inputs.size());
    std::vector<base::Future<void>> done;
    for (size_t m = 0; m < passes->inputs.size(); ++m) {
      passes->contexts[m] =
          std::make_unique<autograd::Context>(agent_, autograd::Context::Scope::kExplicit);
      const rpc::ContextScope scope(agent_, passes->contexts[m]->id());
      done.push_back(
          stages_.chain<&PipelineStage::forward>(passes->inputs[m].images, static_cast<int64_t>(m))
              .then(agent_.executor(), [passes, m, &agent = agent_](at::Tensor& scores) {
                return backward(agent, passes, m, scores);
              }));
    }
    base::wait_all(done);
    return passes->scores;
  }

  /// What F gives of all stages together.
  template <auto F>
  data::NamedTensors merged() {
    data::NamedTensors all;
    for (auto& of_stage : stages_.call_all<F>()) all.merge(of_stage);
    return all;
  }

  rpc::Agent& agent_;
  const PipelineOptions& options_;
  const std::vector<models::BlockRange> cut_;
  PipelineSchedule schedule_;
  Stages stages_;
  std::optional<optim::DistributedOptimizer> optimizer_;
};

}  // namespace

void train_pipeline(job::Rank& rank, const PipelineOptions& options) {
  Pipeline pipeline(rank.agent(), options);
  PipelineRun run(options, rank.agent().local<PipelineInputs>(), pipeline, rank.sink());
  job::Training training(rank, run.plan());
  run.keep_in(training);
  training.keep(pipeline.optimizer(), pipeline.parameter_names());
  training.run([&](const job::Step& step) { return run.step(step); });
  run.add_to(rank.fields());
}

}  // namespace distrain::scenario
