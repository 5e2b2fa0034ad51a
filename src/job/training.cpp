#include "distrain/job/training.h"

#include <cmath>

#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "host/training_host.h"

namespace distrain::job {

constexpr double kLease_s = 0.25;  // target duration of the steps of a lease
constexpr auto kShowInterval = std::chrono::milliseconds(500);
constexpr double kFarAbove = 1000;  // a loss this many times the first loss means divergence

static void add_to(data::Source::Counts& sum, data::Source::Counts more) {
  if (sum.bad_rows == 0) sum.first_bad_row = std::move(more.first_bad_row);
  sum.bad_rows += more.bad_rows;
  sum.waited_s += more.waited_s;
}

static rpc::To host() { return rpc::To(0).without_deadline(); }

Plan Plan::of(const TrainerOptions& options, int64_t steps_per_epoch) {
  Plan plan;
  const bool by_steps = options.steps > 0 &&
                        (options.epochs == 0 || options.steps < options.epochs * steps_per_epoch);
  plan.trainers = options.trainers;
  plan.epochs = options.epochs;
  plan.steps = by_steps ? options.steps : 0;
  plan.steps_per_epoch = steps_per_epoch;
  plan.take_over = options.mode == "async";
  plan.may_lose = options.mode != "sync";
  plan.eval_only = options.eval_only;
  plan.lr = options.lr;
  plan.lr_schedule = options.rule().schedule.text();
  plan.log_interval = options.log_interval;
  plan.limit = by_steps ? "--steps" : "--epochs";
  return plan;
}

Plan Plan::of_stream(const TrainerOptions& options, int64_t steps_per_epoch) {
  Plan plan = of(options, 1);
  plan.streams = true;
  plan.steps_per_epoch = steps_per_epoch > 0 ? steps_per_epoch : kEndless;
  plan.steps = options.steps;
  plan.take_over = plan.may_lose = options.mode == "async" && steps_per_epoch == 0;
  plan.limit = options.steps > 0 ? "--steps" : "--epochs";
  return plan;
}

Plan Plan::of_steps(const RuleOptions& options, int64_t steps, std::string limit) {
  Plan plan;
  plan.steps = steps;
  plan.steps_per_epoch = kEndless;
  plan.lr = options.lr;
  const optim::LearningRateSchedule schedule = options.rule().schedule;
  if (schedule.counts_epochs() || schedule.observes()) {
    base::invalid("--lr-schedule " + options.lr_schedule +
                  ": the job has neither epochs nor evaluations");
  }
  plan.lr_schedule = schedule.text();
  plan.limit = std::move(limit);
  plan.log = false;
  plan.steps_at_once = 1;
  return plan;
}

void TrainingPlan::keep(SingleProcessOptimizer& optimizer) {
  begin_step_.emplace_back(
      [&optimizer](double factor, int64_t) { optimizer.set_lr_factor(factor); });
  plan_.take_over = plan_.take_over && !optimizer.has_replicas();  // replicas must make equal steps
  const auto take = [&optimizer](int) {
    return store::copies_on_host(optim::flatten(optimizer.names(), optimizer.state()));
  };
  const auto give = [&optimizer](int, const rpc::NamedTensors& saved) {
    optimizer.load_state(optim::unflatten(optimizer.names(), saved));
  };
  keep("", {{.file = "optimizer"}, /*once=*/true, take, give});
}

void TrainingPlan::keep(const std::string& name, const table::ShardedEmbedding& tables) {
  if (!plan_.tables.empty() &&
      (plan_.table_servers != tables.servers() || plan_.local_tables != tables.local_server())) {
    base::invalid("the tables " + name + " are on other servers than the tables before them");
  }
  for (const std::string& table : tables.table_names()) plan_.tables.push_back(table);
  plan_.table_servers = tables.servers();
  plan_.local_tables = tables.local_server();
}

template <auto method, class... Args>
auto TrainingPlan::ask(const Args&... args) const {
  using R = std::invoke_result_t<decltype(method), TrainingHost&, Args...>;
  if (host_) return std::invoke(method, *host_, args...);
  return static_cast<R>(agent_->rpc_sync<rpc::of_local<method>>(host(), args...));
}

void TrainingPlan::attach() {
  plan_.parts.assign(parts_.begin(), parts_.end());
  // The job can continue without a trainer only if no saved state belongs to that trainer alone.
  const bool all_shared = !parts_.empty() && std::ranges::all_of(parts_, &Part::once);
  if (agent_) plan_.may_lose = plan_.may_lose && all_shared;
  if (plan_.streams && !open_shard_) plan_.take_over = plan_.may_lose = false;
  Attached attached;
  for (const int trainer : own_) {
    attached =
        ask<&TrainingHost::attach>(plan_, trainer, agent_ ? agent_->incarnation() : uint32_t{0});
    seats_[trainer] = attached.seat;
    if (!reads_streams()) continue;
    if (!open_shard_ && !sources_.contains(trainer)) {
      base::invalid("a plan of streams needs Training::read()");
    }
    go_to(trainer, attached.start, attached.path);
    if (attached.begins_epoch) begins_epoch_.insert(trainer);
  }
  total_ = begun_at_ = attached.steps_made;
  process_.sink().used(plan_.used);
  if (attached.is_late && attached.saves) process_.job().stop->arm();  // rank 0 armed all others
  if (attached.saves && begin_step_.empty() && own_.front() == 0) {
    process_.sink().warn(base::ErrorKind::kInvalid,
                         "the checkpoints keep no optimizer (Training::keep): a job that goes on "
                         "from one begins with fresh momentum and moments");
  }
  if (attached.path.empty()) return;
  if (!plan_.tables.empty() && own_.front() == 0) ask<&TrainingHost::load_tables>();
  for (const int trainer : own_) {
    for (const Part& part : parts_) {
      if (part.once && trainer != 0) continue;
      store::naming_file(attached.path, [&] {
        const auto tensors = ask<&TrainingHost::saved_part>(PartName(part), trainer);
        store::naming_file(part.file + ".safetensors", [&] { part.give(trainer, tensors); });
      });
    }
  }
}

Demand TrainingPlan::demand(int trainer, int64_t wanted) {
  constexpr auto kPause = std::chrono::milliseconds(100);  // between looks for a signal
  Demand demand(wanted);
  if (!reads_streams()) return demand;
  const base::TraceScope scope("data");
  const auto reading = sources_.find(trainer);
  if (reading != sources_.end()) demand.position = reading->second->position();
  const bool is_done =
      plan_.steps > 0 && total_ >= plan_.steps && !(plan_.take_over && plan_.trainers > 1);
  if (!asks_for_steps_ || is_done || reached()) return demand;
  if (reading == sources_.end()) {
    demand.ready = 0;
    return demand;
  }
  data::Source& source = *reading->second;
  const auto await = [&] {
    while (!source.await(kPause)) {
      if (process_.job().stop->requested()) return false;
    }
    return true;
  };
  if (!await()) return demand;
  if (begins_epoch_.erase(trainer) > 0 && source.ready() == 0) {
    has_no_pass_left_ = source.has_one_pass();
    if (has_no_pass_left_) return demand;
    source.begin({.epoch = source.position().epoch + 1});
    if (!await()) return demand;
  }
  demand.ready = source.ready();
  demand.position = source.position();
  return demand;
}

void TrainingPlan::go_to(int trainer, const ShardStart& start, const std::string& checkpoint) {
  if (start.shards == 0) return;  // this trainer reads no shard now
  begins_epoch_.erase(trainer);
  std::shared_ptr<data::Source>& source = sources_[trainer];
  if (open_shard_) {
    if (source) add_to(closed_, source->counts());
    source = open_shard_(start.shard, start.shards);
  }
  if (checkpoint.empty()) {
    source->begin(start.from);
  } else {
    store::naming_file(checkpoint, [&] { source->begin(start.from); });
  }
  for (int64_t i = 0; i < start.skip; ++i) {
    if (source->ready() == 0) base::bad_data("the data has changed: a shard has ended early");
    source->next();
  }
}

void TrainingPlan::make(const Step& what, int64_t with_data, const std::function<Result()>& step) {
  const base::TraceScope scope("step", "step", steps_made());
  if (epoch_ != what.epoch) {
    epoch_ = what.epoch;
    epoch_start_ = last_line_ = base::Clock::now();
    if (run_steps() == 0) first_ = epoch_start_;
    epoch_steps_ = epoch_samples_ = epoch_weight_ = line_samples_ = 0;
    epoch_loss_ = 0;
  }
  const double factor = lr_schedule_.factor(steps_made(), what.epoch - 1);
  for (const auto& begin : begin_step_) begin(factor, run_steps() + 1);
  const Result result = step();
  const double loss = checked_loss(result.loss, what.epoch, what.number + 1);
  samples_ += result.samples;
  const int64_t steps = result.steps * with_data;
  steps_ += steps;
  process_.job().progress->add(steps, first_);
  ++total_;
  if (with_data > 0) log_step(result, with_data, loss, plan_.lr * factor);
  show(what.epoch, loss, plan_.lr * factor, result.progress);
}

/// Reports progress at most twice a second, so most calls only read the clock.
void TrainingPlan::show(int64_t epoch, double loss, double lr, const Json& more) {
  const base::TimePoint now = base::Clock::now();
  if (now - shown_ < kShowInterval) return;
  shown_ = now;
  const bool is_endless = plan_.steps == 0 && plan_.steps_per_epoch == Plan::kEndless;
  const int64_t steps = plan_.steps > 0 ? plan_.steps
                        : is_endless    ? 0
                                        : plan_.epochs * plan_.steps_per_epoch;
  Json fields{
      {"epoch", epoch},           {"epochs", plan_.epochs},     {"step", total_}, {"steps", steps},
      {"processes", processes()}, {"trainers", plan_.trainers}, {"loss", loss},   {"lr", lr}};
  fields.update(more);
  process_.sink().progress(fields);
}

void TrainingPlan::log_step(const Result& result, int64_t with_data, double loss, double lr) {
  const int64_t weight = plan_.streams ? with_data : 1;
  ++epoch_steps_;
  epoch_samples_ += result.samples;
  line_samples_ += result.samples;
  epoch_loss_ += loss * static_cast<double>(weight);
  epoch_weight_ += weight;
  if (run_steps() == 1) first_loss_ = loss;
  if (!plan_.log) return;
  const double rate = static_cast<double>(line_samples_) / base::seconds_since(last_line_);
  const auto fields = [this, epoch = epoch_, step = total_, loss, lr, rate, more = result.more] {
    Json all{{"epoch", epoch}, {"step", step}, {"loss", loss}, {"lr", lr}};
    all[std::string(counted(plan_.unit)) + "_per_s"] = rate;
    all.update(more);
    return all;
  };
  if (!lines_.add(total_, fields)) return;
  last_line_ = base::Clock::now();
  line_samples_ = 0;
}

void TrainingPlan::end_epoch(bool is_last, bool is_partial) {
  if (is_last) lines_.end();
  if (epoch_ == 0) return;
  if (epoch_steps_ > 0) {
    train_s_ = base::seconds_since(first_);
    last_loss_ = epoch_loss_ / static_cast<double>(epoch_weight_);
  }
  Json fields{{"epoch", epoch_}, {"loss", epoch_steps_ > 0 ? Json(last_loss_) : Json()}};
  if (plan_.unit == Unit::kWords) {
    fields["perplexity"] = epoch_steps_ > 0 ? Json(std::exp(last_loss_)) : Json();
  }
  fields["steps"] = epoch_steps_;
  fields[counted(plan_.unit)] = epoch_samples_;
  fields["wall_s"] = base::seconds_since(epoch_start_);
  if (is_partial) fields["partial"] = true;
  add_data_counts(fields);
  if (plan_.log) process_.sink().emit("epoch", fields);
  epoch_ = epoch_steps_ = epoch_samples_ = epoch_weight_ = 0;
}

data::Source::Counts TrainingPlan::data_counts() const {
  data::Source::Counts sum = closed_;
  for (const auto& [trainer, source] : sources_) add_to(sum, source->counts());
  return sum;
}

/// Adds the time that the epoch's steps waited for streamed data, and the skipped rows, to
/// `fields`.
void TrainingPlan::add_data_counts(Json& fields) {
  if (sources_.empty()) return;
  const data::Source::Counts counts = data_counts();
  fields["data_wait_s"] = counts.waited_s - std::exchange(waited_s_, counts.waited_s);
  if (counts.bad_rows == 0) return;
  fields["bad_rows"] = counts.bad_rows;
  if (std::exchange(told_of_bad_rows_, true)) return;
  process_.sink().warn(base::ErrorKind::kBadData,
                       fmt::format("{} rows of the data skipped so far; the first is {}",
                                   counts.bad_rows, counts.first_bad_row));
}

void TrainingPlan::meet(const Task& task) {
  if (task.kind == Task::Kind::kEvaluate) {
    ask<&TrainingHost::report>(seat(own_.front()), close_epoch(task));
    if (!task.partial) begins_epoch_.insert(own_.begin(), own_.end());
  }
  if (task.kind == Task::Kind::kEnd) end(task);
  if (task.kind != Task::Kind::kSave) return;
  if (host_) {
    host_->await_save().wait();
  } else {
    agent_->rpc_sync<rpc::of_local<&TrainingHost::await_save>>(host());
  }
  for (const int trainer : own_) {
    const bool is_first = agent_ ? task.part == 0 : trainer == own_.front();
    std::vector<HeldPart> held;
    for (const Part& part : parts_) {
      if (!part.each_own && !is_first) continue;
      Held tensors = part.take(trainer);
      if (agent_) tensors.leave_at(*agent_);  // keeps them here until rank 0 fetches them
      held.push_back({part, trainer, std::move(tensors)});
    }
    ask<&TrainingHost::contribute>(seat(trainer), held);
  }
}

/// Ends the epoch. Returns its report, with this process's evaluation if `task` is kEvaluate.
Report TrainingPlan::close_epoch(const Task& task) {
  Report report;
  if (plan_.log) report.steps = epoch_weight_;
  end_epoch(task.last || task.stopped || task.kind == Task::Kind::kEnd, task.partial);
  if (own_.front() == 0 && !has_warned_ && last_loss_ > kFarAbove * std::max(1.0, first_loss_)) {
    has_warned_ = true;
    process_.sink().warn(
        base::ErrorKind::kNotFinite,
        fmt::format("the loss grows: {:.3g} in the last epoch, {:.3g} in the first step: try a "
                    "smaller --lr",
                    last_loss_, first_loss_));
  }
  report.loss = last_loss_;
  report.maxima = maxima_;
  report.bad_rows = data_counts().bad_rows;
  if (task.kind != Task::Kind::kEvaluate) return report;
  const base::TraceScope scope("evaluate");
  const at::NoGradGuard no_grad;
  const Share share = agent_ ? Share{task.part, task.parts} : Share{};
  if (evaluate_epoch_) report.valid = evaluate_epoch_(share);
  if (evaluate_end_ && task.last) report.test = evaluate_end_(share);
  return report;
}

void TrainingPlan::end(const Task& task) {
  if (epoch_steps_ > 0) ask<&TrainingHost::report>(seat(own_.front()), close_epoch(task));
  end_epoch(true, task.partial);
  stopped_ = task.stopped || process_.job().stop->requested();
  Json& fields = process_.fields();
  fields["steps"] = steps_;
  fields["train_s"] = train_s_;
  // All trainers of a job with words make equal numbers of steps, so trainer 0 knows their rate.
  if (plan_.unit == Unit::kWords && own_.front() == 0 && train_s_ > 0) {
    fields["words_per_s"] = static_cast<double>(samples_ * processes()) / train_s_;
  }
}

void Training::keep(const std::string& name, const nn::RemoteModule<>& module) {
  const auto take = [name, module](int) {
    Held held({module.snapshot(name + ".")});
    for (const auto& each : module.parameter_names()) held.trained.push_back(name + "." + each);
    return held;
  };
  const auto give = [name, module](int, const rpc::NamedTensors& saved) {
    rpc::NamedTensors state;
    for (const auto& [key, tensor] : saved) state[key.substr(name.size() + 1)] = tensor;
    module.load_state(state);
  };
  keep(name, {{}, /*once=*/true, take, give});
}

void Training::keep(optim::DistributedOptimizer& optimizer, std::vector<std::string> parameters) {
  for (size_t i = parameters.size(); i < optimizer.size(); ++i) {
    parameters.push_back(std::to_string(i));
  }
  begin_step_.emplace_back([&optimizer](double factor, int64_t number) {
    optimizer.set_lr_factor(factor);
    optimizer.set_step_number(number);
  });
  settle_.emplace_back([&optimizer] { optimizer.settle(); });
  begin_lease_.emplace_back(std::bind_front(&optim::DistributedOptimizer::begin_steps, &optimizer));
  const auto take = [&optimizer, parameters](int) { return optimizer.snapshot(parameters); };
  const auto give = [&optimizer, parameters](int trainer, const rpc::NamedTensors& saved) {
    const std::vector<optim::ParameterState> states = optim::unflatten(parameters, saved);
    if (trainer == 0) return optimizer.load_state(states);
    // Trainer 0 restores the shared parameters. Other trainers load only their own state.
    const auto own = static_cast<std::ptrdiff_t>(optimizer.own_state().size());
    optimizer.load_own_state({states.end() - own, states.end()});
  };
  keep("", {{.file = "optimizer"}, /*once=*/!optimizer.has_own(), take, give});
}

void Training::run(const std::function<Result(const Step&)>& step) {
  plan_.take_over = plan_.take_over && !rank_.has_group();
  plan_.may_lose = plan_.may_lose && !rank_.has_group();
  rank_.close_groups();
  attach();
  for (Task::Kind last = Task::Kind::kTrain; last != Task::Kind::kEnd;) {
    const Demand wish = demand(rank_.index(), wanted_);
    const bool stop = rank_.job().stop->requested();
    const auto [task, schedule] = rank_.agent().rpc_sync<rpc::of_local<&TrainingHost::next>>(
        host(), seat(rank_.index()), stop, reached(), wish);
    lr_schedule_.load_state(schedule);
    last = task.kind;
    asks_for_steps_ = task.kind == Task::Kind::kTrain;
    if (task.kind == Task::Kind::kTrain) {
      train(task, step);
    } else {
      rank_.check_groups();
      meet(task);
    }
  }
}

void Training::train(const Task& task, const std::function<Result(const Step&)>& step) {
  go_to(rank_.index(), task.start);
  if (task.count == 0) return;
  const base::TimePoint begun = base::Clock::now();
  for (const auto& begin : begin_lease_) begin(mean_factor(task), task.has_data);
  for (int64_t number = task.step; number < task.step + task.count; ++number) {
    const Step what = {task.epoch,
                       task.shard,
                       number,
                       steps_made(),
                       task.step + task.count - 1 - number,
                       task.has_data,
                       source_of(rank_.index())};
    make(what, task.has_data ? 1 : 0, [&] { return step(what); });
  }
  for (const auto& settle : settle_) settle();
  // Requests as many steps as take kLease_s at the current pace, but at most twice as many as
  // before, because steps may become slower.
  const double pace = static_cast<double>(task.count) / std::max(base::seconds_since(begun), 1e-6);
  const int64_t most = 2 * std::max(task.count, plan_.streams ? wanted_ / 2 : 0);
  wanted_ = std::clamp(static_cast<int64_t>(pace * kLease_s), int64_t{1},
                       std::min(most, plan_.steps_at_once));
}

}  // namespace distrain::job
