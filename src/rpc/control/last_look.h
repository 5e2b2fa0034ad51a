#pragma once

#include <chrono>

namespace distrain::rpc::control {

/// A loop that was late, as its process was stopped, runs its timers before it looks at its
/// sockets, where what was waited for may be. So who has waited long enough waits so much longer.
inline constexpr auto kLastLook = std::chrono::milliseconds(50);

}  // namespace distrain::rpc::control
