#include "distrain/rpc/device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "distrain/base/thread_state.h"

namespace distrain::rpc {

using c10::impl::VirtualGuardImpl;

c10::Stream current_stream(c10::Device device) {
  return VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream side_stream(c10::Device device) {
  return VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

StreamPoint StreamPoint::mark(c10::Device device) {
  return is_accelerator(device) ? mark(current_stream(device)) : StreamPoint();
}

StreamPoint StreamPoint::mark(const c10::Stream& stream) {
  StreamPoint point;
  point.event_ = std::make_shared<c10::Event>(stream.device_type());
  point.event_->record(stream);
  return point;
}

void StreamPoint::make_wait(const c10::Stream& stream) const {
  if (event_) event_->block(stream);
}

void StreamPoint::make_current_wait(c10::Device device) const {
  if (event_ && is_accelerator(device)) make_wait(current_stream(device));
}

void StreamPoint::wait_on_host() const {
  if (!event_ || event_->query()) return;
  const base::BlockingScope blocking;
  event_->synchronize();
}

bool StreamPoint::reached() const { return !event_ || event_->query(); }

void use_on_stream(const at::Tensor& tensor, const c10::Stream& stream) {
  if (tensor.is_sparse()) {
    use_on_stream(tensor._indices(), stream);
    use_on_stream(tensor._values(), stream);
    return;
  }
  VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

int64_t peak_device_bytes(c10::Device device) {
  if (!is_accelerator(device)) return 0;
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (!allocator || !allocator->initialized()) return 0;
  using c10::CachingAllocator::StatType;
  return allocator->getDeviceStats(device.index())
      .allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)]
      .peak;
}

}  // namespace distrain::rpc
