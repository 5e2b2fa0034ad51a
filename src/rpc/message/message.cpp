#include "distrain/rpc/message.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/strides.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "device/device_table.h"
#include "device/device_transfer.h"
#include "rref/rref_context.h"

namespace distrain::rpc {

namespace {

constexpr uint8_t kZeros[wire::kPayloadAlignment] = {};

wire::Layout layout_of(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return wire::Layout::kRowMajor;
  return tensor.dim() == 4 ? wire::Layout::kChannelsLast : wire::Layout::kChannelsLast3d;
}

std::vector<int64_t> strides_of(const wire::TensorDesc& desc) {
  using wire::Layout;
  if (desc.layout == Layout::kChannelsLast) return c10::get_channels_last_strides_2d(desc.sizes);
  if (desc.layout == Layout::kChannelsLast3d) return c10::get_channels_last_strides_3d(desc.sizes);
  const auto strides = c10::contiguous_strides(desc.sizes);
  return {strides.begin(), strides.end()};
}

wire::TensorDesc desc_of(const OutMessage& message, size_t i) {
  const at::Tensor& tensor = message.tensors[i];
  return {to_dtype(tensor.scalar_type()), tensor.sizes().vec(), layout_of(tensor),
          message.devices[i]};
}

using TransferPtr = std::shared_ptr<IncomingTransfer>;

// Takes all transfers of a message before anything is decoded. If decoding failed first, nobody
// would take the remaining transfers.
std::vector<TransferPtr> take_transfers(const std::vector<DeviceGroup>& groups, wire::Reader& meta,
                                        DeviceStager& stager, DeviceReceive* device_receive) {
  std::vector<TransferPtr> taken;
  for (const DeviceGroup& group : groups) {
    const auto id = meta.get<uint64_t>();
    const uint64_t bytes = group.layout.bytes;
    if (chunked_bytes(bytes) == 0) {
      taken.push_back(std::make_shared<IncomingTransfer>(stager, group.device, bytes));
    } else if (device_receive) {
      taken.push_back(device_receive->take(id, group.device, bytes));
    } else {
      wire::Reader::fail("a transfer that has not come");
    }
  }
  return taken;
}

std::vector<RRefTicket> read_tickets(wire::Reader& meta) {
  constexpr size_t kTicketBytes = 25;
  std::vector<RRefTicket> tickets(meta.get_count(kTicketBytes));
  for (RRefTicket& ticket : tickets) {
    ticket.id = meta.get<uint64_t>();
    ticket.owner = meta.get<uint32_t>();
    ticket.mode = meta.get<uint8_t>();
    ticket.fork = meta.get<uint64_t>();
    ticket.parent = meta.get<int32_t>();
  }
  return tickets;
}

// Builds the device tensors of a message from its transfers.
void receive_groups(InMessage& message, const std::vector<wire::TensorDesc>& descs,
                    const std::vector<DeviceGroup>& groups,
                    const std::vector<TransferPtr>& transfers, std::span<const uint8_t> payload,
                    uint64_t begin) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;  // autograd must not record aliases
  for (size_t g = 0; g < groups.size(); ++g) {
    const DeviceGroup& group = groups[g];
    const TransferPtr& transfer = transfers[g];
    const uint64_t bytes = group.layout.bytes;
    const c10::Device device = to_c10(group.device);
    at::Tensor memory;
    if (bytes > 0) {
      const uint64_t rest = bytes - chunked_bytes(bytes);
      begin = wire::align_payload(begin);
      auto [all, point] = transfer->finish(payload.subspan(begin, rest));
      begin += rest;
      memory = std::move(all);
      message.completed_at.emplace_back(device, std::move(point));
    }
    for (size_t k = 0; k < group.tensors.size(); ++k) {
      const wire::TensorDesc& desc = descs[group.tensors[k]];
      const at::ScalarType dtype = to_scalar_type(desc.dtype);
      at::Tensor& tensor = message.tensors[group.tensors[k]];
      if (desc.bytes() == 0) {
        tensor = at::empty(desc.sizes, at::TensorOptions(dtype).device(device));
        continue;
      }
      tensor = memory
                   .narrow(0, static_cast<int64_t>(group.layout.offsets[k]),
                           static_cast<int64_t>(desc.bytes()))
                   .view(dtype)
                   .as_strided(desc.sizes, strides_of(desc));
    }
  }
}

}  // namespace

