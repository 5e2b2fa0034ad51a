#include <algorithm>
#include <atomic>

#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include "distrain/autograd/context.h"
#include "distrain/membership/slot.h"
#include "distrain/rpc/error.h"
#include "distrain/table/table_server.h"
#include "host/training_host.h"
#include "run/run_trace.h"

namespace distrain::job {

namespace {

std::chrono::nanoseconds seconds(double s) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(s));
}

rpc::AgentOptions agent_options(const Job& job, EventSink& sink) {
  rpc::AgentOptions options;
  static_cast<membership::Contact&>(options) = job;
  if (!job.name.empty()) options.job = "distrain " + job.name;
  options.rpc_timeout = seconds(job.rpc_timeout_s);
  options.join_timeout = seconds(job.join_timeout_s);
  options.peer_timeout = seconds(job.peer_timeout_s);
  // Ranks that take turns have one call in flight. OpenMP starts threads for each worker. If they
  // are more than the CPUs, idle ones sleep after 100 spins, and each parallel loop must wake them.
  if (job.takes_turns) options.worker_threads = 1;
  options.call_delay = seconds(job.inject.call_delay_s);
  options.job_options = job.rank == 0 ? job.effective : job.given;
  options.on_cpus_shared = job.share_cpus;
  options.on_waiting = [&sink](const std::vector<int>& missing, const std::string& address,
                               const std::string& reason) {
    Json fields{{"missing", missing}};
    if (!address.empty()) fields["address"] = address;
    if (!reason.empty()) fields["reason"] = reason;
    sink.emit("waiting", fields);
  };
  return options;
}

/// Ends this rank when the job fails because another rank is lost. Does not wait for the end of a
/// step, because a step of a large net may take too long for the other ranks.
class LossWatch final : public rpc::Layer {
 public:
  explicit LossWatch(EventSink& sink) : sink_(sink) {}
  void on_rank_lost(const rpc::Loss& loss) override {
    if (!is_over_ && !loss.job_goes_on) sink_.failing(loss.error);
  }
  /// Ignores lost ranks from now on.
  void end() { is_over_ = true; }

 private:
  EventSink& sink_;
  std::atomic<bool> is_over_{false};
};

