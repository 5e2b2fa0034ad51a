#include "training_host.h"

#include <algorithm>
#include <cmath>

#include <ATen/Parallel.h>

#include "distrain/base/error.h"

namespace distrain::job {

namespace {

std::string value_or_empty(const std::map<std::string, std::string>& values,
                           const std::string& name) {
  const auto it = values.find(name);
  return it == values.end() ? std::string() : it->second;
}

std::string own_suffix(int trainer) { return "." + std::to_string(trainer); }

/// What trainer `rank` has other than the first one; empty: nothing.
std::string difference(const Attachment& first, const Attachment& other, int rank) {
  const std::string who = "trainer " + std::to_string(rank);
  const auto read = [](const Attachment& a) {
    return std::tie(a.steps_per_epoch, a.agreed, a.alike);
  };
  if (read(first) != read(other)) {
    return who + " has read other data than the others: " + other.what_must_agree +
           " must be the same";
  }
  const auto rest = [](const Attachment& a) {
    return std::tie(a.trainers, a.epochs, a.steps, a.eval_only, a.lr, a.lr_schedule, a.words);
  };
  if (rest(first) != rest(other)) return who + " has other terms of training than the others";
  if (first.parts != other.parts) return who + " keeps other parts in a checkpoint than the others";
  if (first.take_over == other.take_over) return {};
  return who + " has a group of the trainers and others have none, or the other way round";
}

}  // namespace

namespace on_host {

Attached attach(rpc::CallContext& call, const Attachment& attachment) {
  return call.agent.local<TrainingHost>().attach(attachment, call.caller.rank);
}
data::NamedTensors saved_part(rpc::CallContext& call, const PartName& part, int trainer) {
  return call.agent.local<TrainingHost>().saved_part(part, trainer);
}
base::Future<Lease> next(rpc::CallContext& call, bool stop, bool last, int64_t wanted) {
  return call.agent.local<TrainingHost>().next(call.caller.rank, stop, last, wanted,
                                               call.agent.inline_executor());
}
void report(rpc::CallContext& call, const Report& report) {
  call.agent.local<TrainingHost>().report(report);
}
void contribute(rpc::CallContext& call, const std::map<std::string, data::NamedTensors>& files) {
  call.agent.local<TrainingHost>().contribute(files);
}

}  // namespace on_host

bool PartName::has(const std::string& tensor, int trainer) const {
  if (!name.empty() && !tensor.starts_with(name + ".")) return false;
  return !each_own || tensor.ends_with(own_suffix(trainer));
}

std::string PartName::stored(const std::string& tensor, int trainer) const {
  return each_own ? tensor + own_suffix(trainer) : tensor;
}

TrainingHost::TrainingHost(Setting setting, const Job& job, EventSink& sink)
    : setting_(std::move(setting)),
      sink_(sink),
      stop_(job.stop),
      checkpoints_(setting_.checkpoint, job, sink) {}

void TrainingHost::expose(rpc::Agent& agent) {
  agent.expose<&on_host::attach>("job.attach");
  agent.expose<&on_host::saved_part>("job.saved_part");
  agent.expose<&on_host::next>("job.next");
  agent.expose<&on_host::report>("job.report");
  agent.expose<&on_host::contribute>("job.contribute");
}

Attached TrainingHost::attach(const Attachment& attachment, int rank) {
  std::lock_guard lock(mutex_);
  if (failed_) throw base::Exception(*failed_);
  const auto refuse = [rank](base::ErrorKind kind, const std::string& why) {
    throw base::Exception(base::Error{kind, why, rank, "attach"});
  };
  if (attachment.trainers < 1 || attachment.trainer < 0 ||
      attachment.trainer >= attachment.trainers || attachment.steps_per_epoch < 1) {
    refuse(base::ErrorKind::kInvalid, "rank " + std::to_string(rank) + " cannot train so");
  }
  if (trainers_.contains(rank)) {
    refuse(base::ErrorKind::kInvalid, "a job has one Training, and a rank runs it once");
  }
  if (terms_) {
    const std::string other = difference(*terms_, attachment, rank);
    if (!other.empty()) refuse(base::ErrorKind::kBadData, other);
    trainers_[rank] = attachment.trainer;
    return {resumed_ ? resumed_->path : "", steps_made_, checkpoints_.saving()};
  }
  terms_ = attachment;
  lr_schedule_ = optim::Schedule::parse(attachment.lr_schedule);
  Schedule::Terms terms;
  terms.trainers = attachment.trainers;
  terms.epochs = attachment.epochs;
  terms.steps = attachment.steps;
  terms.steps_per_epoch = attachment.steps_per_epoch;
  terms.take_over = attachment.take_over;
  terms.save = checkpoints_.saving() && !attachment.eval_only;
  terms.save_every = setting_.checkpoint.every;
  Schedule::Hooks hooks;
  hooks.on_begin = [this, saves = terms.save] {
    {
      std::lock_guard begin_lock(mutex_);
      resumed_.reset();
    }
    if (saves) setting_.heed();
  };
  hooks.on_evaluated = [this](const Position& position, bool whole_epoch) {
    on_evaluated(position, whole_epoch);
  };
  hooks.on_save = [this](const Position& position) { save(position); };
  hooks.on_end = [this, saves = terms.save](bool stopped) {
    if (saves) setting_.end(stopped);
  };
  current_ = nullptr;
  schedule_.emplace(terms, std::move(hooks));
  if (attachment.eval_only) schedule_->finish();
  try {
    load();
  } catch (...) {
    terms_.reset();  // the next one is to hear the same
    throw;
  }
  current_ = &*schedule_;
  trainers_[rank] = attachment.trainer;
  return {resumed_ ? resumed_->path : "", steps_made_, checkpoints_.saving()};
}

void TrainingHost::load() {
  resumed_ = checkpoints_.load();
  if (!resumed_ && terms_->eval_only) {
    throw base::Exception(base::ErrorKind::kBadData,
                          "--eval-only: no checkpoint in " + setting_.checkpoint.dir);
  }
  if (!resumed_) return;
  const Snapshot& snapshot = *resumed_;
  snapshot.expect_cmd(setting_.cmd);
  const Json agreed = snapshot.state.value("agreed", Json());
  if (!agreed.is_object()) snapshot.refuse("it is of an older version of distrain");
  for (const auto& [name, value] : agreed.items()) {
    if (!value.is_string()) snapshot.refuse("what it says of " + name + " is no text");
  }
  // Other data has other options, too.
  if (agreed.value("data", "") != value_or_empty(terms_->agreed, "data")) {
    snapshot.refuse("saved while training on other data");
  }
  for (const std::string& name : setting_.must_agree) {
    snapshot.expect_option(name, setting_.options.at(name));
  }
  for (const auto& [name, value] : terms_->agreed) {
    const std::string was = agreed.value(name, "");
    if (was != value) snapshot.refuse("saved with " + name + " " + was + ", not " + value);
  }
  for (const auto& [name, value] : agreed.items()) {
    if (!terms_->agreed.contains(name)) snapshot.refuse("saved with " + name + ", not without");
  }
  check_all_taken();
  snapshot.checked([&] { read_position(snapshot); });
}

// What is in the files and of no part is of another model.
void TrainingHost::check_all_taken() const {
  for (const auto& [file, tensors] : resumed_->files) {
    for (const auto& [tensor, value] : tensors) {
      const bool known =
          std::any_of(terms_->parts.begin(), terms_->parts.end(), [&](const auto& p) {
            if (p.file != file) return false;
            for (int trainer = 0; trainer < terms_->trainers; ++trainer) {
              if (p.has(tensor, trainer)) return true;
            }
            return false;
          });
      if (!known) {
        resumed_->refuse(file + ".safetensors has " + tensor + ", which the model has not");
      }
    }
  }
}

void TrainingHost::read_position(const Snapshot& snapshot) {
  const Json& state = snapshot.state;
  const Position position = Position::from_json(state.value("position", Json()), terms_->trainers);
  const Json lr = state.value("lr", Json());
  if (!lr.is_number()) snapshot.refuse("no lr");
  // With another --lr or --lr-schedule than the saved run had, the user's begin anew.
  if (lr == Json(terms_->lr) && state.value("lr_schedule", Json()) == Json(terms_->lr_schedule)) {
    const Json kept = state.value("lr_state", Json());
    optim::ScheduleState schedule;
    if (!kept.is_object() || !kept.value("factor", Json()).is_number() ||
        !kept.value("bad", Json()).is_number_unsigned()) {
      snapshot.refuse("no lr_state");
    }
    schedule.factor = kept["factor"].get<double>();
    schedule.bad = kept["bad"].get<int64_t>();
    if (const Json best = kept.value("best", Json()); best.is_number()) {
      schedule.best = best.get<double>();
    }
    lr_schedule_.load_state(schedule);
  }
  steps_made_ = position.total / terms_->trainers;
  schedule_->resume(position);
}

data::NamedTensors TrainingHost::saved_part(const PartName& part, int trainer) {
  std::lock_guard lock(mutex_);
  data::NamedTensors found;
  if (!resumed_) return found;
  const auto file = resumed_->files.find(part.file);
  if (file == resumed_->files.end()) resumed_->refuse("no " + part.file + ".safetensors");
  for (const auto& [tensor, value] : file->second) {
    if (!part.has(tensor, trainer)) continue;
    const size_t suffix = part.each_own ? own_suffix(trainer).size() : 0;
    found[tensor.substr(0, tensor.size() - suffix)] = value;
  }
  return found;
}

base::Future<Lease> TrainingHost::next(int rank, bool stop, bool last, int64_t wanted,
                                       base::Executor& executor) {
  int trainer = 0;
  {
    std::lock_guard lock(mutex_);
    const auto it = trainers_.find(rank);
    if (it == trainers_.end()) {
      throw base::Exception(base::ErrorKind::kInvalid,
                            "rank " + std::to_string(rank) + " asks for steps, but trains nothing");
    }
    trainer = it->second;
  }
  if (last) schedule_->finish();
  return schedule_->next(trainer, stop || stop_->requested(), std::max<int64_t>(wanted, 1))
      .then(executor, [this](const Task& task) {
        std::lock_guard lock(mutex_);
        return Lease{task, lr_schedule_.state()};
      });
}

void TrainingHost::fail(const base::Error& error) {
  {
    std::lock_guard lock(mutex_);
    failed_ = error;
    if (!schedule_) return;
  }
  schedule_->fail(error);
}

void TrainingHost::request_save() {
  if (Schedule* const schedule = current_) schedule->request_save();
}

void TrainingHost::report(const Report& report) {
  std::lock_guard lock(mutex_);
  total_.loss += report.loss * static_cast<double>(report.steps);
  total_.steps += report.steps;
  total_.valid.add(report.valid);
  total_.test.add(report.test);
  for (const auto& [name, value] : report.maxima) {
    int64_t& greatest = maxima_.try_emplace(name, value).first->second;
    greatest = std::max(greatest, value);
    metrics_[name] = greatest;
  }
}

void TrainingHost::on_evaluated(const Position& position, bool whole_epoch) {
  std::lock_guard lock(mutex_);
  if (total_.steps > 0) {
    const double loss = total_.loss / static_cast<double>(total_.steps);
    metrics_["loss"] = loss;
    if (terms_->words) metrics_["perplexity"] = std::exp(loss);
  }
  tell_evaluation("valid", total_.valid, position);
  tell_evaluation("test", total_.test, position);
  if (total_.valid.samples + total_.test.samples == 0 && terms_->eval_only) {
    throw base::Exception(base::ErrorKind::kInvalid,
                          "--eval-only: the job has no data to evaluate on");
  }
  if (total_.valid.samples > 0) {
    // Where a job was cut off, one that goes on must not see it.
    if (whole_epoch) lr_schedule_.observe(total_.valid.loss());
  } else if (lr_schedule_.observes() && whole_epoch && !told_of_schedule_) {
    told_of_schedule_ = true;
    sink_.emit("warn", {{"kind", base::kind_name(base::ErrorKind::kInvalid)},
                        {"message", "--lr-schedule " + terms_->lr_schedule +
                                        " has nothing to go by: no epoch is evaluated"}});
  }
  total_ = {};
}

void TrainingHost::tell_evaluation(const char* set, const Evaluation& evaluation,
                                   const Position& position) {
  if (evaluation.samples == 0) return;
  check_finite_loss(evaluation.loss());
  Json fields = evaluation.fields(terms_->words ? Unit::kWords : Unit::kSamples);
  fields["set"] = set;
  // Of a job that has just gone on, or is over, the next epoch has begun with no step.
  const bool between = std::all_of(position.steps.begin(), position.steps.end(),
                                   [](int64_t steps) { return steps == 0; });
  fields["epoch"] = position.epoch - (between && position.epoch > 1 ? 1 : 0);
  fields["step"] = position.total / terms_->trainers;
  if (lr_schedule_.observes()) fields["lr"] = terms_->lr * lr_schedule_.state().factor;
  metrics_["eval"] = fields;
  if (fields.contains("accuracy")) metrics_["accuracy"] = fields["accuracy"];
  sink_.emit("eval", fields);
}

void TrainingHost::contribute(const std::map<std::string, data::NamedTensors>& files) {
  std::lock_guard lock(mutex_);
  for (const auto& [file, tensors] : files) {
    for (const auto& [name, tensor] : tensors) gathered_.files[file][name] = tensor;
  }
}

void TrainingHost::save(const Position& position) {
  std::lock_guard lock(mutex_);
  Snapshot snapshot = std::move(gathered_);
  gathered_ = {};
  snapshot.step = position.total / terms_->trainers;
  snapshot.state["cmd"] = setting_.cmd;
  snapshot.state["options"] = setting_.options;
  snapshot.state["agreed"] = terms_->agreed;
  snapshot.state["position"] = position.to_json();
  snapshot.state["threads"] = at::get_num_threads();
  const optim::ScheduleState& schedule = lr_schedule_.state();
  snapshot.state["lr"] = terms_->lr;
  snapshot.state["lr_schedule"] = terms_->lr_schedule;
  snapshot.state["lr_state"] = {{"factor", schedule.factor}, {"bad", schedule.bad}};
  if (schedule.best) snapshot.state["lr_state"]["best"] = *schedule.best;
  checkpoints_.save(snapshot);
}

void TrainingHost::add_to(Outcome& outcome) const {
  std::lock_guard lock(mutex_);
  outcome.fields.update(metrics_);
  if (total_.steps > 0) {  // it was stopped in the midst of an epoch
    const double loss = total_.loss / static_cast<double>(total_.steps);
    outcome.fields["loss"] = loss;
    if (terms_->words) outcome.fields["perplexity"] = std::exp(loss);
  }
  outcome.message = checkpoints_.last_saved();
}

}  // namespace distrain::job
