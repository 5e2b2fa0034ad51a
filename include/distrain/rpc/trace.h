#pragma once

#include "distrain/base/trace.h"
#include "distrain/rpc/agent.h"

namespace distrain::rpc {

/// One measurement of the offset between another rank's clock and rank 0's.
struct ClockReading {
  int64_t at = 0;          ///< ns on the other rank's clock
  int64_t offset = 0;      ///< ns to add to the other rank's clock to get rank 0's
  int64_t round_trip = 0;  ///< ns of the exchange: the error of `offset` is at most half of it
};

/// All measurements of one rank's clock.
struct RankClock {
  std::string domain;                  ///< ranks with the same domain share a clock
  std::vector<ClockReading> readings;  ///< in order of time; empty if the clock is rank 0's
};

/// Converts the times of all ranks to one clock: first by the readings, then by corrections so that
/// no flow (an arrow from rank to rank) ends before it starts. `clocks` has the order of `ranks`.
/// Keeps the order of each rank's events. See Note [One clock] in src/rpc/trace/trace_align.cpp.
void align_traces(std::vector<base::RankTrace>& ranks, const std::vector<RankClock>& clocks);

/// Gathers the traces of all ranks on rank 0. The agents of all ranks must have a tracer.
///
/// Create it when all ranks have joined, and call collect() in `at_rest` of Agent::shutdown(). The
/// constructor and collect() read the other clocks, so that the drift in between is known. Throws
/// errors of its calls, and `protocol` if an answer is malformed; the message names the rank.
class TraceCollector {
 public:
  explicit TraceCollector(Agent& agent);
  /// Stops the tracers of all ranks and returns their traces, whose texts rank 0's tracer owns.
  std::vector<base::RankTrace> collect();

 private:
  void read_clocks();

  Agent& agent_;
  std::vector<RankClock> clocks_;
};

/// Until the returned guard is destroyed, adds torch's operators (`aten::add`) and the user's
/// scopes (RECORD_USER_SCOPE) to the traces of this process's ranks, as slices of the threads that
/// run them, nested in the slice of the function that a call runs. If `with_shapes`, the key of an
/// operator, such as "elements of [2, 3], []", has the shapes of its arguments ([] if no tensor).
[[nodiscard]] std::shared_ptr<void> trace_operators(bool with_shapes = false);

/// Records a span in the agent's trace until the end of the block, or until a future is done. It
/// may end on any thread, so it is shown apart from threads, as calls are.
class TraceSpan {
 public:
  TraceSpan(Agent& agent, std::string_view name);
  TraceSpan(TraceSpan&&) = delete;
  /// Lets the span end with `future`. Returns a future of the same value, which is done when the
  /// span is recorded. Throws `invalid` if called a second time.
  template <class T>
  base::Future<T> end_with(const base::Future<T>& future) {
    if (!open_) base::invalid("TraceSpan::end_with() can only be called once");
    future.state()->on_ready([open = std::move(open_)](auto&) mutable { open.reset(); });
    return future.shared();
  }

 private:
  std::shared_ptr<void> open_;  // records the span when destroyed
};

/// Returns the trace of this rank, without calling other ranks.
base::RankTrace own_trace(Agent& agent);

}  // namespace distrain::rpc
