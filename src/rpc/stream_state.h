#pragma once

#include <c10/core/Device.h>

#include "distrain/base/executor.h"

namespace distrain::rpc {

// These take care that work which goes from one thread to another stays in order on the devices:
// see Note [Streams] in distrain/rpc/device.h. Where no device is in use, and where threads have
// left their current streams at the defaults, there is nothing to do. Thread-safe.

/// From now on the streams of devices of this type are looked at, here and by whoever completes a
/// future. A process has accelerators of one type.
void use_streams_of(c10::DeviceType type);

/// A continuation that is registered by this thread: it runs under its streams.
base::Task under_this_thread(base::Task task);

/// This thread's own streams go on behind what workers computed in the devices' default streams.
void follow_workers() noexcept;

}  // namespace distrain::rpc
