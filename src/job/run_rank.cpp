#include <algorithm>

#include "distrain/base/trace.h"
#include "distrain/job/definition.h"
#include "distrain/job/job_trace.h"
#include "distrain/job/session.h"
#include "training_host.h"

namespace distrain::job {

namespace {

constexpr uint16_t kLane = 4;  // on which nobody sends anything: it tells who is lost

// Where a signal to stop is heard of. Any rank may get it; rank 0 sees to it.

/// From now on a signal is seen to: there is something to save.
void heed_stop(rpc::CallContext& call) { call.agent.local<StopSignal>().arm(); }
/// On rank 0: another rank was told to end.
void request_stop(rpc::CallContext& call) {
  auto& stop = call.agent.local<StopSignal>();
  stop.arm();  // it may not have heard yet that there is something to save
  stop.request();
}
/// On rank 0: some rank was told to save.
void request_save(rpc::CallContext& call) { call.agent.local<TrainingHost>().request_save(); }
/// The training is over; from now on a signal ends a rank at once, unless the job is `stopped` by
/// one. Gives back whether it is, then also by one that came here.
bool end_training(rpc::CallContext& call, bool stopped) {
  auto& stop = call.agent.local<StopSignal>();
  stop.disarm(stopped);
  return stop.requested();
}

void heed_on_all(rpc::Agent& agent) {
  std::vector<base::Future<void>> heeding;
  for (int rank = 0; rank < agent.world_size(); ++rank) {
    heeding.push_back(agent.rpc_async<&heed_stop>(rank));
  }
  base::wait_all(heeding);
}

bool end_on_all_once(rpc::Agent& agent, bool stopped) {
  std::vector<base::Future<bool>> ending;
  for (int rank = 0; rank < agent.world_size(); ++rank) {
    ending.push_back(agent.rpc_async<&end_training>(rank, stopped));
  }
  base::wait_all(ending);
  bool any = stopped;
  for (const auto& told : ending) any = told.wait() || any;
  return any;
}

bool end_on_all(rpc::Agent& agent, bool stopped) {
  const bool any = end_on_all_once(agent, stopped);
  if (any && !stopped) end_on_all_once(agent, true);  // one came after the last look
  return any;
}

// Note [Who waits on rank 0]
//
// Trainers wait on rank 0 for each other's next step. A call to another rank fails when that rank
// is lost; here it is a third one that does not come, and one of those who wait may be on rank 0
// itself. So the host is told of each loss, and tells all who wait.
void tell_of_losses(rpc::Agent& agent, const std::weak_ptr<TrainingHost>& known) {
  const auto on_peer_lost = [&agent, known](int, const base::Error& error) {
    agent.executor().post([known, error] {
      if (const auto host = known.lock()) host->fail(error);
    });
  };
  agent.open_channel(kLane).set_handler({[](const rpc::ChannelMessage&) {}, on_peer_lost});
}

/// Signals that any rank may get are rank 0's to see to.
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
  // Rank 0 itself looks at its own when a trainer asks for a step.
  if (agent.rank() != 0) {
    stop.on_request(on_rank_0([&agent] { agent.rpc_sync<&request_stop>(0); }));
  }
  stop.on_save(on_rank_0([&agent] { agent.rpc_sync<&request_save>(0); }));
}

/// At its end nobody is told of signals any more.
struct Untold {
  StopSignal& stop;
  ~Untold() {
    stop.on_request({});
    stop.on_save({});
  }
};

bool is_utf8(const std::string& text) {
  try {
    return !Json(text).dump().empty();
  } catch (const Json::type_error&) {
    return false;
  }
}

/// How the job has ended, once all else is told.
void conclude(Outcome& outcome, const StopSignal& stop, const std::string& missed_goal) {
  outcome.stopped = stop.requested();
  outcome.goal_missed = !outcome.stopped && !missed_goal.empty();
  if (outcome.goal_missed) outcome.message = missed_goal;
}

}  // namespace

