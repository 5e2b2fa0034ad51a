#pragma once

#include "distrain/job/job.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/trace.h"

namespace distrain::job {

/// Writes the events of all ranks, with times on one clock, in the Trace Event Format (JSON object
/// form, one event per line), which ui.perfetto.dev and chrome://tracing open.
///
/// Each rank is a process and each track a thread with a number unique in the file; times are in us
/// since the first event. A flow arrow is omitted unless both ends were recorded, the sender first.
/// The file appears complete, because it is written beside `path` (or beside a link's target) and
/// then renamed. Throws the errors of check_trace_path(). Tests use `before_system_call`.
void write_trace(const std::string& path, const std::vector<base::RankTrace>& ranks,
                 const std::function<void(const char* name)>& before_system_call = {});

/// The trace of a whole run: each rank records events, and rank 0 collects and writes them.
class RunTrace {
 public:
  /// `sink` receives a warning if events were dropped because the trace was full.
  explicit RunTrace(EventSink& sink) : sink_(sink) {}

  const std::shared_ptr<base::Tracer>& tracer() const { return tracer_; }

  /// Starts recording if `options` have `--trace`. The `world_size` ranks share the size limit.
  void start(const OptionMap& options, int world_size);
  /// Makes collect() possible. Must be called when all ranks have joined.
  void begin(rpc::Agent& agent) {
    agent_ = &agent;
    if (!path_.empty() && agent.rank() == 0) collector_.emplace(agent);
  }
  /// Fetches all traces on rank 0 while other ranks wait in shutdown(). write() returns its error.
  void collect();
  /// Writes the collected traces on rank 0. Returns the first error of collect() and write().
  std::optional<base::Error> write();
  /// Writes rank 0's own trace if the run failed or has no other ranks. Returns the error, if any.
  std::optional<base::Error> write_own(int rank, const std::string& role) {
    if (path_.empty() || rank != 0) return std::nullopt;
    tracer_->stop();
    ranks_ = {{rank, role, tracer_->tracks(), tracer_->dropped()}};
    return write();
  }

 private:
  EventSink& sink_;
  const std::shared_ptr<base::Tracer> tracer_ = std::make_shared<base::Tracer>();
  std::string path_;  // empty if there is no trace to write, or if it has been written
  rpc::Agent* agent_ = nullptr;
  std::optional<base::Error> error_;
  std::optional<rpc::TraceCollector> collector_;
  std::vector<base::RankTrace> ranks_;
};

}  // namespace distrain::job
