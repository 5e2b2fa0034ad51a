// The functions of TrainingHost that read the checkpoint that a job resumes from.
#include <algorithm>

#include <fmt/format.h>

#include "host/training_host.h"

namespace distrain::job {

namespace {

/// Throws if a tensor of `snapshot` is in no part of `plan`, because the models then differ.
void check_all_taken(const Snapshot& snapshot, const Plan& plan) {
  const auto is_known = [&](const std::string& file, const std::string& tensor) {
    for (const PartName& part : plan.parts) {
      if (part.file != file) continue;
      for (int trainer = 0; trainer < plan.trainers; ++trainer) {
        if (part.has(tensor, trainer)) return true;
      }
    }
    return false;
  };
  for (const auto& [file, content] : snapshot.files) {
    if (!plan.tables.empty() && file.starts_with(kTableFiles)) continue;  // checked by TablePart
    for (const auto& [tensor, info] : content.tensors()) {
      if (is_known(file, tensor)) continue;
      snapshot.refuse(file + ".safetensors has " + tensor + ", which the model has not");
    }
  }
}

}  // namespace

void TrainingHost::load() {
  if (auto snapshot = checkpoints_.load()) {
    resumed_ = std::make_shared<const Snapshot>(*std::move(snapshot));
  }
  if (!resumed_ && plan_->eval_only) {
    base::bad_data("--eval-only: no checkpoint in " + known_.checkpoint.dir);
  }
  if (!resumed_) return;
  const Snapshot& snapshot = *resumed_;
  snapshot.expect_cmd(cmd_);
  const Json agreed = snapshot.state.value("agreed", Json());
  if (!agreed.is_object()) snapshot.refuse("an older version of distrain wrote it");
  for (const auto& [name, value] : agreed.items()) {
    if (!value.is_string()) snapshot.refuse("its value of " + name + " is not a text");
  }
  // Compares the data first: other data may change option values, and the error must name the data.
  const auto data = plan_->agreed.find("data");
  if (agreed.value("data", "") != (data == plan_->agreed.end() ? "" : data->second)) {
    const auto now = known_.options.find("data");
    const bool has_path = now != known_.options.end() && !now->second.empty();
    const std::string was = snapshot.option("data").value_or("");
    snapshot.refuse("saved while training on other data" +
                    (has_path ? " than there is in --data " + now->second : "") +
                    ": resume with the data that it was trained on" +
                    (was.empty() ? "" : ", --data " + was) + kTrainAnew);
  }
  for (const auto& [name, initial] : known_.must_agree) {
    snapshot.expect_option(name, known_.options.at(name), initial);
  }
  const auto refuse = [&](const std::string& why) {
    snapshot.refuse(why + ": resume with the data and options that it was saved with" + kTrainAnew);
  };
  for (const auto& [name, value] : plan_->agreed) {
    const std::string was = agreed.value(name, "");
    if (was != value) refuse("saved with " + name + " " + was + ", not " + value);
  }
  for (const auto& [name, value] : agreed.items()) {
    if (!plan_->agreed.contains(name)) refuse("saved with " + name + ", not without");
  }
  check_all_taken(snapshot, *plan_);
  store::naming_file(snapshot.path, [&] { read_position(snapshot); });
}

void TrainingHost::read_position(const Snapshot& snapshot) {
  const Json& state = snapshot.state;
  const Position position = Position::from_json(state.value("position", Json()), plan_->trainers);
  const Json lr = state.value("lr", Json());
  if (!lr.is_number()) snapshot.refuse("no lr");
  // If the user has changed --lr or --lr-schedule, does not load the schedule's saved state.
  if (lr == Json(plan_->lr) && state.value("lr_schedule", Json()) == Json(plan_->lr_schedule)) {
    const Json kept = state.value("lr_state", Json());
    if (!kept.is_object() || !kept.value("factor", Json()).is_number() ||
        !kept.value("bad", Json()).is_number_unsigned()) {
      snapshot.refuse("no lr_state");
    }
    const Json best = kept.value("best", Json());
    lr_schedule_.load_state(
        {.factor = kept["factor"].get<double>(),
         .best = best.is_number() ? std::optional(best.get<double>()) : std::nullopt,
         .bad = kept["bad"].get<int64_t>()});
  }
  const int64_t trainers = std::ssize(position.steps);
  if (trainers != plan_->trainers) check_other_trainers(snapshot, trainers);
  begins_epoch_ = std::ranges::count(position.steps, 0) == trainers;
  scheduler_->resume(position);
}

// Refuses a checkpoint of another number of trainers, unless any number of trainers can read its
// streams. Otherwise warns that the order of the examples differs.
void TrainingHost::check_other_trainers(const Snapshot& snapshot, int64_t saved) const {
  const bool may_differ = plan_->reading != LeaseScheduler::Reading::kOwnShard &&
                          plan_->steps_per_epoch == Plan::kEndless &&
                          std::ranges::none_of(plan_->parts, &PartName::each_own);
  const std::string numbers =
      fmt::format("saved with --trainers {}, not {}", saved, plan_->trainers);
  if (!may_differ) snapshot.refuse(numbers + ": leave --trainers out" + kTrainAnew);
  if (plan_->eval_only) return;
  sink_.warn(base::ErrorKind::kInvalid,
             fmt::format("{}: {}: no example of the epoch is repeated or skipped, but their order "
                         "and the batches of a step differ",
                         snapshot.path, numbers));
}

rpc::NamedTensors TrainingHost::saved_part(const PartName& part, int trainer) {
  std::lock_guard lock(mutex_);
  if (!resumed_) return {};
  rpc::NamedTensors found;
  const size_t suffix = part.stored("", trainer).size();
  const store::SafetensorsFile& file = resumed_->file(part.file);
  for (const auto& [tensor, info] : file.tensors()) {
    if (!part.has(tensor, trainer)) continue;
    found[tensor.substr(0, tensor.size() - suffix)] = file.tensor(tensor);
  }
  return found;
}

void TrainingHost::load_tables() {
  std::shared_ptr<const Snapshot> snapshot;
  bool with_states = false;
  {
    std::lock_guard lock(mutex_);
    snapshot = resumed_;
    with_states = !plan_->eval_only;
  }
  if (snapshot) tables_->load(*snapshot, with_states);
}

}  // namespace distrain::job
