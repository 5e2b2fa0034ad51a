#pragma once

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

/// The answer to rank 0's query of this rank's clock.
struct ClockAnswer {
  std::string domain;
  int64_t now = 0;
  static constexpr auto kFields = std::tuple(&ClockAnswer::domain, &ClockAnswer::now);
};

/// The events of a rank: an int64 tensor [n, kTraceColumns]. Columns: kind, name, category, key,
/// value, start, end, id. Name, category and key are indices into `texts`; -1 means no key.
/// `tracks` has, in order, the tracks' names and numbers of events.
struct ExportedTrace {
  uint64_t dropped = 0;
  std::vector<std::string> texts;
  std::vector<std::pair<std::string, uint64_t>> tracks;
  at::Tensor events;
  static constexpr auto kFields = std::tuple(&ExportedTrace::dropped, &ExportedTrace::texts,
                                             &ExportedTrace::tracks, &ExportedTrace::events);
};
inline constexpr int64_t kTraceColumns = 8;

/// Limit for a peer's times: 2^60 ns (36 years) before or after 0, longer than any monotonic clock
/// has run. Sums and differences of up to seven such times do not overflow.
inline constexpr int64_t kMostTime = int64_t{1} << 60;
inline bool is_time(int64_t ns) { return -kMostTime <= ns && ns <= kMostTime; }

/// Exposes the functions by which rank 0 reads the trace. The agent must have a tracer.
void expose_trace(Agent& agent);

/// Returns the tracks of `trace`, which another rank sent; `tracer` owns the texts of the events.
/// Throws `protocol` if the trace is malformed.
std::vector<base::TraceTrack> import_trace(base::Tracer& tracer, const ExportedTrace& trace);

}  // namespace distrain::rpc
