#include "device/device_streams.h"

#include <atomic>
#include <utility>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "distrain/base/thread_state.h"
#include "distrain/rpc/device.h"

namespace distrain::rpc {

namespace {

std::atomic<c10::DeviceType> type_in_use{c10::DeviceType::CPU};  // CPU: none in use

// Returns this thread's current streams, without those that are their device's default stream.
std::vector<c10::Stream> own_streams() {
  const c10::DeviceType type = type_in_use;
  if (type == c10::DeviceType::CPU) return {};
  std::vector<c10::Stream> streams;
  const c10::impl::VirtualGuardImpl devices(type);
  for (c10::DeviceIndex i = 0; i < devices.deviceCount(); ++i) {
    const c10::Stream stream = devices.getStream({type, i});
    if (stream != devices.getDefaultStream({type, i})) streams.push_back(stream);
  }
  return streams;
}

class StreamWork final : public base::QueuedWork {
 public:
  explicit StreamWork(const std::vector<c10::Stream>& streams) {
    for (const c10::Stream& stream : streams) {
      points_.emplace_back(stream.device(), StreamPoint::mark(stream));
    }
  }
  void precede_this_thread() const noexcept override {
    try {
      for (const auto& [device, point] : points_) point.make_current_wait(device);
    } catch (...) {  // the device has failed, so using the value fails too
    }
  }

 private:
  std::vector<std::pair<c10::Device, StreamPoint>> points_;
};

base::QueuedWorkPtr find_queued_work() noexcept {
  if (base::thread_state().must_not_wait) return nullptr;  // the loop computes nothing
  try {
    const std::vector<c10::Stream> streams = own_streams();
    if (!streams.empty()) return std::make_shared<StreamWork>(streams);
  } catch (...) {  // the device has failed
  }
  return nullptr;
}

void follow_default_streams(const std::vector<c10::Stream>& streams) noexcept {
  try {
    for (const c10::Stream& stream : streams) {
      const c10::impl::VirtualGuardImpl devices(stream.device_type());
      StreamPoint::mark(devices.getDefaultStream(stream.device())).make_wait(stream);
    }
  } catch (...) {  // the device has failed
  }
}

}  // namespace

void use_streams_of(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return;
  type_in_use = type;
  base::set_queued_work_finder(&find_queued_work);
}

base::Task under_this_thread(base::Task task) {
  std::vector<c10::Stream> streams = own_streams();
  if (streams.empty()) return task;
  return [streams = std::move(streams), task = std::move(task)]() mutable {
    // The worker's default stream already follows the work that completed the future.
    follow_default_streams(streams);
    const c10::MultiStreamGuard guard(streams);
    task();
    task = base::Task();
  };
}

void follow_workers() noexcept {
  try {
    follow_default_streams(own_streams());
  } catch (...) {  // the device has failed
  }
}

}  // namespace distrain::rpc
