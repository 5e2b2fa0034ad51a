#include "host.h"

#include <ATen/Functions.h>

#include "distrain/base/error.h"

namespace distrain::scenario {

namespace {

constexpr double kStallFactor = 4;  // by which the learning rate is divided

std::string state_name(const char* what, int trainer) {
  return std::string(what) + "." + std::to_string(trainer);
}

}  // namespace

RnnHost::RnnHost(const RnnOptions& options, const job::Job& job, job::EventSink& sink)
    : options_(options),
      sink_(sink),
      stop_(job.stop),
      checkpoints_(options.checkpoint, job, sink),
      lr_(options.lr) {}

const std::vector<std::string>& RnnHost::parameter_names() {
  static const std::vector<std::string> kNames = {"encoder.weight", "decoder.weight",
                                                  "decoder.bias"};
  return kNames;
}

void RnnHost::build(std::shared_ptr<models::WordEmbedding> embedding,
                    std::shared_ptr<models::Decoder> decoder, const RnnDataInfo& data) {
  embedding_ = std::move(embedding);
  decoder_ = std::move(decoder);
  data_ = data;
}

void RnnHost::start(job::OptimizerAccess optimizer) {
  optimizer_ = std::move(optimizer);
  job::Schedule::Hooks hooks;
  hooks.on_evaluated = [this](bool whole_epoch) { on_evaluated(whole_epoch); };
  hooks.on_save = [this](const job::Position& position) { save(position); };
  hooks.on_end = [this](bool stopped) {
    std::lock_guard lock(mutex_);
    stopped_ = stopped;
    stop_->disarm(stopped);
  };
  schedule_.emplace(schedule_terms(options_, data_), std::move(hooks));
  if (const auto snapshot = checkpoints_.load()) resume(*snapshot);
  if (checkpoints_.saving()) stop_->arm();  // where rank 0 itself has not come so far
}

data::NamedTensors RnnHost::named_parameters() const {
  data::NamedTensors named = embedding_->named_parameters();
  named.merge(decoder_->named_parameters());
  return named;
}

void RnnHost::resume(const job::Snapshot& snapshot) {
  const job::Json agreed = must_agree(options_, data_);
  for (const auto& [key, value] : agreed.items()) snapshot.expect(key.c_str(), value);
  // The LSTM's are the trainers' to take and to check.
  job::Snapshot ends = snapshot;
  data::NamedTensors& model = ends.files["model"];
  RnnTrainerState first;
  for (auto it = model.begin(); it != model.end();) {
    const bool lstm = it->first.starts_with("rnn.");
    if (lstm) first.lstm.insert(*it);
    it = lstm ? model.erase(it) : std::next(it);
  }
  ends.copy_into("model", named_parameters());
  data::NamedTensors optimizer;
  for (const auto& [name, tensor] : snapshot.file("optimizer")) {
    (name.starts_with("rnn.") ? first.optimizer : optimizer)[name] = tensor;
  }
  snapshot.checked([&] {
    optimizer_.set(job::unflatten(parameter_names(), optimizer));
    const job::Position position =
        job::Position::from_json(snapshot.state.value("position", job::Json()), options_.trainers);
    const data::NamedTensors& states = snapshot.file("state");
    for (int t = 0; t < options_.trainers; ++t) {
      RnnTrainerState& trainer = trainers_[t];
      if (t == 0) trainer = first;
      trainer.steps = position.total / options_.trainers;
      trainer.path = snapshot.path;
      const auto take = [&](const char* what) {
        const auto it = states.find(state_name(what, t));
        if (it == states.end()) snapshot.refuse("no " + state_name(what, t));
        const at::Tensor& kept = it->second;
        const std::vector<int64_t> shape = {options_.nlayers, options_.batch_size, options_.nhid};
        const bool none = kept.numel() == 0 && position.steps[0] == 0;  // at an epoch's beginning
        if (kept.scalar_type() != at::kFloat || (!none && kept.sizes() != shape)) {
          snapshot.refuse(state_name(what, t) + " has another shape or dtype");
        }
        return none ? at::Tensor() : kept;
      };
      trainer.state = {take("hidden"), take("cell")};
    }
    if (states.size() != trainers_.size() * 2) snapshot.refuse("states of further trainers");
    const job::Json& state = snapshot.state;
    const job::Json lr = state.value("lr", job::Json()), best = state.value("best", job::Json());
    if (!lr.is_number()) snapshot.refuse("no lr");
    // With another --lr than the saved run began with, the user's holds.
    if (state.value("base_lr", job::Json()) == job::Json(options_.lr)) lr_ = lr.get<double>();
    if (best.is_number()) best_ = best.get<double>();
    schedule_->resume(position);
  });
  has_resumed_ = true;
}

std::optional<RnnTrainerState> RnnHost::resumed(int trainer) const {
  std::lock_guard lock(mutex_);
  if (!has_resumed_) return std::nullopt;
  RnnTrainerState state = trainers_.at(trainer);
  state.lstm = trainers_.at(0).lstm;
  state.optimizer = trainers_.at(0).optimizer;
  return state;
}

base::Future<RnnTask> RnnHost::next(int trainer, bool stop, base::Executor& executor) {
  return schedule_->next(trainer, stop || stop_->requested())
      .then(executor, [this](const job::Task& task) {
        std::lock_guard lock(mutex_);
        return RnnTask{task, lr_};
      });
}

void RnnHost::report(const RnnReport& report) {
  std::lock_guard lock(mutex_);
  total_.training.add(report.training);
  total_.validation.add(report.validation);
}

void RnnHost::on_evaluated(bool whole_epoch) {
  std::lock_guard lock(mutex_);
  if (total_.training.words > 0) {
    metrics_["loss"] = total_.training.mean();
    metrics_["perplexity"] = total_.training.fields()["perplexity"];
  }
  if (total_.validation.words > 0) {
    job::Json fields = total_.validation.fields();
    fields["lr"] = lr_;
    sink_.emit("eval", fields);
    metrics_["perplexity"] = fields["perplexity"];
    const double loss = total_.validation.mean();
    job::check_finite_loss(loss);
    if (whole_epoch && loss >= best_) lr_ /= kStallFactor;
    if (whole_epoch && loss < best_) best_ = loss;
  }
  total_ = {};
}

void RnnHost::contribute(int trainer, RnnTrainerState state) {
  std::lock_guard lock(mutex_);
  trainers_[trainer] = std::move(state);
}

void RnnHost::save(const job::Position& position) {
  std::lock_guard lock(mutex_);
  job::Snapshot snapshot;
  snapshot.step = position.total / options_.trainers;
  snapshot.state = must_agree(options_, data_);
  snapshot.state["position"] = position.to_json();
  snapshot.state["lr"] = lr_;
  snapshot.state["base_lr"] = options_.lr;
  if (best_ < std::numeric_limits<double>::max()) snapshot.state["best"] = best_;
  snapshot.files["model"] = named_parameters();
  snapshot.files["optimizer"] = job::flatten(parameter_names(), optimizer_.get());
  for (const auto& [trainer, mine] : trainers_) {
    // None before its first batch.
    const auto kept = [](const at::Tensor& t) { return t.defined() ? t : at::zeros({0}); };
    snapshot.files["state"][state_name("hidden", trainer)] = kept(mine.state.hidden);
    snapshot.files["state"][state_name("cell", trainer)] = kept(mine.state.cell);
  }
  for (const auto& [name, tensor] : trainers_.at(0).lstm) snapshot.files["model"][name] = tensor;
  for (const auto& [name, tensor] : trainers_.at(0).optimizer) {
    snapshot.files["optimizer"][name] = tensor;
  }
  checkpoints_.save(snapshot);
}

bool RnnHost::stopped() const {
  std::lock_guard lock(mutex_);
  return stopped_;
}

void RnnHost::add_to(job::Outcome& outcome) const {
  std::lock_guard lock(mutex_);
  outcome.fields.update(metrics_);
  outcome.stopped = stopped_;
  outcome.message = checkpoints_.last_saved();
}

}  // namespace distrain::scenario
