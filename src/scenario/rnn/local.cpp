// distrain rnn --local: the same model, batches and updates in one process, without RPC.

#include <algorithm>

#include "data.h"
#include "distrain/base/trace.h"
#include "distrain/job/local_trainers.h"
#include "distrain/job/train_log.h"
#include "distrain/models/language_model.h"
#include "distrain/scenario/rnn.h"
#include "host.h"
#include "language_model.h"

namespace distrain::scenario {

namespace {

using Gradients = std::vector<at::Tensor>;

/// Parameters that one rule updates, by name.
struct Part {
  Part(const RnnOptions& options, const std::vector<std::string>& which,
       const data::NamedTensors& named)
      : names(which), rule(optim::make_update_rule(optimizer_options(options))) {
    for (const std::string& name : names) parameters.push_back(named.at(name));
  }

  void apply(const Gradients& gradients, double scale) {
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      rule->apply(i, parameters[i], scale == 1 ? gradients[i] : gradients[i] * scale);
    }
  }

  std::vector<std::string> names;
  std::vector<at::Tensor> parameters;
  std::unique_ptr<optim::UpdateRule> rule;
};

std::vector<std::string> keys(const data::NamedTensors& named) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : named) names.push_back(name);
  return names;
}

class LocalRun {
 public:
  LocalRun(const RnnOptions& options, const job::Job& job, job::EventSink& sink)
      : options_(options),
        sink_(sink),
        stop_(*job.stop),
        data_(options),
        embedding_(std::make_shared<models::WordEmbedding>(data_.info().words, options.emsize,
                                                           options.seed, job.device())),
        decoder_(std::make_shared<models::Decoder>(data_.info().words, options.nhid, options.seed,
                                                   job.device())),
        lstm_(make_lstm(options, job.device())),
        ends_(options, RnnHost::parameter_names(), named_ends()),
        middle_(options, keys(lstm_->named()), lstm_->named()),
        log_(options.log_interval, sink, job::TrainLog::Unit::kWords),
        host_(options, job, sink) {
    host_.build(embedding_, decoder_, data_.info());
    host_.start(job::rule_access(*ends_.rule, ends_.parameters));
    for (int t = 0; t < options.trainers; ++t) {
      trainers_.emplace_back(options, lstm_, direct_ends());
      if (const auto resumed = host_.resumed(t)) take(*resumed, trainers_.back());
    }
  }

  job::Outcome run() {
    job::run_tasks(
        options_.trainers, [this](int trainer) { return next(trainer); },
        [this](const std::vector<job::Task>& tasks) { train(tasks); },
        [this](const std::vector<job::Task>&) { evaluate(); });
    log_.end_epoch();
    if (!host_.stopped() && !stop_.requested() && options_.generate > 0 && !options_.data.empty()) {
      sink_.emit("text", {{"text", trainers_[0].generate(data_.vocabulary())}});
    }
    job::Outcome outcome;
    outcome.fields = {{"steps", log_.steps() * options_.trainers}, {"train_s", log_.train_s()}};
    if (log_.train_s() > 0) {
      outcome.fields["words_per_s"] = static_cast<double>(words_) / log_.train_s();
    }
    host_.add_to(outcome);
    outcome.stopped = outcome.stopped || stop_.requested();
    return outcome;
  }

 private:
  data::NamedTensors named_ends() const {
    data::NamedTensors named = embedding_->named_parameters();
    named.merge(decoder_->named_parameters());
    return named;
  }

  LanguageModel::Ends direct_ends() const {
    const at::Tensor weight = decoder_->weight(), bias = decoder_->bias();
    return {[this](const at::Tensor& words) { return embedding_->lookup(words); },
            [weight, bias](const at::Tensor& hidden, const at::Tensor& targets) {
              return models::Decoder::loss_of(weight, bias, hidden, targets);
            },
            [weight, bias](const at::Tensor& hidden) {
              return models::Decoder::scores_of(weight, bias, hidden);
            }};
  }

  base::Future<job::Task> next(int trainer) {
    base::Future<RnnTask> future = host_.next(trainer, false, executor_);
    return future.then(executor_, [this, trainer](const RnnTask& next) {
      lr_ = next.lr;
      if (next.task.kind == job::Task::Kind::kSave) contribute(trainer);
      return next.task;
    });
  }

