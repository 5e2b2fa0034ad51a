#pragma once

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

/// A reading of this rank's clock, for rank 0.
struct ClockAnswer {
  std::string domain;
  int64_t now = 0;
  static constexpr auto kFields = std::tuple(&ClockAnswer::domain, &ClockAnswer::now);
};

/// A part of a rank's events: int64 [n, kTraceColumns] with the columns kind · name · category ·
/// key · value · start · end · id. Name, category and key are indices into `texts`; a key may be
/// -1. The first chunk contains the texts, and the names and event counts of the tracks, in order.
struct TraceChunk {
  uint64_t dropped = 0;
  std::vector<std::string> texts;
  std::vector<std::pair<std::string, uint64_t>> tracks;
  at::Tensor events;
  static constexpr auto kFields = std::tuple(&TraceChunk::dropped, &TraceChunk::texts,
                                             &TraceChunk::tracks, &TraceChunk::events);
};
inline constexpr int64_t kTraceColumns = 8;

/// Limit for the times of a peer, ns on either side of 0: 36 years, longer than any monotonic clock
/// has run. Sums and differences of up to seven such times do not overflow.
inline constexpr int64_t kMostTime = int64_t{1} << 60;
inline bool is_time(int64_t ns) { return -kMostTime <= ns && ns <= kMostTime; }

/// Exposes the functions that rank 0 calls, on an agent with a tracer.
void expose_trace(Agent& agent);

/// Assembles the tracks of a rank from its chunks. Throws `protocol` if they do not fit together.
class TraceImport {
 public:
  /// `tracer` owns the texts.
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
