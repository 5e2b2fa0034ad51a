// distrain pipeline: a ResNet cut into stages, one on each worker, micro-batches flowing through.
//
// After PyTorch's tutorial "Distributed Pipeline Parallelism Using RPC".

#include "distrain/scenario/pipeline.h"

#include <optional>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "pipeline_data.h"
#include "pipeline_loss.h"
#include "pipeline_schedule.h"
#include "pipeline_stage.h"
#include "resnet.h"
#include "session.h"
#include "split_log.h"

namespace distrain::scenario {

namespace {

constexpr int kMaster = 0;
constexpr auto kAsLongAsItTakes = std::chrono::nanoseconds::max();  // or until its peer dies

rpc::To stage_rank(size_t stage) {
  return rpc::To(static_cast<int>(stage) + 1).timeout(kAsLongAsItTakes);
}

/// F of all stages at once; gives back their results, in order.
template <auto F, class... Args>
auto call_all(rpc::Agent& agent, const std::vector<rpc::RRef<PipelineStage>>& stages,
              const Args&... args) {
  std::vector<decltype(agent.rpc_async<F>(stage_rank(0), stages[0], args...))> calls;
  for (size_t i = 0; i < stages.size(); ++i) {
    calls.push_back(agent.rpc_async<F>(stage_rank(i), stages[i], args...));
  }
  base::wait_all(calls);
  using Value = decltype(calls[0].wait());
  if constexpr (!std::is_void_v<Value>) {
    std::vector<Value> results;
    for (const auto& call : calls) results.push_back(call.wait());
    return results;
  }
}

/// What the passes of a batch work on, for as long as any of them goes on: one may have failed
/// before the others are through.
struct Passes {
  Passes(const PipelineOptions& of_job, std::vector<PipelineBatch> micro_batches)
      : options(of_job),
        inputs(std::move(micro_batches)),
        contexts(inputs.size()),
        scores(inputs.size()) {}

  base::Future<void> backward(size_t m, const at::Tensor& output) {
    scores[m] = output.detach();
    const at::Tensor loss = loss_share(options, output, inputs[m].labels);
    return autograd::backward_async(*contexts[m], {loss}, {.timeout = kAsLongAsItTakes});
  }

  const PipelineOptions options;
  const std::vector<PipelineBatch> inputs;
  std::vector<std::unique_ptr<autograd::Context>> contexts;
  std::vector<at::Tensor> scores;
};

/// The model on its workers, and its optimizer.
class Pipeline {
 public:
  Pipeline(rpc::Agent& agent, const PipelineOptions& options, const NamedTensors& weights)
      : agent_(agent), options_(options) {
    const auto cut = cut_resnet(options.model, options.stages, options.split, options.classes,
                                options.image_size);
    for (size_t i = 0; i < cut.size(); ++i) {
      stages_.push_back(agent.remote_new<PipelineStage>(
          stage_rank(i), options.model, options.classes, cut[i].first, cut[i].last, options.seed));
    }
    if (!weights.empty()) call_all<&PipelineStage::load>(agent_, stages_, weights);
    std::vector<rpc::RRef<at::Tensor>> parameters;
    for (const auto& of_stage : call_all<&PipelineStage::parameter_rrefs>(agent_, stages_)) {
      parameters.insert(parameters.end(), of_stage.begin(), of_stage.end());
    }
    optimizer_.emplace(agent, parameters, optim::Sgd{.lr = options.lr});
  }

  /// One update by the gradients of all micro-batches.
  BatchResult train(const PipelineBatch& batch, int64_t index, const PipelineSchedule& schedule) {
    const base::TimePoint begun = base::Clock::now();
    const autograd::Context whole(agent_);  // gathers the gradients
    std::vector<base::Future<void>> begin;
    for (size_t i = 0; i < stages_.size(); ++i) {
      begin.push_back(agent_.rpc_async<&PipelineStage::begin_batch>(
          stage_rank(i), stages_[i], schedule.stages[i], batch.images.size(0)));
    }
    base::wait_all(begin);
    BatchResult result = judge(
        options_, run_micro_batches(micro_batches(batch, schedule.micro_batches)), batch, index);
    if (options_.on_gradients) options_.on_gradients(gradients());
    optimizer_->step(whole);
    result.batch_s = base::seconds_since(begun);
    for (const StageReport& report : call_all<&PipelineStage::end_batch>(agent_, stages_)) {
      result.stage_s.push_back(report.compute_s);
      result.activations.push_back(report.activations);
    }
    return result;
  }

