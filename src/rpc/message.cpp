#include "distrain/rpc/message.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/rpc/dtype.h"
#include "distrain/wire/tensor_desc.h"

namespace distrain::rpc {

namespace {

constexpr uint8_t kZeros[wire::kPayloadAlignment] = {};

}  // namespace

net::OutFrame to_frame(OutMessage message, wire::FrameHeader header) {
  net::OutFrame frame;
  header.tensor_count = static_cast<uint32_t>(message.tensors.size());
  frame.header = header;
  frame.meta.reserve(message.tensors.size() * 24 + message.body.size());
  wire::Writer meta(frame.meta);
  uint64_t offset = 0;
  for (const at::Tensor& tensor : message.tensors) {
    encode(wire::TensorDesc{to_dtype(tensor.scalar_type()), tensor.sizes().vec()}, meta);
    const uint64_t begin = wire::align_payload(offset);
    if (begin > offset) frame.payload.emplace_back(kZeros, begin - offset);
    if (tensor.nbytes() > 0) {
      frame.payload.emplace_back(static_cast<const uint8_t*>(tensor.const_data_ptr()),
                                 tensor.nbytes());
    }
    offset = begin + tensor.nbytes();
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
    frame.keep_alive = std::make_shared<std::vector<at::Tensor>>(std::move(message.tensors));
  }
  return frame;
}

InMessage from_frame(net::InFrame frame, int from) {
  InMessage message;
  message.header = frame.header;
  message.from = from;
  const uint32_t count = frame.header.tensor_count;
  wire::Reader meta(frame.meta);
  // A descriptor takes two bytes at least: a larger count is a lie, found before allocating.
  if (count > frame.meta.size() / 2)
    wire::Reader::fail("more tensors than the message has room for");
  std::vector<wire::TensorDesc> descs;
  descs.reserve(count);
  for (uint32_t i = 0; i < count; ++i) descs.push_back(wire::decode_tensor_desc(meta));
  const wire::PayloadLayout layout = wire::layout_payload(descs);
  if (layout.bytes != frame.payload.size()) {
    wire::Reader::fail("a payload of " + std::to_string(frame.payload.size()) +
                       " bytes for tensors of " + std::to_string(layout.bytes));
  }
  message.tensors.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    auto* data = const_cast<uint8_t*>(frame.payload.data()) + layout.offsets[i];
    message.tensors.push_back(at::from_blob(
        data, descs[i].sizes, [body = frame.body](void*) {},
        at::TensorOptions(to_scalar_type(descs[i].dtype))));
  }
  if (frame.header.autograd_id != 0) {
    for (uint32_t i = 0; i < count; i += 8) {
      const auto bits = meta.get<uint8_t>();
      for (uint32_t k = i; k < std::min(i + 8, count); ++k) {
        message.requires_grad.push_back(((bits >> (k - i)) & 1) != 0);
      }
    }
  }
  constexpr size_t kTicketBytes = 25;
  const uint32_t rrefs = meta.get_count(kTicketBytes);
  message.tickets.reserve(rrefs);
  for (uint32_t i = 0; i < rrefs; ++i) {
    RRefTicket ticket;
    ticket.id = meta.get<uint64_t>();
    ticket.owner = meta.get<int32_t>();
    ticket.mode = meta.get<uint8_t>();
    ticket.fork = meta.get<uint64_t>();
    ticket.parent = meta.get<int32_t>();
    message.tickets.push_back(ticket);
  }
  message.body = frame.meta.last(meta.left());
  message.storage = std::move(frame.body);
  return message;
}

InMessage to_self(OutMessage out, wire::FrameHeader header, int rank) {
  InMessage message;
  message.header = header;
  message.from = rank;
  at::NoGradGuard no_grad;
  message.tensors.reserve(out.tensors.size());
  for (const at::Tensor& tensor : out.tensors) message.tensors.push_back(tensor.detach().clone());
  if (header.autograd_id != 0) message.requires_grad = std::move(out.requires_grad);
  message.tickets = std::move(out.rrefs);
  auto storage = std::make_shared<wire::Bytes>(std::move(out.body));
  message.body = *storage;
  message.storage = std::move(storage);
  return message;
}

}  // namespace distrain::rpc
