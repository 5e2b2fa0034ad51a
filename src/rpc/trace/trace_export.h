#pragma once

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

/// The answer to rank 0's query of this rank's clock.
struct ClockAnswer {
  std::string domain;
  int64_t now = 0;
  static constexpr auto kFields = std::tuple(&ClockAnswer::domain, &ClockAnswer::now);
};

/// A chunk of a rank's events: an int64 tensor [n, kTraceColumns]. Columns: kind, name, category,
/// key, value, start, end, id. Name, category and key are indices into `texts`; -1 means no key.
/// The first chunk also contains the texts and, in order, the tracks' names and numbers of events.
struct TraceChunk {
  uint64_t dropped = 0;
  std::vector<std::string> texts;
  std::vector<std::pair<std::string, uint64_t>> tracks;
  at::Tensor events;
  static constexpr auto kFields = std::tuple(&TraceChunk::dropped, &TraceChunk::texts,
                                             &TraceChunk::tracks, &TraceChunk::events);
};
inline constexpr int64_t kTraceColumns = 8;

/// Limit for a peer's times: 2^60 ns (36 years) before or after 0, longer than any monotonic clock
/// has run. Sums and differences of up to seven such times do not overflow.
inline constexpr int64_t kMostTime = int64_t{1} << 60;
inline bool is_time(int64_t ns) { return -kMostTime <= ns && ns <= kMostTime; }

/// Exposes the functions by which rank 0 reads the trace. The agent must have a tracer.
void expose_trace(Agent& agent);

/// Builds a rank's tracks from its chunks. Throws `protocol` if the chunks are inconsistent.
class TraceImport {
 public:
  /// `tracer` owns the texts of the events.
  TraceImport(base::Tracer& tracer, const TraceChunk& first);

  void add(const at::Tensor& events);
  uint64_t events() const { return events_; }
  bool complete() const { return events_ == total_; }
  std::vector<base::TraceTrack> take() { return std::move(tracks_); }

 private:
  std::vector<const char*> texts_;
  std::vector<base::TraceTrack> tracks_;
  std::vector<uint64_t> wanted_;  // number of events of each track
  size_t track_ = 0;
  uint64_t events_ = 0;
  uint64_t total_ = 0;
};

}  // namespace distrain::rpc
