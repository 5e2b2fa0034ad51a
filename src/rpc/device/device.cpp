#include "distrain/rpc/device.h"

#include <algorithm>
#include <cstring>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "device/device_table.h"
#include "distrain/rpc/to_device.h"

namespace distrain::rpc {

using c10::impl::VirtualGuardImpl;

void make_current(c10::Device device) noexcept {
  if (!is_accelerator(device)) return;
  try {
    const VirtualGuardImpl devices(device.type());
    if (devices.getDevice() != device) devices.setDevice(device);
  } catch (...) {  // later device work reports the error
  }
}

c10::Stream current_stream(c10::Device device) {
  return VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream side_stream(c10::Device device) {
  return VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

// Uses DeviceGuards, because CUDA events and event queries use the thread's current device. On a
// thread that has set no device, they would create a context on cuda:0.
StreamPoint StreamPoint::mark(const c10::Stream& stream) {
  const c10::DeviceGuard guard(stream.device());
  StreamPoint point;
  point.event_ = std::shared_ptr<c10::Event>(
      new c10::Event(stream.device_type()), [device = stream.device()](c10::Event* event) {
        try {
          const c10::DeviceGuard there(device);
          delete event;
        } catch (const c10::Error&) {  // the device has failed, so its event need not be destroyed
        }
      });
  point.event_->record(stream);
  return point;
}

void StreamPoint::make_wait(const c10::Stream& stream) const {
  if (!event_) return;
  const c10::DeviceGuard guard(stream.device());
  event_->block(stream);
}

void StreamPoint::wait_on_host() const {
  if (reached()) return;
  const base::BlockingScope blocking;
  const c10::DeviceGuard guard(event_->device());
  event_->synchronize();
}

void StreamPoint::wait_in_destructor() const noexcept {
  try {
    if (!event_) return;
    const c10::DeviceGuard guard(event_->device());
    event_->synchronize();
  } catch (...) {  // a failed device does no more work
  }
}

bool StreamPoint::reached() const {
  if (!event_) return true;
  const c10::DeviceGuard guard(event_->device());
  return event_->query();
}

void use_on_stream(const at::Tensor& tensor, const c10::Stream& stream) {
  if (tensor.is_sparse()) {
    use_on_stream(tensor._indices(), stream);
    use_on_stream(tensor._values(), stream);
    return;
  }
  VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

at::Tensor pinned_bytes(c10::Device device, int64_t bytes) {
  const c10::DeviceGuard guard(device);
  c10::Allocator* const allocator =
      at::globalContext().getAcceleratorHooksInterface(device.type()).getPinnedMemoryAllocator();
  return at::detail::empty_generic({bytes}, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   at::kByte, std::nullopt);
}

std::vector<at::Tensor> to_host(const std::vector<at::Tensor>& tensors) {
  constexpr int64_t kPieceBytes = int64_t{4} << 20;
  struct Piece {
    at::Tensor from;  // bytes on the device
    uint8_t* to;
    StreamPoint copied;
  };
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> results;
  std::vector<Piece> pieces;
  for (const at::Tensor& tensor : tensors) {
    results.push_back(tensor);
    if (!tensor.defined() || !is_accelerator(tensor.device())) continue;
    const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().contiguous();
    results.back() = at::empty(plain.sizes(), at::TensorOptions(plain.scalar_type()));
    if (plain.numel() == 0) continue;
    const at::Tensor bytes = plain.view(-1).view(at::kByte);
    auto* const to = static_cast<uint8_t*>(results.back().mutable_data_ptr());
    for (int64_t i = 0; i < bytes.numel(); i += kPieceBytes) {
      pieces.push_back({bytes.narrow(0, i, std::min(kPieceBytes, bytes.numel() - i)), to + i, {}});
    }
  }
  if (pieces.empty()) return results;
  const c10::Device device = pieces[0].from.device();
  int64_t longest = 0;
  for (const Piece& piece : pieces) longest = std::max(longest, piece.from.numel());
  const at::Tensor blocks[2] = {pinned_bytes(device, longest), pinned_bytes(device, longest)};
  const auto take_out = [&](size_t i) {
    pieces[i].copied.wait_on_host();
    std::memcpy(pieces[i].to, blocks[i % 2].const_data_ptr(), pieces[i].from.nbytes());
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    at::Tensor& from = pieces[i].from;
    blocks[i % 2].narrow(0, 0, from.numel()).copy_(from, /*non_blocking=*/true);
    pieces[i].copied = StreamPoint::mark(from.device());
    if (i > 0) take_out(i - 1);
  }
  take_out(pieces.size() - 1);
  return results;
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

// ---- moving tensors between ranks ----

at::Tensor to_device(const at::Tensor& tensor, c10::Device device) {
  if (tensor.device() == device) return tensor;
  if (is_accelerator(device)) return tensor.to(device, /*non_blocking=*/tensor.is_cpu());
  const base::BlockingScope waits;  // for the copy to complete
  return tensor.to(device);
}

void check_rows(const at::Tensor& index, const at::Tensor& table) {
  if (is_accelerator(table.device())) expect_rows(index, table);
}

void expect_rows(const at::Tensor& index, const at::Tensor& table) {
  if (index.numel() == 0 || !at::isIntegralType(index.scalar_type(), false)) return;
  const auto [least, most] = at::aminmax(to_device(index, c10::kCPU));
  const auto low = least.item<int64_t>(), high = most.item<int64_t>();
  TORCH_CHECK_INDEX(low >= 0 && high < table.size(0), "index ", low < 0 ? low : high,
                    " is out of range, the table has ", table.size(0), " rows");
}

at::Tensor for_rank(const Agent& agent, int rank, const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const bool arrives_on_cpu = agent.device_of(rank) == c10::Device(c10::kCPU).str();
  return to_device(tensor, arrives_on_cpu ? c10::Device(c10::kCPU) : agent.device());
}

// ---- passing work between threads ----

namespace {

std::atomic<c10::DeviceType> type_in_use{c10::DeviceType::CPU};  // CPU: none in use

// Returns this thread's current stream of each device, unless it is the default stream.
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
    // `streams` follow the default streams, which wait for the work that completed the future.
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
