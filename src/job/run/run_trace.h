#pragma once

#include "distrain/job/job.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/trace.h"

namespace distrain::job {

/// Writes the events of all ranks, with times on one clock, in the Trace Event Format (JSON object
/// form, one event per line), which ui.perfetto.dev and chrome://tracing open.
///
/// Each rank is a process and each track a thread with a number unique in the file; times are in us
/// since the first event. A flow is omitted unless both ends are recorded in order. The file
/// appears complete: it is written beside `path`, or beside the target of a link, and renamed.
/// Throws as check_trace_path(). For tests, `before_system_call` is called before each system call.
void write_trace(const std::string& path, const std::vector<base::RankTrace>& ranks,
                 const std::function<void(const char* name)>& before_system_call = {});

/// The trace of a whole run: each rank records events; rank 0 gathers and writes them.
class RunTrace {
 public:
  /// `sink` receives a warning if events were dropped because the trace was full.
  explicit RunTrace(EventSink& sink) : sink_(sink) {}

  const std::shared_ptr<base::Tracer>& tracer() const { return tracer_; }

  /// Starts recording if `options` have `--trace`. The `world_size` ranks share the size limit.
  void start(const OptionMap& options, int world_size);
  /// Prepares collect(). Must be called when all ranks have joined.
  void begin(rpc::Agent& agent);
  /// Replaces begin() in a run without other ranks.
  void begin_alone() { begun_ = true; }
  /// Gathers all traces on rank 0 while other ranks wait in shutdown(). Keeps errors for write().
  void collect();
  /// Writes the collected traces on rank 0. Returns the first error of collect() and write().
  std::optional<base::Error> write();
  /// Writes rank 0's own trace if the run failed or has no other ranks. Returns the error, if any.
  std::optional<base::Error> write_own(int rank, const std::string& role);

 private:
  EventSink& sink_;
  const std::shared_ptr<base::Tracer> tracer_ = std::make_shared<base::Tracer>();
  std::string path_;  // empty: no trace is to be written (any more)
  bool begun_ = false;
  rpc::Agent* agent_ = nullptr;
  std::optional<base::Error> error_;
  std::optional<rpc::TraceCollector> collector_;
  std::vector<base::RankTrace> ranks_;
};

}  // namespace distrain::job
