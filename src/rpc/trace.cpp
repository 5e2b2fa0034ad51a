#include "distrain/rpc/trace.h"

#include "distrain/rpc/error.h"
#include "trace_export.h"

namespace distrain::rpc {

namespace {

constexpr int kExchanges = 16;

}  // namespace

base::RankTrace own_trace(Agent& agent) {
  const base::Tracer& tracer = *agent.tracer();
  return {agent.rank(), agent.name(), tracer.tracks(), tracer.dropped()};
}

TraceCollector::TraceCollector(Agent& agent)
    : agent_(agent), clocks_(static_cast<size_t>(agent.world_size())) {
  read_clocks();
}

// As NTP does: of several exchanges, the one with the shortest way there and back says most.
void TraceCollector::read_clocks() {
  const base::Tracer& tracer = *agent_.tracer();
  const std::string own = tracer.clock_domain();
  clocks_[0].domain = own;
  for (int rank = 1; rank < agent_.world_size(); ++rank) {
    RankClock& clock = clocks_[static_cast<size_t>(rank)];
    if (clock.domain == own) continue;
    ClockReading best;
    for (int i = 0; i < kExchanges; ++i) {
      const int64_t asked = tracer.shown(base::Tracer::now());
      const ClockAnswer answer = agent_.rpc_sync<&read_trace_clock>(To(rank).without_deadline());
      const int64_t heard = tracer.shown(base::Tracer::now());
      clock.domain = answer.domain;
      if (clock.domain == own) break;
      const int64_t round_trip = heard - asked;
      if (i > 0 && round_trip >= best.round_trip) continue;
      best = {answer.now, asked + round_trip / 2 - answer.now, round_trip};
    }
    if (clock.domain != own) clock.readings.push_back(best);
  }
}

std::vector<base::RankTrace> TraceCollector::collect() {
  base::Tracer& tracer = *agent_.tracer();
  tracer.stop();
  tracer.settle(kTraceSettles);
  read_clocks();
  std::vector<base::RankTrace> ranks = {own_trace(agent_)};
  for (int rank = 1; rank < agent_.world_size(); ++rank) ranks.push_back(collect_from(rank));
  align_traces(ranks, clocks_);
  return ranks;
}

base::RankTrace TraceCollector::collect_from(int rank) try {
  TraceChunk chunk = agent_.rpc_sync<&read_trace>(To(rank).without_deadline(), uint64_t{0});
  TraceImport import(*agent_.tracer(), chunk);
  import.add(chunk.events);
  while (!import.complete()) {
    import.add(agent_.rpc_sync<&read_trace>(To(rank).without_deadline(), import.events()).events);
  }
  return {rank, agent_.worker(rank).name, import.take(), chunk.dropped};
} catch (...) {
  base::Error error = error_in_flight(base::ErrorKind::kInternal);
  error.message = "the trace of rank " + std::to_string(rank) + ": " + error.message;
  if (error.kind == base::ErrorKind::kProtocol) error.rank = rank;  // it sent what does not fit
  throw base::Exception(error);
}

}  // namespace distrain::rpc
