// distrain hybrid --local: the same model, batches and updates in one process, without RPC.

#include <algorithm>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "checkpoint.h"
#include "data.h"
#include "distrain/base/trace.h"
#include "distrain/data/named_tensors.h"
#include "distrain/job/local_trainers.h"
#include "distrain/job/train_log.h"
#include "distrain/optim/update_rule.h"
#include "distrain/scenario/hybrid.h"
#include "model.h"

namespace distrain::scenario {

namespace {

constexpr int64_t kTestBatch = 256;

using Gradients = std::vector<at::Tensor>;  // of the table, then of the dense layer

class LocalRun {
 public:
  LocalRun(const HybridOptions& options, const job::Job& job, job::EventSink& sink)
      : options_(options),
        sink_(sink),
        data_(options),
        device_(job.device()),
        table_(data_.info().rows, options.embedding_dim, embedding_range(options), options.seed,
               device_.str()),
        dense_(make_dense(options, data_.info().classes, device_)),
        table_rule_(optim::make_update_rule(optimizer_options(options))),
        dense_rule_(optim::make_update_rule(optimizer_options(options))),
        stop_(*job.stop),
        checkpoints_(options.checkpoint, job, sink),
        log_(options_.log_interval, sink) {
    if (checkpoints_.saving()) job.stop->arm();
    if (const auto snapshot = checkpoints_.load()) resume(*snapshot);
  }

  job::Outcome run() {
    // Batches of all trainers: each has its own sampler, as the distributed trainers have.
    for (int t = 0; t < options_.trainers; ++t) per_trainer_.push_back(data_);
    const auto stopped = [this] { return checkpoints_.saving() && stop_.requested(); };
    while (!progress_.over(options_) && !stopped()) {
      if (log_.epoch() != progress_.epoch) log_.begin_epoch(progress_.epoch);
      train_step();
      progress_.count_step(data_.steps_per_epoch());
      if (progress_.step == 0) log_.end_epoch();
      if (stopped() || progress_.save_due(options_)) save();
    }
    log_.end_epoch();
    if (stopped() && checkpoints_.last_saved().empty()) save();  // before the first step
    job::Outcome outcome;
    outcome.fields = {{"steps", log_.steps() * options_.trainers},
                      {"train_s", log_.train_s()},
                      {"loss", log_.steps() > 0 ? job::Json(log_.last_loss()) : job::Json()}};
    outcome.stopped = stopped();
    outcome.message = checkpoints_.last_saved();
    if (!outcome.stopped) evaluate(outcome);
    if (options_.on_finished) {
      options_.on_finished(data::on_host({{"embedding.weight", table_.parameters()[0]},
                                          {"fc.weight", dense_->weight},
                                          {"fc.bias", dense_->bias}}));
    }
    return outcome;
  }

 private:
  void resume(const job::Snapshot& snapshot) {
    const HybridResume resume =
        read_hybrid(snapshot, options_, data_.info(), data_.steps_per_epoch());
    table_.set_weight(resume.model.at("embedding.weight"));
    {
      const at::NoGradGuard no_grad;
      dense_->weight.copy_(resume.model.at("fc.weight"));
      dense_->bias.copy_(resume.model.at("fc.bias"));
    }
    snapshot.checked([&] {
      table_rule_->load_state(0, table_.parameters()[0], resume.optimizer[0]);
      dense_rule_->load_state(0, dense_->weight, resume.optimizer[1]);
      dense_rule_->load_state(1, dense_->bias, resume.optimizer[2]);
    });
    progress_ = resume.progress;
    log_.resume_after(progress_.total);
  }

  void save() {
    const data::NamedTensors model = {{"embedding.weight", table_.parameters()[0]},
                                      {"fc.weight", dense_->weight},
                                      {"fc.bias", dense_->bias}};
    checkpoints_.save(
        hybrid_snapshot(options_, data_.info(), progress_, model,
                        {table_rule_->state(0), dense_rule_->state(0), dense_rule_->state(1)}));
  }

  void train_step() {
    const base::TraceScope scope("step", "step", progress_.total);
    std::vector<Gradients> gradients;
    double loss_sum = 0;
    int64_t samples = 0;
    for (int t = 0; t < options_.trainers; ++t) {
      const HybridBatch batch = per_trainer_[static_cast<size_t>(t)]
                                    .batch(t, progress_.epoch, progress_.step)
                                    .on(device_);
      const at::Tensor scores = base::traced(
          "forward", [&] { return dense_->forward(table_.lookup(batch.indices, batch.offsets)); });
      const at::Tensor loss =
          base::traced("loss", [&] { return at::cross_entropy_loss(scores, batch.targets); });
      loss_sum += job::checked_loss(loss, progress_.epoch, progress_.step + 1);
      samples += batch.targets.numel();
      base::traced("backward", [&] { loss.backward(); });
      gradients.push_back(
          job::take_gradients({table_.parameters()[0], dense_->weight, dense_->bias}));
    }
    update(gradients);
    log_.step(loss_sum / options_.trainers, samples);
  }

  void update(const std::vector<Gradients>& gradients) {
    const base::TraceScope scope("update");
    const at::NoGradGuard no_grad;
    const Gradients means = job::mean(gradients);
    at::Tensor table = table_.parameters()[0];
    if (options_.mode == "sync") {
      table_rule_->apply(0, table, means[0]);
    } else {
      for (const Gradients& each : gradients) table_rule_->apply(0, table, each[0]);
    }
    dense_rule_->apply(0, dense_->weight, means[1]);
    dense_rule_->apply(1, dense_->bias, means[2]);
  }

  void evaluate(job::Outcome& outcome) {
    const base::TraceScope scope("evaluate");
    const at::NoGradGuard no_grad;
    job::Evaluation evaluation;
    const int64_t examples = data_.info().test_examples;
    for (int64_t i = 0; i < examples; i += kTestBatch) {
      const HybridBatch batch = data_.test_batch(i, std::min(i + kTestBatch, examples)).on(device_);
      evaluate_batch(evaluation, dense_->forward(table_.lookup(batch.indices, batch.offsets)),
                     batch.targets);
    }
    if (evaluation.samples == 0) return;
    sink_.emit("eval", evaluation.fields());
    outcome.fields["accuracy"] = evaluation.fields()["accuracy"];
  }

  const HybridOptions options_;
  job::EventSink& sink_;
  HybridData data_;
  const c10::Device device_;
  models::EmbeddingTable table_;
  models::Dense dense_;
  std::unique_ptr<optim::UpdateRule> table_rule_;
  std::unique_ptr<optim::UpdateRule> dense_rule_;
  std::vector<HybridData> per_trainer_;
  HybridProgress progress_;
  const job::StopSignal& stop_;
  job::Checkpoints checkpoints_;
  job::TrainLog log_;
};

}  // namespace

job::Outcome run_hybrid_local(const HybridOptions& options, const job::Job& job,
                              job::EventSink& sink) {
  return job::without_rpc(LocalRun(options, job, sink).run());
}

}  // namespace distrain::scenario
