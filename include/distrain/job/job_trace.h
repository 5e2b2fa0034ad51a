#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distrain/base/trace.h"
#include "distrain/job/job.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/trace.h"

namespace distrain::job {

/// `--trace` of one rank: each records, rank 0 gathers and writes. Does nothing in a job without.
class JobTrace {
 public:
  explicit JobTrace(EventSink& sink) : sink_(sink) {}

  const std::shared_ptr<base::Tracer>& tracer() const { return tracer_; }

  /// Records from here on if `job_options` say so; `world_size` ranks share what a file can hold.
  void start(const OptionMap& job_options, int world_size);
  /// Rank 0, once all are there.
  void begin(rpc::Agent& agent);
  /// Of a job without other ranks.
  void begin_alone() { begun_ = true; }
  /// Rank 0, while the others wait for it in the shutdown. Keeps what goes wrong for write(), and
  /// this rank's part then.
  void collect();
  /// Rank 0: what was collected. Warns if it is not all. Gives back what went wrong, if anything.
  std::optional<base::Error> write();
  /// Of a job that failed, or that has no other ranks: this rank's part, if there is any. As
  /// write().
  std::optional<base::Error> write_own(int rank, const std::string& role);

 private:
  EventSink& sink_;
  const std::shared_ptr<base::Tracer> tracer_ = std::make_shared<base::Tracer>();
  std::string path_;  // empty: no trace, or none any more
  bool begun_ = false;
  rpc::Agent* agent_ = nullptr;
  std::optional<base::Error> error_;
  std::optional<rpc::TraceCollector> collector_;
  std::vector<base::RankTrace> ranks_;
};

}  // namespace distrain::job
