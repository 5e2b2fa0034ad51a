#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/base/trace.h"
#include "distrain/rpc/agent.h"

namespace distrain::rpc {

/// A clock that is read for another rank.
struct ClockAnswer {
  std::string domain;
  int64_t now = 0;
  static constexpr auto kFields = std::tuple(&ClockAnswer::domain, &ClockAnswer::now);
};

/// Some of the events of a rank: int64 [n, kTraceColumns], in the order of the columns kind · name
/// · category · key · value · start · end · id. Names and categories are places in `texts`, a key
/// is too, or -1. The first chunk has the texts, the tracks' names and numbers of events, in order.
struct TraceChunk {
  uint64_t dropped = 0;
  std::vector<std::string> texts;
  std::vector<std::pair<std::string, uint64_t>> tracks;
  at::Tensor events;
  static constexpr auto kFields = std::tuple(&TraceChunk::dropped, &TraceChunk::texts,
                                             &TraceChunk::tracks, &TraceChunk::events);
};
inline constexpr int64_t kTraceColumns = 8;

/// What the times of a peer lie within, ns on either side of 0: 36 years, longer than a monotonic
/// clock has run, or a job. Sums and differences of up to seven of them fit.
inline constexpr int64_t kMostTime = int64_t{1} << 60;
inline bool is_time(int64_t ns) { return -kMostTime <= ns && ns <= kMostTime; }

/// How long a rank waits for slices that are still under way when its trace is asked for: those
/// whose reply has been heard already, but which their threads have not ended yet.
inline constexpr base::Duration kTraceSettles = std::chrono::seconds(2);

// What rank 0 asks for.
ClockAnswer read_trace_clock(CallContext& call);
/// The events from `first` on. Number 0 stops the tracer.
TraceChunk read_trace(CallContext& call, uint64_t first);

/// Makes these callable. For an agent with a tracer.
void expose_trace(Agent& agent);

/// The tracks of a rank from its chunks in turn. Throws `protocol` if they do not fit together.
class TraceImport {
 public:
  /// Texts are kept by `tracer`.
  TraceImport(base::Tracer& tracer, const TraceChunk& first);

  void add(const at::Tensor& events);
  uint64_t events() const { return events_; }
  bool complete() const { return events_ == total_; }
  std::vector<base::TraceTrack> take() { return std::move(tracks_); }

 private:
  std::vector<const char*> texts_;
  std::vector<base::TraceTrack> tracks_;
  std::vector<uint64_t> wanted_;  // of each track
  size_t track_ = 0;
  uint64_t events_ = 0;
  uint64_t total_ = 0;
};

}  // namespace distrain::rpc
