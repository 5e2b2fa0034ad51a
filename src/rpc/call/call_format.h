#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"

namespace distrain::rpc {

// Body of kCall: string function · u32 milliseconds that the caller waits (0: for ever) · u8 mode ·
// (remote: u64 RRef id · u64 fork) · arguments

enum class CallMode : uint8_t { kCall = 0, kRemote = 1 };

/// Returns `timeout` as a call encodes it.
inline uint32_t wait_ms(base::Duration timeout) {
  if (timeout == base::Duration::max()) return 0;
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(ms, 1, UINT32_MAX));
}

/// Returns `error` with this rank and function as origin, unless it has another origin.
inline base::Error with_origin(base::Error error, int rank, const std::string& op) {
  if (error.rank < 0) error.rank = rank;
  if (error.op.empty()) error.op = op;
  return error;
}

}  // namespace distrain::rpc
