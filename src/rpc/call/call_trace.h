#pragma once

#include <memory>
#include <string_view>

#include "distrain/base/trace.h"

namespace distrain::rpc {

/// Prefix of the functions that collect the trace; their calls are not traced.
inline constexpr std::string_view kTraceFunctions = "distrain.trace.";

/// Returns `tracer` if it records calls of `function`; otherwise null.
inline base::Tracer* tracer_of(const std::shared_ptr<base::Tracer>& tracer,
                               std::string_view function) {
  if (!tracer || !tracer->on() || function.starts_with(kTraceFunctions)) return nullptr;
  return tracer.get();
}

/// Returns the id of a call in the trace, which both of its sides can compute.
inline uint64_t flow_id(int caller, uint64_t call_id) {
  return (static_cast<uint64_t>(caller) << 40) | call_id;
}

/// Records one side of a call as a slice of this thread, with that side's end of the flow.
class CallSlice : public base::TraceSlice {
 public:
  explicit CallSlice(base::Tracer* tracer)
      : TraceSlice(tracer ? &tracer->lane() : nullptr, {.name = "call", .category = "rpc"}) {}

  void drop() {
    if (lane_) lane_->close();
    lane_ = nullptr;
  }
  void set_name(std::string_view prefix, std::string_view function) {
    event_.name = lane_->tracer().intern(prefix, function);
  }
  void set_flow(base::TraceEvent::Kind kind, uint64_t id, base::TimePoint left = {}) {
    event_.kind = kind;
    event_.id = id;
    event_.value = left.time_since_epoch().count();
  }
  explicit operator bool() const { return lane_ != nullptr; }
};

}  // namespace distrain::rpc
