#include "run.h"

#include "distrain/base/trace.h"
#include "distrain/models/resnet.h"
#include "loss.h"

namespace distrain::scenario {

PipelineRun::PipelineRun(const PipelineOptions& options, const job::Job& job, job::EventSink& sink)
    : options_(options),
      stop_(job.stop),
      data_(options),
      weights_(initial_weights(options)),
      checkpoints_(options.checkpoint, job, sink),
      log_(options, sink) {}

void PipelineRun::run(const MakeModel& make) {
  for (const int64_t num_split : options_.num_split) {
    if (stopped_) break;
    const std::unique_ptr<PipelineModel> model = make(num_split);
    run_split(num_split, *model);
  }
  stop_->disarm(stopped_);
  stopped_ = stop_->requested();
}

void PipelineRun::run_split(int64_t num_split, PipelineModel& model) {
  int64_t done = 0;
  if (const auto snapshot = checkpoints_.load()) {
    done = resume(*snapshot, model);
  } else if (!weights_.empty()) {
    model.load(weights_);
  }
  log_.begin_split(num_split);
  const int64_t every = options_.checkpoint.every;
  while (done < options_.batches && !stopped_) {
    const PipelineBatch batch = base::traced("data", [&] { return data_.batch(done); });
    const BatchResult result = model.train(batch, done);
    log_.batch(result, ++done);
    const bool last = done == options_.batches;
    stopped_ = result.stop_requested || stop_->requested();
    const bool due = last || stopped_ || (every > 0 && done % every == 0);
    if (due && checkpoints_.saving()) save(done, model);
  }
  log_.end_split();
}

// Not the stages and the schedule: the result does not depend on them.
job::Json PipelineRun::must_agree() const {
  return {{"cmd", "pipeline"},
          {"model", options_.model},
          {"classes", options_.classes},
          {"num_split", options_.num_split.front()},
          {"batch_size", options_.batch_size},
          {"image_size", options_.image_size},
          {"loss", options_.loss},
          {"seed", options_.seed},
          {"data", data_.describe()},
          {"content_hash", std::to_string(data_.content_hash())}};
}

void PipelineRun::save(int64_t batches, PipelineModel& model) {
  job::Snapshot snapshot;
  snapshot.step = batches;
  snapshot.state = must_agree();
  snapshot.state["batches"] = batches;
  snapshot.files["model"] = model.state();
  checkpoints_.save(snapshot);
}

int64_t PipelineRun::resume(const job::Snapshot& snapshot, PipelineModel& model) const {
  const job::Json agreed = must_agree();
  for (const auto& [key, value] : agreed.items()) snapshot.expect(key.c_str(), value);
  const job::Json batches = snapshot.state.value("batches", job::Json());
  if (!batches.is_number_integer() || batches.get<int64_t>() < 1 || batches != snapshot.step) {
    snapshot.refuse("the number of batches is not one from 1 on, or not that of its name");
  }
  const data::NamedTensors& state = snapshot.file("model");
  snapshot.checked([&] { models::check_weights(options_.model, options_.classes, state); });
  model.load(state);
  return batches.get<int64_t>();
}

void PipelineRun::add_to(job::Outcome& outcome) const {
  log_.add_to(outcome);
  outcome.stopped = stopped_;
  outcome.message = checkpoints_.last_saved();
}

}  // namespace distrain::scenario