RankBody::Known known_options(const OptionTable& table, const OptionMap& values) {
  RankBody::Known known;
  const auto data = values.find("data");
  const bool has_data = data != values.end() && !data->second.empty();
  for (const Option& option : table) {
    // How often to save, but neither where to nor what to go on from.
    const bool saved_where = option.group == "Checkpoints" && option.needs != "checkpoint";
    const bool has_effect = !(has_data ? option.random_only : option.data_only);
    if (!is_job_option(option) || saved_where || !has_effect || option.each_own) continue;
    const std::string& value = values.at(option.name);
    if (!is_utf8(value)) continue;  // of a path: no checkpoint could say it
    known.options[option.name] = value;
    if (!option.may_change) known.must_agree.push_back(option.name);
  }
  return known;
}

bool Preflight::starts(const std::string& role) const {
  const Roles::Role& wanted = roles.named(role);
  return local || std::ranges::any_of(ranks, [&](int rank) {
           return rank >= wanted.first && rank < wanted.first + wanted.count;
         });
}

void refuse_role(const std::string& name) {
  throw base::Exception(base::ErrorKind::kInternal,
                        "a second role whose number of ranks is an option: " + name);
}

Outcome run_rank(const Job& job, EventSink& sink, const RankBody& body) {
  Session session(job, body.roles.names(), sink);
  rpc::Agent& agent = session.agent();
  TrainingHost::expose(agent);
  agent.expose<&heed_stop>("job.heed_stop");
  agent.expose<&request_stop>("job.request_stop");
  agent.expose<&request_save>("job.request_save");
  agent.expose<&end_training>("job.end_training");
  for (const auto& expose : body.exposures) expose(agent);
  agent.provide(job.stop);

  std::optional<Rank> rank;
  std::shared_ptr<TrainingHost> host;
  Outcome outcome;
  const auto prepare = [&] {
    const RankBody::Known known = body.adopt(agent.job_options());
    rank.emplace(agent, session.job(), known.roles, sink);
    agent.provide(std::make_shared<Job>(session.job()));
    body.prepare(*rank);
    if (job.rank != 0) return;
    // Before the others are there: what is wrong with the folder is known at once.
    host = std::make_shared<TrainingHost>(
        TrainingHost::Setting{body.cmd, known.checkpoint, known.options, known.must_agree,
                              [&agent] { heed_on_all(agent); },
                              [&agent](bool stopped) { return end_on_all(agent, stopped); }},
        session.job(), sink);
    agent.provide(host);
    tell_of_losses(agent, host);
  };
  const auto work = [&] {
    pass_on_signals(agent, *job.stop);
    body.run(*rank);
    rank->release_groups();
  };
  {
    const Untold untold{*job.stop};
    session.run(prepare, work, outcome);
  }
  outcome.fields.update(rank->fields());
  if (host) host->add_to(outcome);
  if (session.updates() > 0) outcome.fields["updates"] = session.updates();
  conclude(outcome, *job.stop, rank->missed_goal());
  return outcome;
}

Outcome outcome_without_ranks(Json fields) {
  Outcome outcome;
  outcome.fields = std::move(fields);
  outcome.fields["rpc"] = {{"calls", 0}, {"bytes_out", 0}, {"bytes_in", 0}};
  outcome.fields["live_rrefs"] = 0;
  outcome.fields["live_contexts"] = 0;
  return outcome;
}

Outcome run_local(const Job& job, EventSink& sink, const std::string& cmd,
                  const RankBody::Known& known, const std::function<void(Local&)>& run) {
  const std::shared_ptr<StopSignal> stop = job.stop;
  const auto host = std::make_shared<TrainingHost>(
      TrainingHost::Setting{cmd, known.checkpoint, known.options, known.must_agree,
                            [stop] { stop->arm(); },
                            [stop](bool stopped) {
                              stop->disarm(stopped);
                              return stop->requested();
                            }},
      job, sink);
  Local local(job, sink, host);
  {
    const Untold untold{*stop};
    stop->on_save([&host] { host->request_save(); });
    run(local);
  }
  Outcome outcome = outcome_without_ranks(local.fields());
  host->add_to(outcome);
  conclude(outcome, *stop, local.missed_goal());
  return outcome;
}

}  // namespace distrain::job
