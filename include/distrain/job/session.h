#pragma once

#include <memory>
#include <string>
#include <vector>

#include "distrain/job/job.h"
#include "distrain/job/job_trace.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/error.h"

namespace distrain::job {

/// The agent of one rank, from the job's description to its last counters: what every scenario does
/// before and after its own work.
class Session {
 public:
  /// `names` are the ranks' roles; rank 0's hold.
  Session(const Job& job, std::vector<std::string> names, EventSink& sink);

  rpc::Agent& agent() { return *agent_; }
  /// From `prepare` on with this rank's devices.
  const Job& job() const { return job_; }
  /// Applied to this rank's parameters so far.
  uint64_t updates() const { return *updates_; }

  /// Emits `waiting` while ranks are missing and `ready` when all are there. `prepare` as in
  /// Agent::join.
  void join(const std::function<void()>& prepare);
  /// Waits for all ranks, then adds rpc{…}, live_rrefs and live_contexts to `outcome`.
  void finish(Outcome& outcome);

  /// join(), the work of this rank, finish(). If it throws, all other ranks are told why.
  void run(const std::function<void()>& prepare, const std::function<void()>& work,
           Outcome& outcome) {
    const base::TraceBinding binding(trace_.tracer(), "main");
    try {
      join(prepare);
      work();
      finish(outcome);
    } catch (...) {
      const base::Error error = with_rank(rpc::error_in_flight(base::ErrorKind::kInternal));
      agent_->abort(error);
      write_what_there_is();
      throw base::Exception(error);
    }
  }

 private:
  void choose_devices();
  /// An error names its rank as the cause, and what a device could not do in its message, too.
  base::Error with_rank(base::Error error) const;
  void write_what_there_is();
  void tell_waiting(const std::vector<int>& missing, const std::string& address);

  Job job_;
  EventSink& sink_;
  JobTrace trace_;
  std::unique_ptr<rpc::Agent> agent_;
  optim::UpdateCount updates_;
  bool joined_ = false;
};

}  // namespace distrain::job