bool has_device_tensors(const OutMessage& message) {
  return std::ranges::any_of(message.tensors, is_accelerator, &at::Tensor::device);
}

std::vector<wire::TensorDesc> describe(const OutMessage& message) {
  std::vector<wire::TensorDesc> descs;
  descs.reserve(message.tensors.size());
  for (size_t i = 0; i < message.tensors.size(); ++i) descs.push_back(desc_of(message, i));
  return descs;
}

void InMessage::await_device_tensors() {
  if (completed_at.empty()) return;
  for (const auto& [device, point] : completed_at) point.make_current_wait(device);
  for (const at::Tensor& tensor : tensors) {
    if (is_accelerator(tensor.device())) use_on_stream(tensor, current_stream(tensor.device()));
  }
  completed_at.clear();
}

net::OutFrame to_frame(OutMessage message, wire::FrameHeader header,
                       const std::vector<uint64_t>& transfers,
                       const std::vector<base::BufferPtr>& rests) {
  net::OutFrame frame;
  header.tensor_count = static_cast<uint32_t>(message.tensors.size());
  if (header.kind == wire::FrameKind::kReply && !message.rrefs.empty()) {
    header.channel = wire::kWithRRefs;
  }
  frame.header = header;
  frame.meta.reserve(message.tensors.size() * 32 + message.body.size());
  wire::Writer meta(frame.meta);
  uint64_t offset = 0;
  const auto append = [&](const uint8_t* data, size_t bytes) {
    const uint64_t begin = wire::align_payload(offset);
    if (begin > offset) frame.payload.emplace_back(kZeros, begin - offset);
    if (bytes > 0) frame.payload.emplace_back(data, bytes);
    offset = begin + bytes;
  };
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    const at::Tensor tensor = message.tensors[i];
    encode(desc_of(message, i), meta);
    if (message.devices[i].is_cpu()) {
      append(static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.nbytes());
    } else {
      message.tensors[i] = at::Tensor();  // copied already; the loop must not free it
    }
  }
  for (const base::BufferPtr& rest : rests) {
    if (rest) append(rest->data, rest->size);
  }
  if (header.autograd_id != 0) {
    for (size_t i = 0; i < message.tensors.size(); i += 8) {
      uint8_t bits = 0;
      for (size_t k = i; k < std::min(i + 8, message.tensors.size()); ++k) {
        if (message.requires_grad[k]) bits = static_cast<uint8_t>(bits | (1u << (k - i)));
      }
      meta.put(bits);
    }
  }
  for (const uint64_t transfer : transfers) meta.put(transfer);
  meta.put(static_cast<uint32_t>(message.rrefs.size()));
  for (const RRefTicket& ticket : message.rrefs) {
    meta.put(ticket.id);
    meta.put(ticket.owner);
    meta.put(ticket.mode);
    meta.put(ticket.fork);
    meta.put(ticket.parent);
  }
  frame.meta.insert(frame.meta.end(), message.body.begin(), message.body.end());
  if (!message.tensors.empty()) {
    frame.keep_alive =
        std::make_shared<std::pair<std::vector<at::Tensor>, std::vector<base::BufferPtr>>>(
            std::move(message.tensors), rests);
  }
  return frame;
}

wire::Reader body_of(const net::InFrame& frame) {
  wire::Reader meta(frame.meta);
  const uint32_t count = frame.header.tensor_count;
  for (uint32_t i = 0; i < count; ++i) {
    if (!wire::decode_tensor_desc(meta).device.is_cpu()) wire::Reader::fail("a device's tensor");
  }
  for (uint32_t i = 0; frame.header.autograd_id != 0 && i < count; i += 8) meta.get<uint8_t>();
  read_tickets(meta);
  return meta;
}

