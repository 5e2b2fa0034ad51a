#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <ATen/Functions.h>

#include "../src/rpc/trace/trace_export.h"
#include "distrain/base/trace.h"
#include "distrain/rpc/agent.h"

namespace distrain::testing {

/// Returns the part of a rank's trace that begins at event number `first`.
using TraceAnswer = std::function<rpc::TraceChunk(uint64_t first)>;

namespace detail {

struct FakeTrace {
  TraceAnswer answer;
  rpc::ClockAnswer clock;
};
inline rpc::ClockAnswer fake_clock(rpc::CallContext& call) {
  return call.agent.local<FakeTrace>().clock;
}
inline rpc::TraceChunk fake_trace(rpc::CallContext& call, uint64_t first) {
  return call.agent.local<FakeTrace>().answer(first);
}

}  // namespace detail

/// Exposes a fake trace on an agent without a tracer. If `clock.domain` is empty, sets it to this
/// machine's clock domain.
inline void expose_fake_trace(rpc::Agent& agent, TraceAnswer answer, rpc::ClockAnswer clock = {}) {
  if (clock.domain.empty()) clock.domain = base::Tracer().clock_domain();
  agent.provide(
      std::make_shared<detail::FakeTrace>(detail::FakeTrace{std::move(answer), std::move(clock)}));
  agent.expose<&detail::fake_clock>("distrain.trace.clock");
  agent.expose<&detail::fake_trace>("distrain.trace.events");
}

/// Returns the first part, with one event, of a trace that claims `events` events.
inline rpc::TraceChunk first_part(uint64_t events) {
  rpc::TraceChunk part;
  part.texts = {"name", "category"};
  part.tracks = {{"main", events}};
  // The columns are kind, name, category, key, value, start, end, id.
  part.events = at::tensor({0, 0, 1, -1, 0, 10, 20, 0}, at::kLong).view({1, 8});
  return part;
}

}  // namespace distrain::testing
