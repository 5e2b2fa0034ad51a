#include "host.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "distrain/base/error.h"

namespace distrain::scenario {

PsHost::PsHost(const PsOptions& options, const job::Job& job, job::EventSink& sink)
    : options_(options),
      sink_(sink),
      stop_(job.stop),
      checkpoints_(options.checkpoint, job, sink) {}

void PsHost::start(std::shared_ptr<models::ConvNet> model, job::OptimizerAccess optimizer,
                   const PsDataInfo& data) {
  model_ = std::move(model);
  optimizer_ = std::move(optimizer);
  data_ = data;
  job::Schedule::Hooks hooks;
  hooks.on_evaluated = [this](bool) { on_evaluated(); };
  hooks.on_save = [this](const job::Position& position) { save(position); };
  hooks.on_end = [this](bool stopped) {
    std::lock_guard lock(mutex_);
    stopped_ = stopped;
    stop_->disarm(stopped);
  };
  schedule_.emplace(schedule_terms(options_, data), std::move(hooks));
  if (const auto snapshot = checkpoints_.load()) resume(*snapshot);
  if (checkpoints_.saving()) stop_->arm();  // where rank 0 itself has not come so far
}

void PsHost::resume(const job::Snapshot& snapshot) {
  const job::Json agreed = must_agree(options_, data_);
  for (const auto& [key, value] : agreed.items()) snapshot.expect(key.c_str(), value);
  snapshot.copy_into("model", model_->named_parameters());
  snapshot.checked([&] {
    optimizer_.set(job::unflatten(models::ConvNet::names(), snapshot.file("optimizer")));
    const job::Position position =
        job::Position::from_json(snapshot.state.value("position", job::Json()), options_.trainers);
    resumed_at_ = position.total / options_.trainers;
    schedule_->resume(position);
  });
}

base::Future<job::Task> PsHost::next(int trainer, bool stop) {
  return schedule_->next(trainer, stop || stop_->requested());
}

void PsHost::report(const PsReport& report) {
  std::lock_guard lock(mutex_);
  total_.loss += report.loss * static_cast<double>(report.steps);
  total_.steps += report.steps;
  total_.staleness = std::max(total_.staleness, report.staleness);
  total_.evaluation.add(report.evaluation);
}

void PsHost::on_evaluated() {
  std::lock_guard lock(mutex_);
  if (total_.steps > 0) metrics_["loss"] = total_.loss / static_cast<double>(total_.steps);
  metrics_["staleness"] = total_.staleness;
  const job::Json fields = total_.evaluation.fields();
  if (!fields.empty()) {
    job::check_finite_loss(fields["loss"].get<double>());
    sink_.emit("eval", fields);
    metrics_["accuracy"] = fields["accuracy"];
  }
  const int64_t staleness = total_.staleness;
  total_ = {};
  total_.staleness = staleness;
}

void PsHost::save(const job::Position& position) {
  job::Snapshot snapshot;
  snapshot.step = position.total / options_.trainers;
  snapshot.state = must_agree(options_, data_);
  snapshot.state["position"] = position.to_json();
  snapshot.files["model"] = model_->named_parameters();
  snapshot.files["optimizer"] = job::flatten(models::ConvNet::names(), optimizer_.get());
  checkpoints_.save(snapshot);
}

void PsHost::add_to(job::Outcome& outcome) const {
  std::lock_guard lock(mutex_);
  outcome.fields.update(metrics_);
  outcome.stopped = stopped_;
  outcome.message = checkpoints_.last_saved();
}

optim::OptimizerOptions optimizer_options(const PsOptions& options) {
  return optim::Sgd{.lr = options.lr};
}

}  // namespace distrain::scenario