/// Returns the current statistics of the called rank, as JSON.
std::string figures(rpc::CallContext& call) {
  const Json fields = call.agent.local<Job>().progress->fields();
  return fields.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Thrown if the rank reserved for this process went to a process that named the rank explicitly.
struct SlotIsTaken {};

/// Called on rank 0, by a rank that has received a signal to stop.
void request_stop(rpc::CallContext& call) {
  auto& stop = call.agent.local<StopSignal>();
  stop.arm();  // rank 0 may not be armed yet
  stop.request();
}

/// Forwards the signals of this rank to rank 0.
void pass_on_signals(rpc::Agent& agent, StopSignal& stop) {
  const auto on_rank_0 = [&agent](auto call) {
    return [&agent, call] {
      agent.executor().post([call] {
        try {
          call();
        } catch (const base::Exception&) {  // the job is ending
        }
      });
    };
  };
  // Rank 0 forwards no stop: it checks its own stop signal when a trainer requests a task.
  if (agent.rank() != 0) stop.on_request(on_rank_0([&agent] { agent.rpc_sync<&request_stop>(0); }));
  stop.on_save(
      on_rank_0([&agent] { agent.rpc_sync<rpc::of_local<&TrainingHost::request_save>>(0); }));
}

/// A guard. Its destructor removes the callbacks from `stop` and freezes the fields of `progress`.
struct Untold {
  StopSignal& stop;
  Progress* progress = nullptr;
  ~Untold() {
    if (progress) progress->report({});
    stop.on_request({});
    stop.on_save({});
    stop.on_question({});
  }
};

/// Sets the fields, the message and the kind of end (stopped, goal missed) of `outcome`.
void conclude(Outcome& outcome, Process& process, const TrainingHost* host) {
  outcome.fields.update(process.fields());
  if (host) host->add_to(outcome.fields);
  if (host) outcome.message = host->last_saved();
  outcome.stopped = process.job().stop->requested();
  outcome.goal_missed = !outcome.stopped && !process.missed_goal().empty();
  if (outcome.goal_missed) outcome.message = process.missed_goal();
}

/// Runs one rank of a job. Does the work that all jobs share before and after RankBody::run.
class RankRunner {
 public:
  /// If rank 0 assigned `job.rank`, `slot` is the reservation, and run() may throw SlotIsTaken. If
  /// the user gave the rank, `slot` is null.
  RankRunner(const Job& job, EventSink& sink, const RankBody& body,
             std::unique_ptr<membership::Slot> slot)
      : job_(job),
        sink_(sink),
        body_(body),
        has_asked_(slot != nullptr),
        slot_(std::move(slot)),
        trace_(sink) {
    rpc::AgentOptions options = agent_options(job, sink);
    options.names = body.roles.names();
    options.tracer = trace_.tracer();
    options.on_refused = [this](const base::Error& why) {
      agent_->executor().post([this, why] { sink_.warn(why.kind, why.message); });
    };
    options.on_long_wait = [this](const rpc::Wait& wait) {
      agent_->executor().post([this, wait] {
        const double waited = base::seconds_since(wait.since);
        sink_.warn(base::ErrorKind::kDeadline,
                   fmt::format("still waiting after {:.0f} s: {}", waited, wait.what));
      });
    };
    agent_ = std::make_unique<rpc::Agent>(std::move(options));
    agent_->add_layer(loss_watch_);
    autograd::install(*agent_);
    updates_ = optim::install(*agent_);
    table_updates_ = table::install(*agent_);
    TrainingHost::expose(*agent_, sink);
    agent_->expose<rpc::of_local<&StopSignal::arm>>("job.heed_stop");
    agent_->expose<&request_stop>("job.request_stop");
    agent_->expose<&figures>("job.figures");
    agent_->expose<rpc::of_local<&StopSignal::disarm>>("job.end_training");
    for (const auto& expose : body.exposures) expose(*agent_);
    agent_->provide(job.stop);
  }

  /// Joins the other ranks, runs the body, and waits for the other ranks. If anything throws, sends
  /// the error to all other ranks.
  Outcome run() {
    Outcome outcome;
    {
      // On scope exit, waits for the current save. By then shutdown() or abort() has ended the
      // calls that the save makes.
      const auto settled = c10::make_scope_exit([this] {
        if (host_) host_->await_save().wait();
      });
      const Untold untold{*job_.stop, job_.progress.get()};
      job_.stop->on_question([this] { return agent_->waits(); });
      const base::TraceBinding binding(trace_.tracer(), "main");
      try {
        join();
        pass_on_signals(*agent_, *job_.stop);
        report(Json::object());
        body_.run(*rank_);
        rank_->release_groups();
        report(rank_->fields());
        finish(outcome);
      } catch (...) {
        const base::Error error = with_rank(rpc::error_in_flight(base::ErrorKind::kInternal));
        loss_watch_->end();
        // If rank 0 has chosen this rank, a refused join can only mean that another process has
        // taken the rank, because reserve() has reported all other reasons for a refusal.
        const bool is_refused =
            !agent_->is_admitted() && error.kind == base::ErrorKind::kRendezvous;
        if (has_asked_ && is_refused) throw SlotIsTaken();
        if (error.rank != agent_->rank()) sink_.failing(error);
        agent_->abort(error);
        if (joined_) trace_.write_own(agent_->rank(), agent_->name());  // keeps rank 0's trace
        throw base::Exception(error);
      }
    }
    conclude(outcome, *rank_, host_.get());
    return outcome;
  }

 private:
  void join() {
    agent_->join([this] {
      const OptionMap& options = agent_->job_options();
      trace_.start(options, std::max(job_.world_size, agent_->world_size()));
      if (job_.choose_devices) job_.devices = job_.choose_devices(agent_->name(), options);
      agent_->set_device(job_.device());
      slot_ = nullptr;  // the rank has joined
      const RankBody::Known known = body_.adopt(agent_->rank(), options);
      rank_.emplace(*agent_, job_, known.roles, sink_);
      agent_->provide(std::make_shared<Job>(job_));
      agent_->provide(std::make_shared<TablePart>(
          agent_.get(), sink_, TablePart::Options{.fail_at = job_.inject.fail_checkpoint}));
      body_.prepare(*rank_);
      if (job_.rank != 0) return;
      // Created before the other ranks join, so that a problem with the folder is reported at once.
      host_ = std::make_shared<TrainingHost>(body_.cmd, known, agent_.get(), job_, sink_);
      agent_->provide(host_);
      agent_->add_layer(host_);
    });
    joined_ = true;
    sink_.joined(agent_->name(), agent_->job_options());
    Json fields{{"world_size", agent_->world_size()},
                {"transport", agent_->transport()},
                {"threads", at::get_num_threads()},
                {"startup_s", base::seconds_since(job_.started)}};
    if (rpc::is_accelerator(job_.device())) fields["device"] = device_names(job_.devices);
    sink_.emit("ready", fields);
    trace_.begin(*agent_);
  }

  /// Makes `job_.progress` report `own` and, at each call, this rank's current statistics.
  void report(const Json& own) {
    job_.progress->report([this, own](Json& fields) {
      fields.update(own);
      add_to(fields);
      if (host_) host_->add_to(fields, !job_.spawned);  // all trainers' steps, for `end`
    });
  }

  /// Adds the current statistics of this rank to `fields`. May be called by any thread.
  void add_to(Json& fields) const {
    const rpc::Traffic traffic = agent_->traffic();
    fields["rpc"] = {
        {"calls", traffic.calls}, {"bytes_out", traffic.bytes_out}, {"bytes_in", traffic.bytes_in}};
    const uint64_t updates = *updates_ + *table_updates_;  // of parameters and tables on this rank
    if (updates > 0) fields["updates"] = updates;
    if (job_.add_usage) job_.add_usage(fields);
  }

  void finish(Outcome& outcome) {
    // Ends the watch, because shutdown() handles losses itself while it waits for the other ranks.
    loss_watch_->end();
    agent_->shutdown({}, [&] {
      add_to(outcome.fields);  // first, so that the calls below are not counted
      if (agent_->rank() == 0) outcome.others = figures_of_others();
      trace_.collect();
    });
    outcome.fields["live_rrefs"] = agent_->live_rrefs();
    outcome.fields["live_contexts"] = agent_->live_contexts();
    outcome.afterwards = trace_.write();
  }

  /// Requests the statistics of all other ranks. Omits a rank that is lost or does not answer
  /// before the call deadline.
  std::map<int, Json> figures_of_others() const {
    std::map<int, base::Future<std::string>> asked;
    for (int rank = 1; rank < agent_->world_size(); ++rank) {
      if (!agent_->is_done_without(rank)) asked[rank] = agent_->rpc_async<&figures>(rank);
    }
    std::map<int, Json> told;
    for (const auto& [rank, answer] : asked) {
      const auto& text = answer.wait_result();
      const Json fields = text.ok() ? Json::parse(text.value(), nullptr, false) : Json();
      if (fields.is_object()) told[rank] = fields;
    }
    return told;
  }

  /// Adds the causing rank to an error, and the rank's name to the message of a `resources` error.
  base::Error with_rank(base::Error error) const {
    if (error.rank < 0) error.rank = agent_->rank();
    const int rank = error.rank;
    const bool is_own = rank == agent_->rank();
    // The names of other ranks are known only after all have joined.
    const bool is_known = is_own || (joined_ && rank < agent_->world_size());
    if (error.kind != base::ErrorKind::kResources || !is_known) return error;
    const std::string name = is_own ? agent_->name() : agent_->worker(rank).name;
    return error_of_rank(std::move(error), rank, name);
  }

  Job job_;  // a copy, in which join() sets the devices of this rank
  EventSink& sink_;
  const RankBody& body_;
  const bool has_asked_;
  std::unique_ptr<membership::Slot> slot_;
  RunTrace trace_;
  const std::shared_ptr<LossWatch> loss_watch_ = std::make_shared<LossWatch>(sink_);
  std::unique_ptr<rpc::Agent> agent_;
  optim::UpdateCount updates_, table_updates_;
  bool joined_ = false;
  std::optional<Rank> rank_;
  std::shared_ptr<TrainingHost> host_;
};

}  // namespace