 private:
  /// All of them at once: the stages see to it that each step has its turn. Gives back the scores.
  std::vector<at::Tensor> run_micro_batches(std::vector<PipelineBatch> inputs) {
    const auto passes = std::make_shared<Passes>(options_, std::move(inputs));
    std::vector<base::Future<void>> done;
    for (size_t m = 0; m < passes->inputs.size(); ++m) {
      passes->contexts[m] =
          std::make_unique<autograd::Context>(agent_, autograd::Context::Scope::kExplicit);
      const rpc::ContextScope scope(passes->contexts[m]->id());
      rpc::RRef<at::Tensor> activations = agent_.make_rref(passes->inputs[m].images);
      for (size_t i = 0; i < stages_.size(); ++i) {
        activations = agent_.remote<&PipelineStage::forward>(stage_rank(i), stages_[i], activations,
                                                             static_cast<int64_t>(m));
      }
      done.push_back(activations.to_here_async(kAsLongAsItTakes)
                         .then(agent_.executor(), [passes, m](at::Tensor& scores) {
                           return passes->backward(m, scores);
                         }));
    }
    base::wait_all(done);
    return passes->scores;
  }

  /// Of the batch's context, which is the current one.
  NamedTensors gradients() {
    NamedTensors all;
    for (auto& of_stage : call_all<&PipelineStage::gradients>(agent_, stages_)) all.merge(of_stage);
    return all;
  }

  rpc::Agent& agent_;
  const PipelineOptions& options_;
  std::vector<rpc::RRef<PipelineStage>> stages_;
  std::optional<optim::DistributedOptimizer> optimizer_;
};

/// Each number of micro-batches in turn, with a fresh model of the same seed.
Outcome run_master(rpc::Agent& agent, const PipelineOptions& options, EventSink& sink) {
  const PipelineData data(options);
  const NamedTensors weights = initial_weights(options);
  SplitLog log(options, sink);
  for (const int64_t num_split : options.num_split) {
    const PipelineSchedule schedule = make_schedule(options.schedule, options.stages, num_split);
    simulate(schedule);  // refuses what would not run
    log.begin_split(num_split);
    Pipeline pipeline(agent, options, weights);
    for (int64_t i = 0; i < options.batches; ++i) {
      log.batch(pipeline.train(data.batch(i), i, schedule));
    }
    log.end_split();
  }
  Outcome outcome;
  log.add_to(outcome);
  return outcome;
}

}  // namespace

int pipeline_world_size(const PipelineOptions& options) { return options.stages + 1; }

std::string pipeline_role(int rank) {
  return rank == kMaster ? "master" : "worker" + std::to_string(rank);
}

Outcome run_pipeline(const PipelineOptions& own, const Job& job,
                     const std::function<PipelineOptions(const OptionMap&)>& adopt,
                     EventSink& sink) {
  std::vector<std::string> names;
  for (int rank = 0; rank < pipeline_world_size(own); ++rank) names.push_back(pipeline_role(rank));
  Session session(job, std::move(names), sink);
  rpc::Agent& agent = session.agent();
  PipelineStage::expose(agent);
  agent.provide(std::make_shared<StageSettings>(StageSettings{job.inject.stage_sleep_s}));

  Outcome outcome;
  const auto prepare = [&] {
    if (job.rank != kMaster) adopt(agent.job_options());  // refuses what does not fit
  };
  const auto work = [&] {
    if (job.rank == kMaster) outcome = run_master(agent, own, sink);
  };
  session.run(prepare, work, outcome);
  return outcome;
}

}  // namespace distrain::scenario
