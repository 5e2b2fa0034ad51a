#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/base/trace.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/trace.h"

namespace distrain::data {

/// The trace of a whole run: each rank records, rank 0 gathers and writes.
class RunTrace {
 public:
  /// `warn` hears it if events were too many for the file, whose path the message begins with.
  explicit RunTrace(std::function<void(const std::string& message)> warn)
      : warn_(std::move(warn)) {}

  const std::shared_ptr<base::Tracer>& tracer() const { return tracer_; }

  /// Records from here on for the file `path`, if not empty, which `world_size` ranks share.
  void start(const std::string& path, int world_size);
  /// Once all ranks are there.
  void begin(rpc::Agent& agent);
  /// Of a run without other ranks.
  void begin_alone() { begun_ = true; }
  /// Rank 0, while others wait in Agent::shutdown. Keeps errors for write(), and this rank's part.
  void collect();
  /// Rank 0: what was collected. Gives back what went wrong, if anything.
  std::optional<base::Error> write();
  /// Of a run that failed, or that has no other ranks: rank 0's part, if there is any. As write().
  std::optional<base::Error> write_own(int rank, const std::string& role);

 private:
  const std::function<void(const std::string&)> warn_;
  const std::shared_ptr<base::Tracer> tracer_ = std::make_shared<base::Tracer>();
  std::string path_;  // empty: no trace, or none any more
  bool begun_ = false;
  rpc::Agent* agent_ = nullptr;
  std::optional<base::Error> error_;
  std::optional<rpc::TraceCollector> collector_;
  std::vector<base::RankTrace> ranks_;
};

}  // namespace distrain::data