Outcome run_rank(const Job& job, EventSink& sink, const RankBody& body) {
  if (job.rank != membership::kUnassignedRank) return RankRunner(job, sink, body, nullptr).run();
  const base::TimePoint deadline = base::deadline_after(seconds(job.join_timeout_s));
  Job placed = job;
  for (;;) {
    try {
      auto slot = std::make_unique<membership::Slot>(agent_options(placed, sink));
      {
        const Untold untold{*job.stop};
        job.stop->on_question([&slot] { return slot->waits(); });
        placed.rank = slot->reserve();
      }
      sink.placed(placed.rank);
      return RankRunner(placed, sink, body, std::move(slot)).run();
    } catch (const SlotIsTaken&) {
      sink.placed(membership::kUnassignedRank);
      placed.join_timeout_s = std::max(0.001, -base::seconds_since(deadline));
    }
  }
}

Outcome run_local(const Job& job, EventSink& sink, const std::string& cmd,
                  const RankBody::Known& known, const std::function<void(SingleProcess&)>& run) {
  return run_local_job(job, sink, [&](const Job& placed) {
    TrainingHost host(cmd, known, nullptr, placed, sink);
    SingleProcess local(placed, sink, host);
    {
      const Untold untold{*job.stop, job.progress.get()};
      job.progress->report([&host](Json& fields) { host.add_to(fields); });
      job.stop->on_save([&host] { host.request_save(); });
      run(local);
    }
    Outcome outcome;
    conclude(outcome, local, &host);
    return outcome;
  });
}

Outcome run_local_job(const Job& job, EventSink& sink,
                      const std::function<Outcome(const Job& placed)>& run) {
  RunTrace trace(sink);
  trace.start(job.effective, 1);
  const base::TraceBinding binding(trace.tracer(), "main");
  Outcome outcome;
  try {
    Job placed = job;
    if (job.choose_devices) placed.devices = job.choose_devices("local", {});
    rpc::make_current(placed.device());
    outcome = run(placed);
  } catch (...) {
    // Ignores the error of write_own(). If no event was recorded, keeps an existing trace file.
    if (!trace.tracer()->tracks().empty()) trace.write_own(job.rank, "local");
    throw;
  }
  outcome.afterwards = trace.write_own(job.rank, "local");
  return outcome;
}

Json device_names(const std::vector<c10::Device>& devices) {
  if (devices.size() == 1) return devices.front().str();
  Json names = Json::array();
  for (const c10::Device& device : devices) names.push_back(device.str());
  return names;
}

}  // namespace distrain::job
