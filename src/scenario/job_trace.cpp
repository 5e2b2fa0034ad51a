#include "job_trace.h"

#include <algorithm>

#include "distrain/base/error.h"
#include "distrain/data/trace_file.h"
#include "distrain/scenario/local_job.h"

namespace distrain::scenario {

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
  if (!path_.empty() && agent.rank() == 0) collector_.emplace(agent);
}

void JobTrace::collect() {
  if (collector_) ranks_ = collector_->collect();
}

void JobTrace::write() {
  if (ranks_.empty()) return;
  const std::vector<base::RankTrace> ranks = std::move(ranks_);
  data::write_trace(path_, ranks);
  uint64_t dropped = 0;
  for (const base::RankTrace& rank : ranks) dropped += rank.dropped;
  if (dropped == 0) return;
  sink_.emit("warn", {{"kind", base::kind_name(base::ErrorKind::kOverloaded)},
                      {"message", "--trace " + path_ + ": the last " + std::to_string(dropped) +
                                      " events were too many and are missing"}});
}

void JobTrace::write_own(int rank, const std::string& role) {
  if (path_.empty() || rank != 0) return;
  tracer_->stop();
  ranks_ = {{rank, role, tracer_->tracks(), tracer_->dropped()}};
  write();
}

Outcome run_local_job(const Job& job, EventSink& sink, const std::function<Outcome()>& run) {
  JobTrace trace(sink);
  trace.start(job.effective, 1);
  const base::TraceBinding binding(trace.tracer(), "main");
  Outcome outcome;
  try {
    outcome = run();
  } catch (...) {
    const auto error = std::current_exception();
    try {
      trace.write_own(job.rank, "local");
    } catch (...) {  // what came first counts
    }
    std::rethrow_exception(error);
  }
  trace.write_own(job.rank, "local");
  return outcome;
}

}  // namespace distrain::scenario
