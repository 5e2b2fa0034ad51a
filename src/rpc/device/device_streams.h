#pragma once

#include <c10/core/Device.h>

#include "distrain/base/executor.h"

namespace distrain::rpc {

// These functions keep work that passes from one thread to another in order on the devices: Note
// [Streams] in distrain/rpc/device.h. They do nothing if no device is in use or the thread's
// current streams are the default ones. Thread-safe.

/// Makes these functions, and futures that are completed, consider the streams of devices of this
/// type. A process uses accelerators of one type.
void use_streams_of(c10::DeviceType type);

/// Wraps a continuation so that it runs with the streams of the thread that registers it.
base::Task under_this_thread(base::Task task);

/// Orders this thread's own streams after the work that workers put into the default streams.
void follow_workers() noexcept;

}  // namespace distrain::rpc
