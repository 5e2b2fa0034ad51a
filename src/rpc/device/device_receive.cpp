#include "device/device_receive.h"

#include <cstring>
#include <iterator>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "device/device_table.h"
#include "distrain/rpc/error.h"

namespace distrain::rpc {

uint64_t credit_of_transfer(const wire::FrameHeader& header) {
  const bool is_first =
      header.kind == wire::FrameKind::kChunk && header.context_id == 0 && header.payload_bytes > 0;
  return is_first && (header.channel & wire::kOfReply) == 0 ? chunked_bytes(header.autograd_id) : 0;
}

base::Task DeviceReceive::add_chunk_on_loop(net::InFrame frame) {
  const wire::FrameHeader& header = frame.header;
  const wire::DeviceRef device{static_cast<wire::DeviceType>(header.channel & 0x7f),
                               static_cast<uint8_t>(header.channel >> 8)};
  const uint64_t bytes = header.autograd_id;
  if (device.is_cpu() || device.type > wire::DeviceType::kPrivate) {
    wire::Reader::fail("a chunk for no device");
  }
  if (bytes > wire::Limits{}.max_payload_bytes) wire::Reader::fail("a transfer beyond the limits");
  std::shared_ptr<IncomingTransfer> transfer;
  {
    std::lock_guard lock(mutex_);
    if (header.payload_bytes == 0) {  // the sender has given up on it
      auto given_up = open_.extract(header.call_id);
      if (given_up.empty()) return {};
      return [transfer = std::move(given_up.mapped())]() mutable { transfer.reset(); };
    }
    const auto it = open_.find(header.call_id);
    if (it != open_.end()) {
      transfer = it->second;
    } else {
      std::optional<base::Error> refusal;
      if (open_.size() >= kMaxOpenTransfers) {
        std::string text = "rank " + std::to_string(from_) + " has too many transfers open: ";
        text += std::to_string(open_.size());
        refusal = base::Error{base::ErrorKind::kOverloaded, std::move(text)};
      }
      transfer = std::make_shared<IncomingTransfer>(stager_, device, bytes, std::move(refusal));
      transfer->hold_credit(credit_of_transfer(header), return_);
      open_.emplace(header.call_id, transfer);
    }
  }
  if (!(transfer->device() == device) || transfer->bytes() != bytes ||
      transfer->received() != header.context_id || header.payload_bytes != kChunkBytes ||
      transfer->received() + kChunkBytes > chunked_bytes(bytes)) {
    wire::Reader::fail("a chunk that does not fit its transfer");
  }
  if (!transfer->add_on_loop(std::move(frame))) return {};
  return [transfer] { transfer->copy_queued(); };
}

std::shared_ptr<IncomingTransfer> DeviceReceive::take(uint64_t id, wire::DeviceRef device,
                                                      uint64_t bytes) {
  decltype(open_)::node_type taken;
  {
    std::lock_guard lock(mutex_);
    taken = open_.extract(id);
  }
  if (!taken) wire::Reader::fail("a transfer that has not come");
  const std::shared_ptr<IncomingTransfer> transfer = std::move(taken.mapped());
  if (!(transfer->device() == device) || transfer->bytes() != bytes || !transfer->is_complete()) {
    wire::Reader::fail("a transfer that is not the message's");
  }
  return transfer;
}

void DeviceReceive::drop_incomplete() {
  std::vector<std::shared_ptr<IncomingTransfer>> gone;  // released without the lock
  std::lock_guard lock(mutex_);
  for (auto it = open_.begin(); it != open_.end();) {
    const bool is_part = !it->second->is_complete();
    if (is_part) gone.push_back(std::move(it->second));
    it = is_part ? open_.erase(it) : std::next(it);
  }
}

bool IncomingTransfer::add_on_loop(net::InFrame frame) {
  received_ += frame.payload.size();
  std::lock_guard lock(queue_mutex_);
  queue_.push_back(std::move(frame));
  return !std::exchange(copying_, true);
}

void IncomingTransfer::copy_queued() {
  std::lock_guard copying(copy_mutex_);
  for (;;) {
    std::vector<net::InFrame> frames;
    {
      std::lock_guard lock(queue_mutex_);
      frames.swap(queue_);
      copying_ = !frames.empty();
    }
    if (frames.empty()) return;
    if (error_) continue;
    try {
      for (net::InFrame& frame : frames) {
        const std::span<const uint8_t> bytes = frame.payload;
        copy_locked(bytes, std::move(frame.body));
      }
      stager_.restock(to_c10(device_), frames.size());
    } catch (...) {
      error_ = error_in_flight(base::ErrorKind::kInternal);
      memory_ = at::Tensor();
    }
  }
}

void IncomingTransfer::copy_locked(std::span<const uint8_t> from, base::BufferPtr keep) {
  const at::NoGradGuard no_grad;
  const c10::Device device = to_c10(device_);
  const c10::Stream stream = stager_.in_stream(device);
  const c10::StreamGuard guard(stream);
  if (!memory_.defined()) {
    memory_ =
        at::empty({static_cast<int64_t>(bytes_)}, at::TensorOptions(at::kByte).device(device));
  }
  const auto size = static_cast<int64_t>(from.size());
  const at::Tensor host =
      at::from_blob(const_cast<uint8_t*>(from.data()), {size}, at::TensorOptions(at::kByte));
  memory_.narrow(0, static_cast<int64_t>(copied_), size).copy_(host, /*non_blocking=*/true);
  copied_ += from.size();
  stager_.release_at(StreamPoint::mark(stream), std::move(keep));
}

std::pair<at::Tensor, StreamPoint> IncomingTransfer::finish(std::span<const uint8_t> rest) {
  copy_queued();
  std::lock_guard copying(copy_mutex_);
  if (error_) throw base::Exception(*error_);
  // Copied, because the message's buffer is not pinned and may be freed before the device reads it.
  base::BufferPtr block = stager_.host_block(to_c10(device_), rest.size());
  std::memcpy(block->data, rest.data(), rest.size());
  copy_locked({block->data, block->size}, block);
  return {memory_, StreamPoint::mark(stager_.in_stream(memory_.device()))};
}

}  // namespace distrain::rpc
