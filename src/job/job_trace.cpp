#include "distrain/job/job_trace.h"

#include <algorithm>
#include <utility>

#include "distrain/base/error.h"
#include "distrain/data/trace_file.h"
#include "distrain/job/local_job.h"
#include "distrain/rpc/error.h"

namespace distrain::job {

namespace {

// A million events are about 150 MB, and viewers end at a GB or two.
constexpr size_t kEventsOfAJob = 4 * base::Tracer::kLimit;

}  // namespace

void JobTrace::start(const OptionMap& job_options, int world_size) {
  const auto it = job_options.find("trace");
  if (it == job_options.end() || it->second.empty()) return;
  path_ = it->second;
  tracer_->start(std::min(base::Tracer::kLimit, kEventsOfAJob / static_cast<size_t>(world_size)));
}

void JobTrace::begin(rpc::Agent& agent) {
  begun_ = true;
  agent_ = &agent;
  if (!path_.empty() && agent.rank() == 0) collector_.emplace(agent);
}

void JobTrace::collect() {
  if (!collector_) return;
  try {
    ranks_ = collector_->collect();
  } catch (...) {
    error_ = rpc::error_in_flight(base::ErrorKind::kInternal);
    ranks_ = {rpc::own_trace(*agent_)};  // better than none
  }
}

std::optional<base::Error> JobTrace::write() {
  if (ranks_.empty()) return std::nullopt;
  const std::vector<base::RankTrace> ranks = std::exchange(ranks_, {});
  const std::string path = std::exchange(path_, {});  // once: less would not be better
  try {
    data::write_trace(path, ranks);
  } catch (...) {
    return error_ ? error_ : base::current_error(base::ErrorKind::kInternal);
  }
  uint64_t dropped = 0;
  for (const base::RankTrace& rank : ranks) dropped += rank.dropped;
  if (dropped == 0) return error_;
  sink_.emit("warn", {{"kind", base::kind_name(base::ErrorKind::kOverloaded)},
                      {"message", "--trace " + path + ": the last " + std::to_string(dropped) +
                                      " events were too many and are missing"}});
  return error_;
}

std::optional<base::Error> JobTrace::write_own(int rank, const std::string& role) {
  if (path_.empty() || rank != 0 || !begun_) return std::nullopt;
  tracer_->stop();
  ranks_ = {{rank, role, tracer_->tracks(), tracer_->dropped()}};
  return write();
}

Outcome run_local_job(const Job& job, EventSink& sink,
                      const std::function<Outcome(const Job& placed)>& run) {
  JobTrace trace(sink);
  trace.start(job.effective, 1);
  trace.begin_alone();
  const base::TraceBinding binding(trace.tracer(), "main");
  Outcome outcome;
  try {
    Job placed = job;
    if (job.choose_devices) placed.devices = job.choose_devices("local", {});
    outcome = run(placed);
  } catch (...) {
    const auto error = std::current_exception();
    // What came first counts. And what failed before it began leaves the file that may be there.
    if (!trace.tracer()->tracks().empty()) trace.write_own(job.rank, "local");
    std::rethrow_exception(error);
  }
  outcome.afterwards = trace.write_own(job.rank, "local");
  return outcome;
}

}  // namespace distrain::job
