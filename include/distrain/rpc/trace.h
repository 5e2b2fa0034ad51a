#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "distrain/base/trace.h"
#include "distrain/rpc/agent.h"

namespace distrain::rpc {

/// How far another rank's clock is from rank 0's, by one exchange of messages.
struct ClockReading {
  int64_t at = 0;          ///< ns on that rank's clock
  int64_t offset = 0;      ///< to be added to it, for rank 0's
  int64_t round_trip = 0;  ///< of the exchange: the offset is off by half of it at most
};

/// What is known of the clock of one rank.
struct RankClock {
  std::string domain;                  ///< ranks with the same one have one clock
  std::vector<ClockReading> readings;  ///< from first to last; none: the clock is rank 0's
};

/// Brings the times of all ranks to one clock: by the readings first, then so that no flow's end
/// comes before its start. `clocks` in the order of `ranks`. Times of one rank keep their order.
/// See Note [One clock] in src/rpc/trace_align.cpp.
void align_traces(std::vector<base::RankTrace>& ranks, const std::vector<RankClock>& clocks);

/// On rank 0 of a job whose agents all have a tracer: gathers what they recorded.
///
/// Make it once all have joined, and call collect() in the `at_rest` of Agent::shutdown: both read
/// the other clocks that there are. Throws what the calls throw, and `protocol` for an answer that
/// does not fit; the message names the rank.
class TraceCollector {
 public:
  explicit TraceCollector(Agent& agent);

  /// Stops the tracers of all ranks. Texts live as long as the agent's tracer.
  std::vector<base::RankTrace> collect();

 private:
  void read_clocks();

  Agent& agent_;
  std::vector<RankClock> clocks_;
};

/// What the tracer of one rank has, without asking anybody.
base::RankTrace own_trace(Agent& agent);

}  // namespace distrain::rpc
