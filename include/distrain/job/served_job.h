#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "distrain/job/session.h"

namespace distrain::job {

inline constexpr int kServer = 0;

/// One rank of a job with a parameter server on rank 0 and trainers on the others, from the
/// rendezvous to its end.
///
/// `Server` (of agent, options, job, sink) is what the functions that `expose` exposes work on; it
/// has a `host()` with add_to(outcome). `Trainer` (of the same) is made once all ranks are there;
/// it has run(), which gives back whether the job was stopped before its time, and add_to(outcome).
template <class Server, class Trainer, class Options>
Outcome run_served_job(const Options& own, const Job& job,
                       const std::function<Options(const OptionMap&)>& adopt, EventSink& sink,
                       std::vector<std::string> names,
                       const std::function<void(rpc::Agent&)>& expose) {
  Session session(job, std::move(names), sink);
  rpc::Agent& agent = session.agent();
  expose(agent);

  Options options = own;
  std::shared_ptr<Server> server;
  Outcome outcome;
  const auto prepare = [&] {
    if (job.rank != kServer) {
      options = adopt(agent.job_options());
      return;
    }
    server = std::make_shared<Server>(agent, options, session.job(), sink);
    agent.provide(server);
  };
  const auto work = [&] {
    if (!options.checkpoint.dir.empty()) job.stop->arm();
    if (job.rank == kServer) return;  // it waits for the trainers in the shutdown
    Trainer trainer(agent, options, session.job(), sink);
    outcome.stopped = trainer.run();
    trainer.add_to(outcome);
  };
  session.run(prepare, work, outcome);
  if (server) {
    server->host().add_to(outcome);
    outcome.stopped = outcome.stopped || job.stop->requested();
    outcome.fields["updates"] = session.updates();
  }
  return outcome;
}

}  // namespace distrain::job