InMessage from_frame(net::InFrame frame, int from, DeviceStager& stager,
                     DeviceReceive* device_receive, RRefContext* receiver) {
  InMessage message;
  message.header = frame.header;
  message.from = from;
  message.is_shared = frame.is_shared;
  const uint32_t count = frame.header.tensor_count;
  wire::Reader meta(frame.meta);
  // Checks the count before memory is allocated for it: each descriptor has a minimum size.
  if (count > frame.meta.size() / wire::kMinTensorDescBytes) {
    wire::Reader::fail("more tensors than the message has room for");
  }
  std::vector<wire::TensorDesc> descs;
  descs.reserve(count);
  wire::PayloadLayout layout;
  for (uint32_t i = 0; i < count; ++i) {
    descs.push_back(wire::decode_tensor_desc(meta));
    if (descs.back().device.is_cpu()) layout.append(descs.back().bytes());
  }
  const uint64_t host_bytes = layout.bytes;
  const std::vector<DeviceGroup> groups = group_by_device(descs);
  for (const DeviceGroup& group : groups) {
    const uint64_t bytes = group.layout.bytes;
    if (bytes > 0) layout.append(bytes - chunked_bytes(bytes));
  }
  if (frame.header.autograd_id != 0) {
    for (uint32_t i = 0; i < count; i += 8) {
      const auto bits = meta.get<uint8_t>();
      for (uint32_t k = i; k < std::min(i + 8, count); ++k) {
        message.requires_grad.push_back(((bits >> (k - i)) & 1) != 0);
      }
    }
  }
  const std::vector<TransferPtr> taken = take_transfers(groups, meta, stager, device_receive);
  message.tickets = read_tickets(meta);
  // Receives the RRefs first, so that this happens even if a device has no memory for tensors.
  if (receiver) receiver->receive(message);
  if (layout.bytes != frame.payload.size()) {
    wire::Reader::fail(
        fmt::format("a payload of {} bytes for tensors of {}", frame.payload.size(), layout.bytes));
  }
  message.tensors.resize(count);
  // Copies small tensors, so that a kept tensor keeps no large buffer alive. A tensor of at most
  // 1/16 of the message is small if it has at most 4 KiB (copying is no slower than creating a
  // tensor), or if it has at most 64 KiB and all copies together are at most 1/16 of the message.
  const uint64_t message_bytes = frame.header.body_bytes(), small_part = message_bytes / 16;
  uint64_t copied = 0;
  const auto is_copied = [&](uint64_t bytes) {
    if (message_bytes <= 4096 || bytes > small_part) return false;
    return bytes <= 4096 || (bytes <= 65536 && copied + bytes <= small_part);
  };
  for (uint32_t i = 0, next = 0; i < count; ++i) {
    if (!descs[i].device.is_cpu()) continue;
    auto* data = const_cast<uint8_t*>(frame.payload.data()) + layout.offsets[next++];
    const auto options = at::TensorOptions(to_scalar_type(descs[i].dtype));
    const uint64_t bytes = descs[i].bytes();
    if (is_copied(bytes)) {
      copied += bytes;
      message.tensors[i] = at::empty_strided(descs[i].sizes, strides_of(descs[i]), options);
      if (bytes > 0) std::memcpy(message.tensors[i].mutable_data_ptr(), data, bytes);
      continue;
    }
    const auto keep = [body = frame.body](void*) {};
    message.tensors[i] =
        descs[i].layout == wire::Layout::kRowMajor
            ? at::from_blob(data, descs[i].sizes, keep, options)
            : at::from_blob(data, descs[i].sizes, strides_of(descs[i]), keep, options);
  }
  receive_groups(message, descs, groups, taken, frame.payload, host_bytes);
  message.body = frame.meta.last(meta.left());
  message.storage = std::move(frame.body);
  for (const TransferPtr& transfer : taken) message.credit_of_transfers += transfer->take_credit();
  return message;
}

InMessage to_self(OutMessage out, wire::FrameHeader header, int rank) {
  InMessage message;
  message.header = header;
  message.from = rank;
  at::NoGradGuard no_grad;
  message.tensors.reserve(out.tensors.size());
  for (const at::Tensor& tensor : out.tensors) {
    message.tensors.push_back(tensor.detach().clone());
    const c10::Device device = tensor.device();
    if (is_accelerator(device))
      message.completed_at.emplace_back(device, StreamPoint::mark(device));
  }
  if (header.autograd_id != 0) message.requires_grad = std::move(out.requires_grad);
  message.tickets = std::move(out.rrefs);
  auto storage = std::make_shared<wire::Bytes>(std::move(out.body));
  message.body = *storage;
  message.storage = std::move(storage);
  return message;
}

}  // namespace distrain::rpc
