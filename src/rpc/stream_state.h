#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "distrain/base/executor.h"
#include "distrain/rpc/device.h"

namespace distrain::rpc {

/// Takes care that work which goes from one thread to another stays in order on the devices: see
/// Note [Streams] in distrain/rpc/device.h. Where no device is in use, and where threads have left
/// their current streams at the defaults, there is nothing to do.
class StreamState {
 public:
  /// From now on devices of this type are looked at. Thread-safe.
  void use(c10::DeviceType type) { type_ = type; }

  /// A task for a worker, given to it by this thread: it runs behind what this thread has put into
  /// streams of its own.
  base::Task behind_this_thread(base::Task task) const;
  /// A continuation that is registered by this thread: it runs under its streams.
  base::Task under_this_thread(base::Task task) const;

 private:
  std::vector<c10::Stream> own_streams() const;

  std::atomic<c10::DeviceType> type_{c10::DeviceType::CPU};  // none
};

}  // namespace distrain::rpc
