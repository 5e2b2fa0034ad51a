// distrain pipeline: a ResNet cut into stages, one on each worker, micro-batches flowing through.
//
// After PyTorch's tutorial "Distributed Pipeline Parallelism Using RPC".

#include "pipeline.h"

#include <memory>
#include <optional>

#include "distrain/autograd/context.h"
#include "distrain/base/clock.h"
#include "distrain/job/training.h"
#include "distrain/models/resnet.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/placed.h"
#include "loss.h"
#include "run.h"
#include "schedule.h"
#include "stage.h"

namespace distrain::scenario {

namespace {

constexpr auto kAsLongAsItTakes = std::chrono::nanoseconds::max();  // or until its peer dies

int rank_of(size_t stage) { return static_cast<int>(stage) + 1; }
rpc::To to_stage(size_t stage) { return rpc::To(rank_of(stage)).timeout(kAsLongAsItTakes); }

/// F of all stages at once; gives back their results, in order.
template <auto F, class... Args>
auto call_all(rpc::Agent& agent, const std::vector<rpc::RRef<PipelineStage>>& stages,
              const Args&... args) {
  std::vector<decltype(agent.rpc_async<F>(to_stage(0), stages[0], args...))> calls;
  for (size_t i = 0; i < stages.size(); ++i) {
    calls.push_back(agent.rpc_async<F>(to_stage(i), stages[i], args...));
  }
  base::wait_all(calls);
  using Value = decltype(calls[0].wait());
  if constexpr (!std::is_void_v<Value>) {
    std::vector<Value> results;
    for (const auto& call : calls) results.push_back(call.wait());
    return results;
  }
}

/// What F gives of each stage, in one row.
template <auto F>
auto row_of_all(rpc::Agent& agent, const std::vector<rpc::RRef<PipelineStage>>& stages) {
  auto parts = call_all<F>(agent, stages);
  for (size_t i = 1; i < parts.size(); ++i) {
    parts[0].insert(parts[0].end(), parts[i].begin(), parts[i].end());
  }
  return std::move(parts[0]);
}

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
                                options.image_size)) {}

  void begin(int64_t num_split) override {
    schedule_ = make_schedule(options_.schedule, options_.stages, num_split);
    simulate(schedule_);  // refuses what would not run
    optimizer_.reset();   // not two models at a time
    stages_.clear();
    for (size_t i = 0; i < cut_.size(); ++i) {
      stages_.push_back(agent_.remote_new<PipelineStage>(
          to_stage(i), options_.model, options_.classes, options_.image_size, cut_[i].first,
          cut_[i].last, options_.seed, agent_.device_of(rank_of(i))));
    }
    optimizer_.emplace(agent_, row_of_all<&PipelineStage::parameter_rrefs>(agent_, stages_),
                       std::vector<at::Tensor>(), options_.rule());
  }

  std::vector<std::string> parameter_names() {
    return row_of_all<&PipelineStage::parameter_names>(agent_, stages_);
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
      begin.push_back(agent_.rpc_async<&PipelineStage::begin_batch>(
          to_stage(i), stages_[i], schedule_.stages[i], batch.images.size(0)));
    }
    base::wait_all(begin);
    BatchResult result = judge(
        options_, run_micro_batches(micro_batches(batch, schedule_.micro_batches)), batch, index);
    if (options_.on_gradients) options_.on_gradients(gradients());
    optimizer_->step(whole);
    const std::vector<StageReport> reports = call_all<&PipelineStage::end_batch>(agent_, stages_);
    result.batch_s = base::seconds_since(begun);
    for (const StageReport& report : reports) {
      result.stage_s.push_back(report.compute_s);
      result.activations.push_back(report.activations);
    }
    return result;
  }

  data::NamedTensors state() override {
    data::NamedTensors all;
    for (auto& of_stage : call_all<&PipelineStage::state>(agent_, stages_)) all.merge(of_stage);
    return all;
  }
  void load(const data::NamedTensors& state) override {
    std::vector<base::Future<void>> loads;
    for (size_t i = 0; i < stages_.size(); ++i) {
      loads.push_back(agent_.rpc_async<&PipelineStage::load>(
          to_stage(i), stages_[i], models::weights_of(options_.model, cut_[i], state)));
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
      rpc::RRef<at::Tensor> activations = agent_.make_rref(passes->inputs[m].images);
      for (size_t i = 0; i < stages_.size(); ++i) {
        activations = agent_.remote<&PipelineStage::forward>(to_stage(i), stages_[i], activations,
                                                             static_cast<int64_t>(m));
      }
      done.push_back(activations.to_here_async(kAsLongAsItTakes)
                         .then(agent_.executor(), [passes, m, &agent = agent_](at::Tensor& scores) {
                           return backward(agent, passes, m, scores);
                         }));
    }
    base::wait_all(done);
    return passes->scores;
  }

  /// Of the batch's context, which is the current one.
  data::NamedTensors gradients() {
    data::NamedTensors all;
    for (auto& of_stage : call_all<&PipelineStage::gradients>(agent_, stages_)) all.merge(of_stage);
    return all;
  }

  rpc::Agent& agent_;
  const PipelineOptions& options_;
  const std::vector<models::BlockRange> cut_;
  PipelineSchedule schedule_;
  std::vector<rpc::RRef<PipelineStage>> stages_;
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
