#include "distrain/rpc/trace.h"

#include <algorithm>

#include "distrain/rpc/error.h"
#include "trace/trace_export.h"

namespace distrain::rpc {

namespace {

constexpr int kExchanges = 16;

// Rethrows the current exception, and names `rank`, whose trace was being collected.
[[noreturn]] void rethrow_naming(int rank) {
  base::Error error = error_in_flight(base::ErrorKind::kInternal);
  error.message = "the trace of rank " + std::to_string(rank) + ": " + error.message;
  if (error.kind == base::ErrorKind::kProtocol) error.rank = rank;  // its answer is malformed
  throw base::Exception(error);
}

// Reads a clock as NTP does: the exchange with the shortest round trip is the most exact one.
ClockReading read_clock(Agent& agent, int rank) try {
  const base::Tracer& tracer = *agent.tracer();
  ClockReading best;
  for (int i = 0; i < kExchanges; ++i) {
    const int64_t asked = tracer.shown(base::Tracer::now());
    const ClockAnswer answer = agent.rpc_sync<&read_trace_clock>(To(rank).without_deadline());
    if (!is_time(answer.now)) wire::Reader::fail("a clock beyond what clocks show");
    const int64_t heard = tracer.shown(base::Tracer::now());
    const int64_t round_trip = heard - asked;
    if (i > 0 && round_trip >= best.round_trip) continue;
    best = {answer.now, asked + round_trip / 2 - answer.now, round_trip};
  }
  return best;
} catch (...) {
  rethrow_naming(rank);
}

base::RankTrace collect_from(Agent& agent, int rank) try {
  TraceChunk chunk = agent.rpc_sync<&read_trace>(To(rank).without_deadline(), uint64_t{0});
  TraceImport import(*agent.tracer(), chunk);
  import.add(chunk.events);
  while (!import.complete()) {
    import.add(agent.rpc_sync<&read_trace>(To(rank).without_deadline(), import.events()).events);
  }
  return {rank, agent.worker(rank).name, import.take(), chunk.dropped};
} catch (...) {
  rethrow_naming(rank);
}

}  // namespace

base::RankTrace own_trace(Agent& agent) {
  const base::Tracer& tracer = *agent.tracer();
  return {agent.rank(), agent.name(), tracer.tracks(), tracer.dropped()};
}

TraceCollector::TraceCollector(Agent& agent)
    : agent_(agent), clocks_(static_cast<size_t>(agent.world_size())) {
  std::vector<base::Future<ClockAnswer>> answers;
  for (int rank = 1; rank < agent_.world_size(); ++rank) {
    answers.push_back(agent_.rpc_async<&read_trace_clock>(To(rank).without_deadline()));
  }
  clocks_[0].domain = agent_.tracer()->clock_domain();
  for (size_t i = 0; i < answers.size(); ++i) clocks_[i + 1].domain = answers[i].take().domain;
  read_clocks();
}

// Reads each clock but rank 0's, by calls to the first rank that has it.
void TraceCollector::read_clocks() {
  for (size_t rank = 1; rank < clocks_.size(); ++rank) {
    RankClock& clock = clocks_[rank];
    if (clock.domain == clocks_[0].domain || agent_.is_done_without(static_cast<int>(rank)))
      continue;
    const auto first = std::find_if(clocks_.begin(), clocks_.end(), [&](const RankClock& other) {
      return other.domain == clock.domain &&
             !agent_.is_done_without(static_cast<int>(&other - &clocks_[0]));
    });
    clock.readings.push_back(&*first == &clock ? read_clock(agent_, static_cast<int>(rank))
                                               : first->readings.back());
  }
}

std::vector<base::RankTrace> TraceCollector::collect() {
  base::Tracer& tracer = *agent_.tracer();
  tracer.stop();
  tracer.wait_until_closed(kSliceTimeout);
  read_clocks();
  std::vector<base::RankTrace> ranks = {own_trace(agent_)};
  std::vector<RankClock> clocks = {clocks_[0]};
  for (int rank = 1; rank < agent_.world_size(); ++rank) {
    try {
      if (agent_.is_done_without(rank)) continue;  // its trace is lost
      ranks.push_back(collect_from(agent_, rank));
      clocks.push_back(clocks_[static_cast<size_t>(rank)]);
    } catch (const base::Exception&) {
      if (!agent_.is_done_without(rank)) throw;
    }
  }
  align_traces(ranks, clocks);
  return ranks;
}

}  // namespace distrain::rpc
