#include "host/training_host.h"

#include <numeric>

#include <ATen/Parallel.h>
#include <fmt/format.h>

namespace distrain::job {

namespace {

/// Describes how `other`, the plan of `rank`, differs from `first`; empty if the plans agree.
std::string difference(const Plan& first, const Plan& other, int rank) {
  const std::string who = "trainer " + std::to_string(rank);
  const auto read = [](const Plan& p) { return std::tie(p.steps_per_epoch, p.agreed, p.alike); };
  if (read(first) != read(other)) {
    return who + " has read other data than the others: " + other.what_must_agree +
           " must be the same";
  }
  const auto rest = [](const Plan& p) {
    return std::tie(p.trainers, p.epochs, p.steps, p.eval_only, p.lr, p.lr_schedule, p.unit,
                    p.streams, p.reading, p.average_over_data);
  };
  if (rest(first) != rest(other)) return who + " has different training options from the others";
  const auto kept = [](const Plan& p) { return std::tie(p.parts, p.tables, p.table_servers); };
  if (kept(first) != kept(other)) return who + " keeps different parts from the others";
  if (first.take_over == other.take_over && first.may_lose == other.may_lose) return {};
  return who + " has a group of the trainers and others have none, or the other way round";
}

struct LossPreparation {
  rpc::Agent& agent;
  EventSink& sink;
  void prepare(bool may_be_lost) {
    optim::keep_updaters(agent);
    if (may_be_lost) sink.may_be_lost();
  }
  void rest(uint32_t process) { optim::rest(agent, process); }
};

/// Calls `ask` for each rank and awaits the answers. Omits lost ranks that the job can spare.
void ask_all(rpc::Agent& agent, const std::function<base::Future<void>(int rank)>& ask) {
  std::vector<std::pair<int, base::Future<void>>> asked;
  for (int rank = 0; rank < agent.world_size(); ++rank) {
    if (!agent.is_done_without(rank)) asked.emplace_back(rank, ask(rank));
  }
  for (const auto& [rank, answer] : asked) {
    const auto& result = answer.wait_result();
    if (!result.ok() && !agent.is_done_without(rank)) throw base::Exception(result.error());
  }
}

/// Disarms the StopSignal of all ranks, so that a later signal ends a rank at once. If a signal has
/// stopped the job (`stopped`) or stops it concurrently, ranks that get that signal late ignore it.
void end_on_all(rpc::Agent* agent, StopSignal& stop, bool stopped) {
  if (!agent) {
    stop.disarm(stopped);
    return;
  }
  std::atomic<bool> any{false};
  ask_all(*agent, [&](int rank) {
    return agent->rpc_async<rpc::of_local<&StopSignal::disarm>>(rank, stopped)
        .then(agent->inline_executor(), [&any](bool told) { any = any || told; });
  });
  if (any && !stopped) end_on_all(agent, stop, true);  // a signal came after the last check
}

}  // namespace

TrainingHost::TrainingHost(std::string cmd, RankBody::Known known, rpc::Agent* agent,
                           const Job& job, EventSink& sink)
    : cmd_(std::move(cmd)),
      known_(std::move(known)),
      agent_(agent),
      sink_(sink),
      stop_(job.stop),
      tables_(std::make_shared<TableParts>(agent, sink)),
      checkpoints_(
          known_.checkpoint, job, sink,
          [this](const base::Error& error) {
            // A save that fails because a rank is lost does not end the job: on_rank_lost() handles
            // the loss. If no save follows, Checkpoints::finish() throws the error at the end.
            if (error.kind == base::ErrorKind::kPeerLost) {
              sink_.warn(error.kind, "a checkpoint was abandoned: " + error.message);
            } else if (LeaseScheduler* const scheduler = current_) {
              scheduler->fail(error);
            }
          },
          tables_.get()) {
  if (agent_) agent_->provide(tables_);
}

void TrainingHost::expose(rpc::Agent& agent, EventSink& sink) {
  agent.provide(std::make_shared<LossPreparation>(LossPreparation{agent, sink}));
  TableParts::expose(agent);
  expose_held_parts(agent);
  agent.expose<rpc::of_local<&TrainingHost::load_tables>>("job.load_all_tables");
  agent.expose<rpc::of_local<&LossPreparation::prepare>>("job.prepare_for_losses");
  agent.expose<rpc::of_local<&LossPreparation::rest>>("job.rest");
  agent.expose<rpc::of_local<&TrainingHost::attach>>("job.attach");
  agent.expose<rpc::of_local<&TrainingHost::saved_part>>("job.saved_part");
  agent.expose<rpc::of_local<&TrainingHost::next>>("job.next");
  agent.expose<rpc::of_local<&TrainingHost::report>>("job.report");
  agent.expose<rpc::of_local<&TrainingHost::await_save>>("job.await_save");
  agent.expose<rpc::of_local<&TrainingHost::contribute>>("job.contribute");
  agent.expose<rpc::of_local<&TrainingHost::request_save>>("job.request_save");
}

Attached TrainingHost::attach(const Plan& plan, int trainer, uint32_t incarnation) {
  std::lock_guard lock(mutex_);
  if (failed_) throw base::Exception(*failed_);
  const int rank = plan.first_rank + trainer;
  const auto refuse_if = [rank](bool wrong, base::ErrorKind kind, const std::string& why) {
    if (wrong) throw base::Exception(base::Error{kind, why, rank, "attach"});
  };
  refuse_if(
      plan.trainers < 1 || trainer < 0 || trainer >= plan.trainers || plan.steps_per_epoch < 1,
      base::ErrorKind::kInvalid, "rank " + std::to_string(rank) + " has an invalid plan");
  refuse_if(trainers_.contains(trainer), base::ErrorKind::kInvalid,
            "a job has one Training, and a rank runs it once");
  const std::string other = plan_ ? difference(*plan_, plan, rank) : "";
  refuse_if(!other.empty(), base::ErrorKind::kBadData, other);
  if (!plan_) begin(plan);
  Attached attached{resumed_ ? resumed_->path : "", scheduler_->steps_of_each(),
                    checkpoints_.saving(), trainer};
  if (const auto before = lost_before_.find(trainer); before != lost_before_.end()) {
    refuse_if(incarnation < before->second, base::ErrorKind::kPeerLost, "this rank is lost");
    attached.seat = scheduler_->take_seat(trainer);
    attached.is_late = true;
    untried_[trainer] = 0;
    const Json fields{{"returned_rank", rank},
                      {"returned_role", agent_->worker(rank).name},
                      {"incarnation", incarnation}};
    agent_->executor().post(
        [this, self = shared_from_this(), fields] { sink_.emit("returned", fields); });
  }
  attached.start = scheduler_->start_of(trainer);
  const data::StreamPosition& from = attached.start.from;
  attached.begins_epoch = begins_epoch_ && from != data::StreamPosition{.epoch = from.epoch};
  trainers_.emplace(trainer, attached.seat);
  return attached;
}

void TrainingHost::begin(const Plan& plan) {
  plan_ = plan;
  plan_->save = checkpoints_.saving() && !plan.eval_only;
  plan_->save_every = known_.checkpoint.every;
  lr_schedule_ = optim::LearningRateSchedule::parse(plan.lr_schedule);
  may_lose_ = plan.may_lose && agent_ && plan.trainers > 1;
  tables_->set(plan.tables, plan.table_servers, plan.local_tables);
  current_ = nullptr;
  LeaseScheduler::Hooks hooks;
  hooks.on_begin = [this] {
    {
      std::lock_guard lock(mutex_);
      resumed_.reset();
    }
    // From here on a signal makes the job save and end, because there is something to save.
    if (plan_->save && !agent_) stop_->arm();
    if (plan_->save && agent_) {
      ask_all(*agent_, [this](int rank) {
        return agent_->rpc_async<rpc::of_local<&StopSignal::arm>>(rank);
      });
    }
    if (!may_lose_) return;
    // From here on the job survives the loss of a trainer.
    ask_all(*agent_, [this](int rank) {
      return agent_->rpc_async<rpc::of_local<&LossPreparation::prepare>>(
          rank, rank != 0 && trainer_of(rank).has_value());
    });
    go_on_without_any(true);
  };
  hooks.on_evaluated = std::bind_front(&TrainingHost::on_evaluated, this);
  hooks.on_save = std::bind_front(&TrainingHost::save, this);
  hooks.on_end = [this](bool stopped) {
    if (may_lose_) go_on_without_any(false);  // no replacement may join any more
    checkpoints_.finish();
    if (plan_->save) end_on_all(agent_, *stop_, stopped);
  };
  hooks.on_again = [this] {
    std::lock_guard lock(mutex_);
    total_.valid = total_.test = {};
    gathered_.clear();
    saving_since_.reset();
  };
  hooks.on_rest = std::bind_front(&TrainingHost::rest, this);
  scheduler_.emplace(*plan_, std::move(hooks));
  if (plan.eval_only) scheduler_->finish();
  try {
    load();
  } catch (...) {
    plan_.reset();  // makes the next trainer's attach() call begin() again and get the same error
    throw;
  }
  current_ = &*scheduler_;
  sink_.used(plan.used);
  if (!resumed_ || plan.eval_only || !scheduler_->over()) return;
  sink_.warn(base::ErrorKind::kInvalid,
             fmt::format("{}, step {}: nothing is left to train", resumed_->path, resumed_->step) +
                 (plan.limit.empty() ? "" : " without a larger " + plan.limit));
}

// Lets the job continue when a trainer other than rank 0 is lost. `may_return` allows replacements.
void TrainingHost::go_on_without_any(bool may_return) const {
  const int least = known_.min_trainers;
  std::vector<int> ranks(static_cast<size_t>(plan_->trainers));
  std::iota(ranks.begin(), ranks.end(), plan_->first_rank);
  agent_->go_on_without(ranks, least,
                        "fewer trainers are left than --min-trainers " + std::to_string(least),
                        may_return);
}

/// Tells all ranks not to wait for `trainer` until its next step. Ignores the answers, because a
/// call fails only if the called rank is lost, and a lost rank waits for nobody.
void TrainingHost::rest(int trainer) const {
  if (!may_lose_) return;
  const int rank = plan_->first_rank + trainer;
  const uint32_t process = rpc::process_number(rank, agent_->worker(rank).incarnation);
  for (int other = 0; other < agent_->world_size(); ++other) {
    if (!agent_->is_here(other)) continue;
    static_cast<void>(agent_->rpc_async<rpc::of_local<&LossPreparation::rest>>(other, process));
  }
}

// Throws unless `seat` is that of the trainer's current process, which must not be lost.
void TrainingHost::check_seat_locked(Seat seat) const {
  const auto its = trainers_.find(seat.trainer);
  if (its != trainers_.end() && its->second.before == seat.before) return;
  const std::string who = "trainer " + std::to_string(seat.trainer);
  if (its == trainers_.end() && !lost_before_.contains(seat.trainer)) {
    base::invalid(who + " asks for steps, but trains nothing");
  }
  throw base::Exception(base::ErrorKind::kPeerLost, who + " is lost");
}

base::Future<NextTask> TrainingHost::next(Seat seat, bool stop, bool last, Demand demand) {
  {
    std::lock_guard lock(mutex_);
    check_seat_locked(seat);
    // The second request of a replacement means that the replacement has finished a task.
    const auto untried = untried_.find(seat.trainer);
    if (untried != untried_.end() && untried->second++ > 0) {
      agent_->note_of_use(plan_->first_rank + seat.trainer);
      untried_.erase(untried);
    }
  }
  if (last) scheduler_->finish();
  demand.wanted = std::max<int64_t>(demand.wanted, 1);
  return scheduler_->next(seat, stop || stop_->requested(), demand)
      .then(executor_, [this](const Task& task) {
        std::lock_guard lock(mutex_);
        if (task.kind == Task::Kind::kSave && !saving_since_) saving_since_ = base::Clock::now();
        return NextTask{task, lr_schedule_.state()};
      });
}

void TrainingHost::on_rank_lost(const rpc::Loss& loss) {
  std::optional<int> trainer;
  {
    std::lock_guard lock(mutex_);
    if (may_lose_ && loss.job_goes_on) trainer = trainer_of(loss.rank);
    if (!trainer) failed_ = loss.error;
    if (!scheduler_) return;
  }
  if (!trainer) return scheduler_->fail(loss.error);
  // Number of the lost trainer's last step that updated this rank's parameters, if known.
  const auto made = optim::last_step_of(*agent_, loss.process());
  bool was_there = false;  // true if the lost process had attached
  {
    std::lock_guard lock(mutex_);
    lost_before_[*trainer] = loss.incarnation + 1;
    ++lost_;
    was_there = trainers_.erase(*trainer) > 0;
    untried_.erase(*trainer);
    lost_bad_rows_ += std::exchange(bad_rows_[*trainer], 0);
  }
  const LeaseScheduler::Lost lost =
      was_there ? scheduler_->lose(*trainer, made) : LeaseScheduler::Lost{};
  {
    std::lock_guard lock(mutex_);
    lost_steps_ += lost.made;
  }
  // Runs on the executor, because writing the line and entering the next phase may take long.
  agent_->executor().post([this, self = shared_from_this(), loss, lost] {
    sink_.emit("lost", {{"lost_rank", loss.rank},
                        {"lost_role", agent_->worker(loss.rank).name},
                        {"incarnation", loss.incarnation},
                        {"kind", base::kind_name(loss.error.kind)},
                        {"cause", loss.error.message},
                        {"steps_made", lost.made},
                        {"steps_back", lost.back},
                        {"steps_in_doubt", lost.in_doubt},
                        {"trainers_left", scheduler_->trainers_left()}});
    scheduler_->go_on();
  });
}

void TrainingHost::report(Seat seat, const Report& report) {
  std::lock_guard lock(mutex_);
  check_seat_locked(seat);
  total_.loss += report.loss * static_cast<double>(report.steps);
  total_.steps += report.steps;
  total_.valid.add(report.valid);
  total_.test.add(report.test);
  if (report.bad_rows > 0) {
    bad_rows_[seat.trainer] = report.bad_rows;
    int64_t sum = lost_bad_rows_;
    for (const auto& [trainer, rows] : bad_rows_) sum += rows;
    metrics_["bad_rows"] = sum;
  }
  for (const auto& [name, value] : report.maxima) {
    metrics_[name] = std::max(value, metrics_.value(name, value));
  }
}

void TrainingHost::on_evaluated(const Position& position, bool whole_epoch) {
  std::lock_guard lock(mutex_);
  add_loss(metrics_);
  tell_evaluation("valid", total_.valid, position);
  tell_evaluation("test", total_.test, position);
  if (total_.valid.samples + total_.test.samples == 0 && plan_->eval_only) {
    base::invalid("--eval-only: the job has no data to evaluate on");
  }
  if (total_.valid.samples > 0) {
    // Only the evaluation of a whole epoch counts, so that a stop does not affect the schedule.
    if (whole_epoch) lr_schedule_.observe(total_.valid.loss());
  } else if (lr_schedule_.observes() && whole_epoch && !told_of_schedule_) {
    told_of_schedule_ = true;
    sink_.warn(base::ErrorKind::kInvalid,
               "--lr-schedule " + plan_->lr_schedule + " has no effect: no epoch is evaluated");
  }
  total_ = {};
}

void TrainingHost::tell_evaluation(const char* set, const Evaluation& evaluation,
                                   const Position& position) {
  if (evaluation.samples == 0) return;
  if (!std::isfinite(evaluation.loss())) {
    throw base::Exception(base::ErrorKind::kNotFinite,
                          "the loss of the evaluation is not finite: try a smaller --lr");
  }
  Json fields = fields_of(evaluation, plan_->unit);
  fields["set"] = set;
  // If no step of this epoch was made (after a resume or at the job's end), names the previous one.
  const bool between = std::ranges::max(position.steps) == 0;
  fields["epoch"] = position.epoch - (between && position.epoch > 1 ? 1 : 0);
  fields["step"] = position.total / plan_->trainers;
  if (lr_schedule_.observes()) fields["lr"] = plan_->lr * lr_schedule_.state().factor;
  metrics_["eval"] = fields;
  for (const char* name : {"accuracy", "auc"}) {
    if (fields.contains(name)) metrics_[name] = fields[name];
  }
  sink_.emit("eval", fields);
}

void TrainingHost::save(const Position& position) {
  std::unique_lock lock(mutex_);
  Content snapshot;
  snapshot.step = position.total / plan_->trainers;
  snapshot.state["cmd"] = cmd_;
  snapshot.state["options"] = known_.options;
  snapshot.state["agreed"] = plan_->agreed;
  snapshot.state["position"] = position.to_json();
  snapshot.state["threads"] = at::get_num_threads();
  const optim::ScheduleState& schedule = lr_schedule_.state();
  snapshot.state["lr"] = plan_->lr;
  snapshot.state["lr_schedule"] = plan_->lr_schedule;
  snapshot.state["lr_state"] = {{"factor", schedule.factor}, {"bad", schedule.bad}};
  if (schedule.best) snapshot.state["lr_state"]["best"] = *schedule.best;
  const base::TimePoint since = std::exchange(saving_since_, {}).value_or(base::Clock::now());
  auto fill = [this, parts = std::exchange(gathered_, {})](Content& into) mutable {
    add_to_content(into, std::move(parts), agent_, sink_);
  };
  lock.unlock();  // because on_rank_lost() takes it and ends the call of a lost server
  checkpoints_.save(std::move(snapshot), std::move(fill), since);
}

void TrainingHost::add_to(Json& fields, bool all_steps) const {
  if (!current_) return;  // avoids waiting for begin(), which may hold the lock for long
  std::lock_guard lock(mutex_);
  fields.update(metrics_);
  add_loss(fields);  // of an unfinished epoch, if there is one
  if (may_lose_) fields["lost"] = lost_;
  const int64_t own = fields.value("steps", int64_t{0}) + lost_steps_;
  const int64_t all = all_steps ? scheduler_->steps_made() + lost_steps_ : 0;
  if (all_steps || lost_steps_ > 0) fields["steps"] = std::max(own, all);
}

}  // namespace distrain::job
