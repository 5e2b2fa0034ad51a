// distrain pipeline: a ResNet cut into stages, one on each worker, micro-batches flowing through.
//
// After PyTorch's tutorial "Distributed Pipeline Parallelism Using RPC".

#include "distrain/scenario/pipeline.h"

#include <optional>

#include "distrain/autograd/context.h"
#include "distrain/job/session.h"
#include "distrain/models/resnet.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/placed.h"
#include "loss.h"
#include "run.h"
#include "schedule.h"
#include "stage.h"

namespace distrain::scenario {

namespace {

constexpr int kMaster = 0;
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
  Pipeline(rpc::Agent& agent, const PipelineOptions& options, PipelineSchedule schedule)
      : agent_(agent),
        options_(options),
        schedule_(std::move(schedule)),
        cut_(models::cut_resnet(options.model, options.stages, options.split, options.classes,
                                options.image_size)) {
    simulate(schedule_);  // refuses what would not run
    for (size_t i = 0; i < cut_.size(); ++i) {
      stages_.push_back(agent.remote_new<PipelineStage>(
          to_stage(i), options.model, options.classes, options.image_size, cut_[i].first,
          cut_[i].last, options.seed, agent.device_of(rank_of(i))));
    }
    std::vector<rpc::RRef<at::Tensor>> parameters;
    for (const auto& of_stage : call_all<&PipelineStage::parameter_rrefs>(agent_, stages_)) {
      parameters.insert(parameters.end(), of_stage.begin(), of_stage.end());
    }
    optimizer_.emplace(agent, parameters, optim::Sgd{.lr = options.lr});
  }

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
      result.stop_requested = result.stop_requested || report.stop_requested;
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
  const PipelineSchedule schedule_;
  const std::vector<models::BlockRange> cut_;
  std::vector<rpc::RRef<PipelineStage>> stages_;
  std::optional<optim::DistributedOptimizer> optimizer_;
};

/// On each stage, after the last batch: from here on a signal ends the process at once, unless the
/// job is `stopped` by one. Gives back whether it is, then also by one that came here.
bool end_batches(rpc::CallContext& call, bool stopped) {
  auto& job = call.agent.local<StageJob>();
  job.stop->disarm(stopped);
  return job.stop->requested();
}

/// F on all stages, of the rank and not of its stage.
template <auto F, class... Args>
auto on_stage_ranks(rpc::Agent& agent, int stages, const Args&... args) {
  std::vector<decltype(agent.rpc_async<F>(1, args...))> calls;
  for (int rank = 1; rank <= stages; ++rank) calls.push_back(agent.rpc_async<F>(rank, args...));
  base::wait_all(calls);
  return calls;
}

void run_master(rpc::Agent& agent, const PipelineOptions& options, PipelineRun& run) {
  run.run([&](int64_t num_split) {
    return std::make_unique<Pipeline>(agent, options,
                                      make_schedule(options.schedule, options.stages, num_split));
  });
  for (const auto& told_to_stop :
       on_stage_ranks<&end_batches>(agent, options.stages, run.stopped())) {
    if (told_to_stop.wait()) run.stop();
  }
  if (run.stopped()) on_stage_ranks<&end_batches>(agent, options.stages, true);
}

}  // namespace

int pipeline_world_size(const PipelineOptions& options) { return options.stages + 1; }

std::string pipeline_role(int rank) {
  return rank == kMaster ? "master" : "worker" + std::to_string(rank);
}

job::Outcome run_pipeline(const PipelineOptions& own, const job::Job& job,
                          const std::function<PipelineOptions(const job::OptionMap&)>& adopt,
                          job::EventSink& sink) {
  std::vector<std::string> names;
  for (int rank = 0; rank < pipeline_world_size(own); ++rank) names.push_back(pipeline_role(rank));
  job::Session session(job, std::move(names), sink);
  rpc::Agent& agent = session.agent();
  PipelineStage::expose(agent);
  agent.expose<&end_batches>("pipeline.end_batches");
  const auto stage_job = std::make_shared<StageJob>();
  stage_job->sleep_s = job.inject.stage_sleep_s;
  stage_job->stop = job.stop;
  agent.provide(stage_job);

  job::Outcome outcome;
  std::optional<PipelineRun> run;
  const auto prepare = [&] {
    if (job.rank == kMaster) {
      run.emplace(own, session.job(), sink);  // so that bad files are known at once
    } else {
      stage_job->saves = !adopt(agent.job_options()).checkpoint.dir.empty();
    }
  };
  const auto work = [&] {
    if (job.rank != kMaster) return;  // it serves the master while it waits in the shutdown
    if (!own.checkpoint.dir.empty()) job.stop->arm();  // before, nobody would look
    run_master(agent, own, *run);
  };
  session.run(prepare, work, outcome);
  if (run) {
    run->add_to(outcome);
  } else {
    outcome.stopped = job.stop->requested();
  }
  return outcome;
}

}  // namespace distrain::scenario
