#include "distrain/job/training.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/trace.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/local_training.h"
#include "training_host.h"

namespace distrain::job {

namespace {

constexpr int kHost = 0;                         // the rank of the TrainingHost
constexpr double kLease_s = 0.25;                // of steps that are handed out together
constexpr int64_t kEndless = 1'000'000'000'000;  // steps: more than any job can make

rpc::To host() { return rpc::To(kHost).without_deadline(); }

PartName name_of(const std::string& name, const Part& part) {
  return {name, part.file, part.each_own};
}

}  // namespace

void Share::each_batch(int64_t n, int64_t batch_size,
                       const std::function<void(std::span<const int64_t>)>& use) const {
  for (int64_t at = first(n); at < end(n); at += batch_size) {
    std::vector<int64_t> examples(static_cast<size_t>(std::min(batch_size, end(n) - at)));
    std::iota(examples.begin(), examples.end(), at);
    use(examples);
  }
}

Plan Plan::of(const TrainerOptions& options, int64_t steps_per_epoch) {
  Plan plan;
  plan.epochs = options.epochs;
  plan.steps = options.steps;
  plan.steps_per_epoch = steps_per_epoch;
  // To clip, each step waits for the norms of all, in async mode too.
  plan.one_pace = options.mode != "async" || options.clip > 0;
  plan.eval_only = options.eval_only;
  plan.lr = options.lr;
  plan.lr_schedule = options.rule().schedule;
  plan.log_interval = options.log_interval;
  return plan;
}

Plan Plan::of_steps(const RuleOptions& options, int64_t steps) {
  Plan plan;
  plan.steps = steps;
  plan.steps_per_epoch = kEndless;
  plan.lr = options.lr;
  plan.lr_schedule = options.rule().schedule;
  if (plan.lr_schedule.counts_epochs() || plan.lr_schedule.observes()) {
    throw base::Exception(
        base::ErrorKind::kInvalid,
        "--lr-schedule " + options.lr_schedule + ": the job has neither epochs nor evaluations");
  }
  plan.log = false;
  plan.steps_at_once = 1;
  return plan;
}

data::NamedTensors named_tensors(const std::string& name, const torch::nn::Module& module) {
  data::NamedTensors named;
  for (const auto& item : module.named_parameters()) named[name + "." + item.key()] = item.value();
  for (const auto& item : module.named_buffers()) named[name + "." + item.key()] = item.value();
  return named;
}

void copy_into(const data::NamedTensors& live, const data::NamedTensors& saved) {
  const auto fail = [](const std::string& why) {
    throw base::Exception(base::ErrorKind::kBadData, why);
  };
  const at::NoGradGuard no_grad;
  for (const auto& [name, into] : live) {
    const auto it = saved.find(name);
    if (it == saved.end()) fail("no " + name);
    at::Tensor target = into;
    if (it->second.sizes() != target.sizes() || it->second.scalar_type() != target.scalar_type()) {
      fail(name + " has another shape or dtype");
    }
    target.copy_(it->second);
  }
  for (const auto& [name, tensor] : saved) {
    if (!live.contains(name)) fail("it has " + name + ", which the model has not");
  }
}

Part part_of(data::NamedTensors live, std::string file) {
  Part part = part_of_each([live = std::move(live)](int) { return live; });
  part.file = std::move(file);
  part.each_own = false;
  return part;
}

Part part_of_each(std::function<data::NamedTensors(int trainer)> live) {
  Part part;
  part.file = "state";
  part.each_own = true;
  part.take = live;
  part.give = [live](int trainer, const data::NamedTensors& saved) {
    copy_into(live(trainer), saved);
  };
  return part;
}

Part part_of_words(const std::map<std::string, std::vector<std::string>>& lists) {
  data::NamedTensors texts;
  for (const auto& [name, words] : lists) {
    std::string text;
    for (const std::string& word : words) text += word + '\n';
    texts[name] = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
    std::copy(text.begin(), text.end(), texts[name].mutable_data_ptr<uint8_t>());
  }
  Part part = part_of(std::move(texts), kVocabulary);
  part.once = true;
  return part;
}

TrainingPlan::TrainingPlan(Plan plan, EventSink& sink)
    : plan_(std::move(plan)), log_(plan_.log_interval, sink, plan_.unit, plan_.log) {}

void TrainingPlan::keep(LocalUpdates& optimizer) {
  set_lr_factors_.emplace_back([&optimizer](double factor) { optimizer.set_lr_factor(factor); });
  plan_.one_pace = plan_.one_pace || optimizer.has_replicas();  // as the group's trainers have
  Part part;
  part.file = "optimizer";
  part.once = true;
  part.take = [&optimizer](int) { return flatten(optimizer.names(), optimizer.state()); };
  part.give = [&optimizer](int, const data::NamedTensors& saved) {
    optimizer.load_state(unflatten(optimizer.names(), saved));
  };
  keep("", std::move(part));
}

void TrainingPlan::note_max(const std::string& name, int64_t value) {
  int64_t& greatest = maxima_.try_emplace(name, value).first->second;
  greatest = std::max(greatest, value);
}

Attachment TrainingPlan::attachment() const {
  Attachment attachment;
  attachment.epochs = plan_.epochs;
  attachment.steps = plan_.steps;
  attachment.steps_per_epoch = plan_.steps_per_epoch;
  attachment.take_over = !plan_.one_pace;
  attachment.eval_only = plan_.eval_only;
  attachment.lr = plan_.lr;
  attachment.lr_schedule = plan_.lr_schedule.text();
  attachment.words = plan_.unit == Unit::kWords;
  attachment.agreed = agreed_;
  attachment.alike = alike_;
  attachment.what_must_agree = plan_.what_must_agree;
  for (const auto& [name, part] : parts_) attachment.parts.push_back(name_of(name, part));
  return attachment;
}

Report TrainingPlan::close_epoch(const Task& task, const std::vector<Share>& shares) {
  Report report;
  if (plan_.log) report.steps = log_.epoch_steps();
  log_.end_epoch();
  report.loss = log_.last_loss();
  report.maxima = maxima_;
  const base::TraceScope scope("evaluate");
  const at::NoGradGuard no_grad;
  for (const Share& share : shares) {
    if (evaluate_epoch_) report.valid.add(evaluate_epoch_(share));
    if (evaluate_end_ && task.last) report.test.add(evaluate_end_(share));
  }
  return report;
}

std::map<std::string, data::NamedTensors> TrainingPlan::taken(int trainer) const {
  std::map<std::string, data::NamedTensors> files;
  for (const auto& [name, part] : parts_) {
    if (!part.each_own && trainer != 0) continue;
    const PartName full = name_of(name, part);
    for (const auto& [tensor, value] : data::on_host(part.take(trainer))) {
      const std::string stored = full.stored(tensor, trainer);
      if (!full.has(stored, trainer) || !files[part.file].emplace(stored, value).second) {
        throw base::Exception(base::ErrorKind::kInternal,
                              "a checkpoint's part '" + name + "' has the tensor " + tensor +
                                  ", which is not named by it or is another's, too");
      }
    }
  }
  return files;
}

void TrainingPlan::give(int trainer, const std::string& checkpoint,
                        const std::function<data::NamedTensors(const PartName&)>& saved) const {
  for (const auto& [name, part] : parts_) {
    if (part.once && trainer != 0) continue;
    const PartName full = name_of(name, part);
    naming_checkpoint(checkpoint, [&] {
      const data::NamedTensors tensors = saved(full);
      naming_checkpoint(part.file + ".safetensors", [&] { part.give(trainer, tensors); });
    });
  }
}

void TrainingPlan::set_lr_factors(int64_t epoch) const {
  const double factor = plan_.lr_schedule.factor(made_, epoch - 1);
  for (const auto& set : set_lr_factors_) set(factor);
}

void TrainingPlan::made(const Result& result, int64_t epoch, int64_t number) {
  const double loss = checked_loss(result.loss, epoch, number + 1);
  ++made_;
  samples_ += result.samples;
  log_.step(loss, result.samples, result.more);
}

Training::Training(Rank& rank, Plan plan)
    : TrainingPlan(std::move(plan), rank.sink()), rank_(rank) {}

void Training::keep(const std::string& name, const nn::RemoteModule<>& module) {
  Part part;
  part.once = true;
  part.take = [name, module](int) {
    data::NamedTensors named;
    for (const auto& [key, tensor] : module.state()) named[name + "." + key] = tensor;
    return named;
  };
  part.give = [name, module](int, const data::NamedTensors& saved) {
    nn::NamedTensors state;
    for (const auto& [key, tensor] : saved) state[key.substr(name.size() + 1)] = tensor;
    module.load_state(state);
  };
  keep(name, std::move(part));
}

void Training::keep(optim::DistributedOptimizer& optimizer, std::vector<std::string> parameters) {
  for (size_t i = parameters.size(); i < optimizer.size(); ++i) {
    parameters.push_back(std::to_string(i));
  }
  set_lr_factors_.emplace_back([&optimizer](double factor) { optimizer.set_lr_factor(factor); });
  Part part;
  part.file = "optimizer";
  part.take = [&optimizer, parameters](int) { return flatten(parameters, optimizer.state()); };
  part.give = [&optimizer, parameters](int trainer, const data::NamedTensors& saved) {
    const std::vector<optim::ParameterState> states = unflatten(parameters, saved);
    if (trainer == 0) return optimizer.load_state(states);
    // The shared ones are the first's to give.
    const auto own = static_cast<std::ptrdiff_t>(optimizer.local_state().size());
    optimizer.load_local_state({states.end() - own, states.end()});
  };
  keep("", std::move(part));
}

void Training::attach() {
  Attachment own = attachment();
  own.trainer = rank_.index();
  own.trainers = rank_.count();
  own.take_over = own.take_over && !rank_.has_group();
  rank_.close_groups();
  const Attached attached = rank_.agent().rpc_sync<&on_host::attach>(host(), own);
  made_ = attached.steps_made;
  log_.resume_after(made_);
  if (attached.saves && set_lr_factors_.empty() && rank_.index() == 0) {
    rank_.sink().emit("warn", {{"kind", base::kind_name(base::ErrorKind::kInvalid)},
                               {"message",
                                "the checkpoints keep no optimizer (Training::keep): a job that "
                                "goes on from one begins with fresh momentum and moments"}});
  }
  if (attached.path.empty()) return;
  give(rank_.index(), attached.path, [this](const PartName& part) {
    return rank_.agent().rpc_sync<&on_host::saved_part>(host(), part, rank_.index());
  });
}

void Training::run(const std::function<Result(const Step&)>& step) {
  attach();
  const StopSignal& stop = *rank_.job().stop;
  for (;;) {
    const auto [task, schedule] =
        rank_.agent().rpc_sync<&on_host::next>(host(), stop.requested(), reached(), wanted_);
    plan_.lr_schedule.load_state(schedule);
    if (task.kind == Task::Kind::kTrain) {
      train(task, step);
      continue;
    }
    rank_.check_groups();
    if (task.kind == Task::Kind::kEvaluate) {
      const Share share{rank_.index(), rank_.count()};
      rank_.agent().rpc_sync<&on_host::report>(host(), close_epoch(task, {share}));
    }
    if (task.kind == Task::Kind::kSave) {
      rank_.agent().rpc_sync<&on_host::contribute>(host(), taken(rank_.index()));
    }
    if (task.kind != Task::Kind::kEnd) continue;
    if (log_.epoch_steps() > 0) {
      rank_.agent().rpc_sync<&on_host::report>(host(), close_epoch(task, {}));
    }
    log_.end_epoch();
    stopped_ = task.stopped || stop.requested();
    break;
  }
  Json& fields = rank_.fields();
  fields["steps"] = log_.steps();
  fields["train_s"] = log_.train_s();
  // Trainers that go at one pace: the first speaks for all.
  if (plan_.unit == Unit::kWords && rank_.index() == 0 && log_.train_s() > 0) {
    fields["words_per_s"] = static_cast<double>(samples_ * rank_.count()) / log_.train_s();
  }
}

void Training::train(const Task& task, const std::function<Result(const Step&)>& step) {
  const base::TimePoint begun = base::Clock::now();
  if (log_.epoch() != task.epoch) log_.begin_epoch(task.epoch);
  for (int64_t number = task.step; number < task.step + task.count; ++number) {
    const base::TraceScope scope("step", "step", made_);
    set_lr_factors(task.epoch);
    made(step({task.epoch, task.shard, number, made_}), task.epoch, number);
  }
  // So many at once as take their time at the pace of the last ones, but no more than twice as
  // many: steps may come to take longer.
  const double pace = static_cast<double>(task.count) / std::max(base::seconds_since(begun), 1e-6);
  wanted_ = std::clamp(static_cast<int64_t>(pace * kLease_s), int64_t{1},
                       std::min(2 * task.count, plan_.steps_at_once));
}

}  // namespace distrain::job
