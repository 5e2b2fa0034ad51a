#include "device/device_send.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/grad_mode.h>

namespace distrain::rpc {

DeviceSend::DeviceSend(DeviceStager& stager, OutMessage message, wire::FrameHeader header,
                       const std::function<uint64_t()>& new_transfer)
    : stager_(stager),
      message_(std::move(message)),
      header_(header),
      sending_(stager.new_blocks_sent()) {
  // Aliases that autograd does not record.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::vector<Piece> rests;
  for (DeviceGroup& group : group_by_device(describe(message_))) {
    Transfer transfer = make_transfer(std::move(group));
    const uint64_t bytes = transfer.group.layout.bytes;
    const uint64_t chunked = chunked_bytes(bytes);
    if (chunked > 0) transfer.id = new_transfer();
    for (uint64_t at = 0; at < chunked; at += kChunkBytes) {
      pieces_.push_back({transfers_.size(), at, at + kChunkBytes, nullptr, {}});
    }
    if (bytes > chunked) rests.push_back({transfers_.size(), chunked, bytes, nullptr, {}});
    transfers_.push_back(std::move(transfer));
  }
  chunks_ = pieces_.size();
  std::move(rests.begin(), rests.end(), std::back_inserter(pieces_));
  const net::OutFrame frame = to_frame(message_, header_, transfer_ids());
  wire::PayloadLayout payload;
  for (const auto& piece : frame.payload) payload.bytes += piece.size();
  for (size_t i = chunks_; i < pieces_.size(); ++i) {
    payload.append(pieces_[i].end - pieces_[i].begin);
  }
  bytes_left_ = chunks_ * kChunkBytes + frame.meta.size() + payload.bytes;
  for (const Transfer& transfer : transfers_) {
    StreamPoint::mark(transfer.device).make_wait(stager_.out_stream(transfer.device));
  }
  begin_copies(kCopiesAhead);
}

std::vector<uint64_t> DeviceSend::transfer_ids() const {
  std::vector<uint64_t> ids;
  for (const Transfer& transfer : transfers_) ids.push_back(transfer.id);
  return ids;
}

DeviceSend::Transfer DeviceSend::make_transfer(DeviceGroup group) const {
  const uint64_t bytes = group.layout.bytes;
  if (bytes > wire::Limits{}.max_payload_bytes) {
    base::invalid("tensors of " + std::to_string(bytes) +
                  " bytes for one device in one message (at most " +
                  std::to_string(wire::Limits{}.max_payload_bytes) + ")");
  }
  const c10::Device device = message_.tensors[group.tensors[0]].device();
  Transfer transfer{std::move(group), 0, device, {}};
  for (const size_t i : transfer.group.tensors) {
    const at::Tensor& tensor = message_.tensors[i];
    if (tensor.device() != device) {  // only `device` is waited for
      throw base::Exception(base::ErrorKind::kInternal, "tensors of " + device.str() + " and of " +
                                                            tensor.device().str() +
                                                            " are to go to the same device");
    }
    transfer.bytes.push_back(tensor.numel() == 0
                                 ? at::Tensor()
                                 : tensor.as_strided({tensor.numel()}, {1}).view(at::kByte));
  }
  return transfer;
}

void DeviceSend::begin_copies(size_t until) {
  for (; begun_ < std::min(until, pieces_.size()); ++begun_) begin_copy(pieces_[begun_]);
}

void DeviceSend::begin_copy(Piece& piece) {
  const at::NoGradGuard no_grad;
  const Transfer& transfer = transfers_[piece.transfer];
  const auto size = piece.end - piece.begin;
  piece.block = stager_.host_block(transfer.device, size);
  const c10::Stream stream = stager_.out_stream(transfer.device);
  const c10::StreamGuard guard(stream);
  uint64_t filled = piece.begin;
  const auto fill_gap = [&](uint64_t until) {  // zeroes what an earlier message left in the block
    if (until > filled) std::memset(piece.block->data + (filled - piece.begin), 0, until - filled);
  };
  for (size_t k = 0; k < transfer.bytes.size(); ++k) {
    const at::Tensor& bytes = transfer.bytes[k];
    if (!bytes.defined()) continue;
    const uint64_t first = transfer.group.layout.offsets[k];
    const uint64_t from = std::max(first, piece.begin);
    const uint64_t to = std::min(first + static_cast<uint64_t>(bytes.numel()), piece.end);
    if (from >= to) continue;
    fill_gap(from);
    const auto length = static_cast<int64_t>(to - from);
    const at::Tensor host = at::from_blob(piece.block->data + (from - piece.begin), {length},
                                          at::TensorOptions(at::kByte));
    host.copy_(bytes.narrow(0, static_cast<int64_t>(from - first), length), /*non_blocking=*/true);
    filled = to;
  }
  fill_gap(piece.end);
  piece.copied = StreamPoint::mark(stream);
}

net::OutFrame DeviceSend::chunk_of(const Transfer& transfer) const {
  net::OutFrame frame;
  frame.header.kind = wire::FrameKind::kChunk;
  const wire::DeviceRef device = transfer.group.device;
  frame.header.channel =
      static_cast<uint16_t>(static_cast<uint16_t>(device.type) | device.index << 8 |
                            (header_.kind == wire::FrameKind::kReply ? wire::kOfReply : 0));
  frame.header.call_id = transfer.id;
  frame.header.autograd_id = transfer.group.layout.bytes;
  return frame;
}

base::Status DeviceSend::send(const std::function<base::Status(net::OutFrame)>& send,
                              const StillWanted& still_wanted) {
  const auto give_up = [&] {  // an empty chunk tells the receiver that the message will not come
    for (const Transfer& transfer : transfers_) {
      if (transfer.id != 0) static_cast<void>(send(chunk_of(transfer)));
    }
  };
  try {
    base::Status sent = send_chunks(send, still_wanted);
    if (!sent.ok()) give_up();
    return sent;
  } catch (...) {
    give_up();
    throw;
  }
}

base::Status DeviceSend::send_chunks(const std::function<base::Status(net::OutFrame)>& send,
                                     const StillWanted& still_wanted) {
  for (size_t i = 0; i < chunks_; ++i) {
    sending_->await_fewer_than(kMaxSending);
    begin_copies(i + kCopiesAhead);
    Piece& piece = pieces_[i];
    piece.copied.wait_on_host();
    piece.copied = StreamPoint();
    net::OutFrame frame = chunk_of(transfers_[piece.transfer]);
    frame.header.context_id = piece.begin;
    frame.payload.emplace_back(piece.block->data, piece.block->size);
    frame.keep_alive = sending_->count(std::move(piece.block));
    if (base::Status sent = send(std::move(frame)); !sent.ok()) return sent;
    if (piece.begin == 0) {
      bytes_left_ -= chunked_bytes(transfers_[piece.transfer].group.layout.bytes);
    }
  }
  begin_copies(pieces_.size());
  std::vector<base::BufferPtr> rests(transfers_.size());
  for (size_t i = chunks_; i < pieces_.size(); ++i) {
    pieces_[i].copied.wait_on_host();
    pieces_[i].copied = StreamPoint();
    rests[pieces_[i].transfer] = std::move(pieces_[i].block);
  }
  if (still_wanted && !still_wanted(message_.body)) {
    return base::Error{base::ErrorKind::kCancelled, "nobody waits for it any more"};
  }
  base::Status sent = send(to_frame(std::move(message_), header_, transfer_ids(), rests));
  if (sent.ok()) bytes_left_ = 0;
  return sent;
}

}  // namespace distrain::rpc
