// distrain ps --local: the same model, batches and updates in one process, without RPC.

#include <algorithm>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "data.h"
#include "distrain/base/trace.h"
#include "distrain/job/local_trainers.h"
#include "distrain/job/train_log.h"
#include "distrain/models/conv_net.h"
#include "distrain/rpc/placed.h"
#include "distrain/scenario/ps.h"
#include "host.h"

namespace distrain::scenario {

namespace {

using Gradients = std::vector<at::Tensor>;

class LocalRun {
 public:
  LocalRun(const PsOptions& options, const job::Job& job, job::EventSink& sink)
      : options_(options),
        stop_(*job.stop),
        data_(options),
        rule_(optim::make_update_rule(optimizer_options(options))),
        log_(options.log_interval, sink),
        host_(options, job, sink) {
    auto model = std::make_shared<models::ConvNet>(options.seed, job.devices);
    parameters_ = model->parameters();
    host_.start(std::move(model), job::rule_access(*rule_, parameters_), data_.info());
    log_.resume_after(host_.resumed_at());
  }

  job::Outcome run() {
    job::run_tasks(
        options_.trainers, [this](int trainer) { return host_.next(trainer, false); },
        [this](const std::vector<job::Task>& tasks) { train(tasks); },
        [this](const std::vector<job::Task>&) { evaluate(); });
    log_.end_epoch();
    job::Outcome outcome;
    outcome.fields = {{"steps", log_.steps() * options_.trainers}, {"train_s", log_.train_s()}};
    host_.add_to(outcome);
    outcome.stopped = outcome.stopped || stop_.requested();
    return outcome;
  }

 private:
  /// One step of each trainer: sync, one update by the mean; otherwise one after the other.
  void train(const std::vector<job::Task>& tasks) {
    const base::TraceScope scope("step", "step", log_.steps());
    if (log_.epoch() != tasks[0].epoch) log_.begin_epoch(tasks[0].epoch);
    const int64_t version = updates_;
    std::vector<Gradients> gathered;
    double loss_sum = 0;
    int64_t samples = 0;
    for (const job::Task& task : tasks) {
      const ImageBatch batch = data_.batch(task);
      const auto key = dropout_key(options_, task);
      const at::Tensor scores = models::ConvNet::forward(
          parameters_, batch.images, key ? models::Dropout({*key}) : models::Dropout());
      const at::Tensor targets = rpc::placed(batch.targets, scores.device());
      const at::Tensor loss = base::traced("loss", [&] { return at::nll_loss(scores, targets); });
      loss_sum += job::checked_loss(loss, task.epoch, task.step + 1);
      samples += batch.targets.numel();
      base::traced("backward", [&] { loss.backward(); });
      Gradients gradients = job::take_gradients(parameters_);
      if (options_.mode == "sync") {
        gathered.push_back(std::move(gradients));
      } else {
        apply(gradients);
      }
    }
    if (!gathered.empty()) apply(job::mean(gathered));
    log_.step(loss_sum / static_cast<double>(tasks.size()), samples,
              {{"staleness", 0}, {"version", version}, {"delay", 0}});
  }

  void apply(const Gradients& gradients) {
    const base::TraceScope scope("update");
    for (size_t i = 0; i < gradients.size(); ++i) rule_->apply(i, parameters_[i], gradients[i]);
    ++updates_;
  }

  void evaluate() {
    PsReport report;
    report.steps = log_.epoch_steps();
    log_.end_epoch();
    report.loss = log_.last_loss();
    report.evaluation = evaluate_share(data_, 0, 1, [this](const at::Tensor& images) {
      return models::ConvNet::forward(parameters_, images, models::Dropout());
    });
    host_.report(report);
  }

  const PsOptions options_;
  const job::StopSignal& stop_;
  PsData data_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<optim::UpdateRule> rule_;
  job::TrainLog log_;
  PsHost host_;
  int64_t updates_ = 0;
};

}  // namespace

job::Outcome run_ps_local(const PsOptions& options, const job::Job& job, job::EventSink& sink) {
  return job::without_rpc(LocalRun(options, job, sink).run());
}

}  // namespace distrain::scenario
