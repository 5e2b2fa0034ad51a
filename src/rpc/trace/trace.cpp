#include "distrain/rpc/trace.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include "trace/trace_export.h"

namespace distrain::rpc {

namespace {

using Kind = base::TraceEvent::Kind;

// Before a trace is read, threads have this time to end the slices of calls already answered.
constexpr base::Duration kSliceTimeout = std::chrono::seconds(2);

ClockAnswer read_trace_clock(CallContext& call) {
  const base::Tracer& tracer = *call.agent.tracer();
  return {tracer.clock_domain(), tracer.shown(base::Tracer::now())};
}

/// Stops this rank's tracer and returns its events.
ExportedTrace read_trace(CallContext& call) {
  base::Tracer& tracer = *call.agent.tracer();
  tracer.stop();
  tracer.wait_until_closed(kSliceTimeout);
  const std::vector<base::TraceTrack> tracks = tracer.tracks();
  ExportedTrace trace{.dropped = tracer.dropped()};
  size_t count = 0;
  for (const base::TraceTrack& track : tracks) count += track.events.size();
  trace.events = at::empty({static_cast<int64_t>(count), kTraceColumns}, at::kLong);
  auto* row = trace.events.mutable_data_ptr<int64_t>();
  std::unordered_map<const char*, int64_t> places;
  const auto place = [&](const char* text) {
    const auto [it, is_new] = places.try_emplace(text, trace.texts.size());
    if (is_new) trace.texts.emplace_back(text);
    return it->second;
  };
  for (const base::TraceTrack& track : tracks) {
    trace.tracks.emplace_back(track.name, track.events.size());
    for (const base::TraceEvent& event : track.events) {
      *row++ = static_cast<int64_t>(event.kind);
      *row++ = place(event.name);
      *row++ = place(event.category);
      *row++ = event.key ? place(event.key) : -1;
      *row++ = event.value;
      *row++ = event.start;
      *row++ = event.end;
      *row++ = static_cast<int64_t>(event.id);
    }
  }
  return trace;
}

}  // namespace

void expose_trace(Agent& agent) {
  agent.expose<&read_trace_clock>("distrain.trace.clock");
  agent.expose<&read_trace>("distrain.trace.events");
}

std::vector<base::TraceTrack> import_trace(base::Tracer& tracer, const ExportedTrace& trace) {
  const at::Tensor& events = trace.events;
  if (!events.defined() || events.scalar_type() != at::kLong || events.dim() != 2 ||
      events.size(1) != kTraceColumns) {
    wire::Reader::fail("a malformed trace");
  }
  auto left = static_cast<uint64_t>(events.size(0));
  if (left > base::Tracer::kLimit) wire::Reader::fail("a trace of too many events");
  std::vector<const char*> texts;
  for (const std::string& text : trace.texts) texts.push_back(tracer.intern({}, text));
  const auto text = [&texts](int64_t place) {
    if (place < 0 || place >= static_cast<int64_t>(texts.size())) {
      wire::Reader::fail("a trace with a text that is not there");
    }
    return texts[static_cast<size_t>(place)];
  };
  const at::Tensor rows = events.contiguous();
  const auto* row = rows.const_data_ptr<int64_t>();
  std::vector<base::TraceTrack> tracks;
  for (const auto& [name, count] : trace.tracks) {
    if (count > left) wire::Reader::fail("a trace with fewer events than its tracks have");
    left -= count;
    base::TraceTrack& track = tracks.emplace_back(base::TraceTrack{name, {}});
    track.events.reserve(count);
    for (uint64_t i = 0; i < count; ++i, row += kTraceColumns) {
      const bool is_known = row[0] >= 0 && row[0] <= static_cast<int64_t>(Kind::kAsync);
      const bool is_slice = is_time(row[5]) && is_time(row[6]) && row[5] <= row[6];
      // The start of a flow must lie within its slice.
      const bool leaves_later =
          row[0] == static_cast<int64_t>(Kind::kFlowOut) && (row[4] < row[5] || row[4] > row[6]);
      if (!is_known || !is_slice || leaves_later) {
        wire::Reader::fail("a malformed event in a trace");
      }
      track.events.push_back({static_cast<Kind>(row[0]), text(row[1]), text(row[2]),
                              row[3] < 0 ? nullptr : text(row[3]), row[4], row[5], row[6],
                              static_cast<uint64_t>(row[7])});
    }
  }
  if (left > 0) wire::Reader::fail("a trace with more events than its tracks have");
  return tracks;
}

// ---- on rank 0 ----

namespace {

// Rethrows the current exception and adds `rank`, whose trace was being read, to its message.
[[noreturn]] void rethrow_naming(int rank) {
  base::Error error = error_in_flight(base::ErrorKind::kInternal);
  error.message = fmt::format("the trace of rank {}: {}", rank, error.message);
  if (error.kind == base::ErrorKind::kProtocol) error.rank = rank;  // that rank sent bad data
  throw base::Exception(error);
}

// Reads a clock as NTP does: of several exchanges, the one with the shortest round trip counts.
ClockReading read_clock(Agent& agent, int rank) try {
  const base::Tracer& tracer = *agent.tracer();
  constexpr int kExchanges = 16;
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
  const auto trace = agent.rpc_sync<&read_trace>(To(rank).without_deadline());
  return {rank, agent.worker(rank).name, import_trace(*agent.tracer(), trace), trace.dropped};
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

// Reads each clock except rank 0's. Ranks that share a clock use one rank's readings.
void TraceCollector::read_clocks() {
  for (size_t rank = 1; rank < clocks_.size(); ++rank) {
    RankClock& clock = clocks_[rank];
    if (clock.domain == clocks_[0].domain || agent_.is_done_without(static_cast<int>(rank)))
      continue;
    const auto first = std::ranges::find_if(clocks_, [&](const RankClock& other) {
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
      if (agent_.is_done_without(rank)) continue;  // the trace was lost with the rank
      ranks.push_back(collect_from(agent_, rank));
      clocks.push_back(clocks_[static_cast<size_t>(rank)]);
    } catch (const base::Exception&) {
      if (!agent_.is_done_without(rank)) throw;
    }
  }
  align_traces(ranks, clocks);
  return ranks;
}

std::shared_ptr<void> trace_operators(bool with_shapes) {
  struct Open final : at::ObserverContext {
    base::TraceLane* lane = base::detail::trace_lane;
    base::TraceEvent event{.category = "operator", .start = base::Tracer::now()};
  };
  const auto begin =
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    base::TraceLane* const lane = base::detail::trace_lane;
    if (!lane || !lane->tracer().on()) return nullptr;
    auto open = std::make_unique<Open>();
    if (!function.needsInputs()) return open;
    std::string shapes;
    for (const c10::IValue& input : function.inputs()) {
      const at::Tensor tensor = input.isTensor() ? input.toTensor() : at::Tensor();
      const auto sizes = tensor.defined() ? tensor.sizes() : at::IntArrayRef();
      shapes += (shapes.empty() ? "" : ", ") + c10::str(sizes);
      open->event.value += tensor.defined() ? tensor.numel() : 0;
    }
    open->event.key = lane->intern("elements of " + shapes);
    return open;
  };
  const auto end = [](const at::RecordFunction& function, at::ObserverContext* context) {
    auto* open = static_cast<Open*>(context);
    // A scope that ends on another thread is not a slice of one thread.
    if (!open || open->lane != base::detail::trace_lane) return;
    open->event.name = open->lane->intern(function.name());
    open->event.end = base::Tracer::now();
    open->lane->record(open->event);
  };
  const auto handle =
      at::addGlobalCallback(at::RecordFunctionCallback(begin, end)
                                .needsInputs(with_shapes)
                                .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
  return {nullptr, [handle](void*) { at::removeCallback(handle); }};
}

TraceSpan::TraceSpan(Agent& agent, std::string_view name) {
  const std::shared_ptr<base::Tracer> tracer = agent.tracer();
  base::TraceEvent event{.kind = Kind::kAsync, .category = "span", .start = base::Tracer::now()};
  if (tracer) {
    event.name = tracer->intern({}, name);
    event.id = static_cast<uint64_t>(agent.rank()) << 40 | tracer->next_id();
  }
  open_ = std::shared_ptr<void>(this, [tracer, event](void*) mutable {
    event.end = base::Tracer::now();
    if (tracer && tracer->on()) tracer->record(event);
  });
}

}  // namespace distrain::rpc