  void contribute(int trainer) {
    RnnTrainerState mine;
    mine.state = trainers_[static_cast<size_t>(trainer)].state();
    if (trainer == 0) {
      mine.lstm = lstm_->named();
      mine.optimizer =
          job::flatten(middle_.names, job::rule_access(*middle_.rule, middle_.parameters).get());
    }
    host_.contribute(trainer, std::move(mine));
  }

  void take(const RnnTrainerState& resumed, LanguageModel& trainer) {
    log_.resume_after(resumed.steps);
    trainer.state() = resumed.state.on(lstm_->device());
    job::Snapshot snapshot;
    snapshot.path = resumed.path;
    snapshot.files["model"] = resumed.lstm;
    snapshot.copy_into("model", lstm_->named());
    snapshot.checked([&] {
      const job::OptimizerAccess optimizer = job::rule_access(*middle_.rule, middle_.parameters);
      optimizer.set(job::unflatten(middle_.names, resumed.optimizer));
    });
  }

  void train(const std::vector<job::Task>& tasks) {
    const base::TraceScope scope("step", "step", log_.steps());
    if (log_.epoch() != tasks[0].epoch) log_.begin_epoch(tasks[0].epoch);
    for (Part* part : {&ends_, &middle_}) part->rule->set_lr_factor(lr_factor(options_, lr_));
    std::vector<Gradients> ends, middle;
    double loss_sum = 0;
    int64_t words = 0;
    for (const job::Task& task : tasks) {
      const WordBatch batch = data_.batch(task.shard, task.step);
      const at::Tensor loss = trainers_[static_cast<size_t>(task.shard)].training_loss(batch, task);
      loss_sum += job::checked_loss(loss, task.epoch, task.step + 1);
      words += batch.targets.numel();
      base::traced("backward", [&] { loss.backward(); });
      ends.push_back(job::take_gradients(ends_.parameters));
      middle.push_back(job::take_gradients(middle_.parameters));
    }
    update(ends, job::mean(middle));
    words_ += words;
    log_.step(loss_sum / static_cast<double>(tasks.size()), words);
  }

  /// As DistributedOptimizer does with clipping: one scale for all.
  void update(const std::vector<Gradients>& ends, const Gradients& middle) {
    const base::TraceScope scope("update");
    const bool sync = options_.mode == "sync";
    const std::vector<Gradients> updates = sync ? std::vector<Gradients>{job::mean(ends)} : ends;
    double scale = 1;
    if (options_.clip > 0) {
      double squared = 0;
      for (const Gradients& gradients : updates) squared += optim::norm_squared(gradients);
      squared = squared / static_cast<double>(updates.size()) + optim::norm_squared(middle);
      scale = optim::clip_scale(squared, options_.clip);
    }
    for (const Gradients& gradients : updates) ends_.apply(gradients, scale);
    middle_.apply(middle, scale);
  }

  void evaluate() {
    RnnReport report;
    report.training.words = log_.epoch_samples();
    log_.end_epoch();
    report.training.loss_sum = log_.last_loss() * static_cast<double>(report.training.words);
    for (int t = 0; t < options_.trainers; ++t) {
      report.validation.add(trainers_[static_cast<size_t>(t)].evaluate(data_, t));
    }
    host_.report(report);
  }

  const RnnOptions options_;
  job::EventSink& sink_;
  job::StopSignal& stop_;
  RnnData data_;
  std::shared_ptr<models::WordEmbedding> embedding_;
  std::shared_ptr<models::Decoder> decoder_;
  models::Lstm lstm_;
  Part ends_;    // embedding and decoder: a step of each trainer, or their mean
  Part middle_;  // the LSTM: always the mean, as under DDP
  std::vector<LanguageModel> trainers_;
  job::TrainLog log_;
  RnnHost host_;
  base::InlineExecutor executor_;
  double lr_ = 0;
  int64_t words_ = 0;
};

}  // namespace

job::Outcome run_rnn_local(const RnnOptions& options, const job::Job& job, job::EventSink& sink) {
  return job::without_rpc(LocalRun(options, job, sink).run());
}

}  // namespace distrain::scenario
