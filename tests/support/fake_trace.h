#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <ATen/Functions.h>

#include "../src/rpc/trace/trace_export.h"
#include "distrain/base/trace.h"
#include "distrain/rpc/agent.h"

namespace distrain::testing {

/// Returns a rank's trace.
using TraceAnswer = std::function<rpc::ExportedTrace()>;

namespace detail {

struct FakeTrace {
  TraceAnswer answer;
  rpc::ClockAnswer clock;
};
inline rpc::ClockAnswer fake_clock(rpc::CallContext& call) {
  return call.agent.local<FakeTrace>().clock;
}
inline rpc::ExportedTrace fake_trace(rpc::CallContext& call) {
  return call.agent.local<FakeTrace>().answer();
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

/// Returns a trace of one event that claims to have `events` events.
inline rpc::ExportedTrace exported_trace(uint64_t events) {
  rpc::ExportedTrace trace;
  trace.texts = {"name", "category"};
  trace.tracks = {{"main", events}};
  // The columns are kind, name, category, key, value, start, end, id.
  trace.events = at::tensor({0, 0, 1, -1, 0, 10, 20, 0}, at::kLong).view({1, 8});
  return trace;
}

}  // namespace distrain::testing
