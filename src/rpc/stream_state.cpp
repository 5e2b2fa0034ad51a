#include "stream_state.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace distrain::rpc {

// Those of this thread's current streams that are not their device's default one.
std::vector<c10::Stream> StreamState::own_streams() const {
  const c10::DeviceType type = type_;
  if (type == c10::DeviceType::CPU) return {};
  std::vector<c10::Stream> streams;
  const c10::impl::VirtualGuardImpl devices(type);
  for (c10::DeviceIndex i = 0; i < devices.deviceCount(); ++i) {
    const c10::Stream stream = devices.getStream({type, i});
    if (stream != devices.getDefaultStream({type, i})) streams.push_back(stream);
  }
  return streams;
}

base::Task StreamState::behind_this_thread(base::Task task) const {
  const std::vector<c10::Stream> streams = own_streams();
  if (streams.empty()) return task;
  std::vector<std::pair<c10::Device, StreamPoint>> points;
  for (const c10::Stream& stream : streams) {
    points.emplace_back(stream.device(), StreamPoint::mark(stream));
  }
  return [points = std::move(points), task = std::move(task)]() mutable {
    for (const auto& [device, point] : points) point.make_current_wait(device);
    task();
    task = base::Task();
  };
}

base::Task StreamState::under_this_thread(base::Task task) const {
  std::vector<c10::Stream> streams = own_streams();
  if (streams.empty()) return task;
  return [streams = std::move(streams), task = std::move(task)]() mutable {
    // What has completed the future is behind the worker's own stream by now.
    for (const c10::Stream& stream : streams) StreamPoint::mark(stream.device()).make_wait(stream);
    const c10::MultiStreamGuard guard(streams);
    task();
    task = base::Task();
  };
}

}  // namespace distrain::rpc
