#include "run/run_trace.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "distrain/job/trace_file.h"
#include "distrain/rpc/error.h"

namespace distrain::job {

void RunTrace::start(const OptionMap& options, int world_size) {
  const auto path = options.find("trace");
  if (path == options.end() || path->second.empty()) return;
  path_ = path->second;
  // A million events take about 150 MB, and viewers fail at one or two GB.
  constexpr size_t kEventsOfAFile = 4 * base::Tracer::kLimit;
  tracer_->start(std::min(base::Tracer::kLimit, kEventsOfAFile / static_cast<size_t>(world_size)));
}

void RunTrace::begin(rpc::Agent& agent) {
  begun_ = true;
  agent_ = &agent;
  if (!path_.empty() && agent.rank() == 0) collector_.emplace(agent);
}

void RunTrace::collect() {
  if (!collector_) return;
  try {
    ranks_ = collector_->collect();
  } catch (...) {
    error_ = rpc::error_in_flight(base::ErrorKind::kInternal);
    ranks_ = {rpc::own_trace(*agent_)};  // its own trace is better than none
  }
}

std::optional<base::Error> RunTrace::write() {
  if (ranks_.empty()) return std::nullopt;
  const std::vector<base::RankTrace> ranks = std::exchange(ranks_, {});
  const std::string path = std::exchange(path_, {});  // write_own() must not replace the file
  try {
    write_trace(path, ranks);
  } catch (...) {
    return error_ ? error_ : base::current_error(base::ErrorKind::kInternal);
  }
  uint64_t dropped = 0;
  for (const base::RankTrace& rank : ranks) dropped += rank.dropped;
  if (dropped > 0) {
    sink_.warn(
        base::ErrorKind::kOverloaded,
        fmt::format("--trace {}: the last {} events were too many and are missing", path, dropped));
  }
  return error_;
}

std::optional<base::Error> RunTrace::write_own(int rank, const std::string& role) {
  if (path_.empty() || rank != 0 || !begun_) return std::nullopt;
  tracer_->stop();
  ranks_ = {{rank, role, tracer_->tracks(), tracer_->dropped()}};
  return write();
}

}  // namespace distrain::job
