#include "device/device_transfer.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "device/device_table.h"
#include "distrain/rpc/error.h"

namespace distrain::rpc {

// ---- DeviceStager ----

constexpr size_t kMaxIdleBlocks = 256;  // blocks kept for reuse
constexpr size_t kMaxRestocked = 64;    // blocks allocated for received chunks

/// Idle host blocks, kept because allocating and freeing pinned memory is expensive.
struct DeviceStager::Shelf {
  std::mutex mutex;
  std::vector<at::Tensor> idle;  // uint8 [kChunkBytes] each
  size_t missed = 0;             // frames that found no idle block
  size_t restocked = 0;          // blocks allocated by restock()

  static base::BufferPtr lend(const std::shared_ptr<Shelf>& shelf, at::Tensor block, size_t size) {
    auto* buffer = new base::Buffer{block.mutable_data_ptr<uint8_t>(), size};
    return base::BufferPtr(buffer, [shelf, block = std::move(block)](base::Buffer* b) {
      delete b;
      std::lock_guard lock(shelf->mutex);
      if (shelf->idle.size() < kMaxIdleBlocks) shelf->idle.push_back(block);
    });
  }
};

DeviceStager::DeviceStager() : shelf_(std::make_shared<Shelf>()) {}

base::BufferPtr DeviceStager::take_idle_block(size_t size) {
  std::unique_lock lock(shelf_->mutex);
  if (shelf_->idle.empty()) return nullptr;
  at::Tensor block = std::move(shelf_->idle.back());
  shelf_->idle.pop_back();
  lock.unlock();
  return Shelf::lend(shelf_, std::move(block), size);
}

base::BufferPtr DeviceStager::idle_host_block(size_t size) {
  if (size > kChunkBytes) return nullptr;
  base::BufferPtr block = take_idle_block(size);
  if (!block) {
    std::lock_guard lock(shelf_->mutex);
    ++shelf_->missed;
  }
  return block;
}

base::BufferPtr DeviceStager::host_block(c10::Device device, size_t size) {
  sweep();
  if (auto block = take_idle_block(size)) return block;
  try {
    return Shelf::lend(shelf_, pinned_bytes(device, static_cast<int64_t>(kChunkBytes)), size);
  } catch (const c10::Error& e) {
    throw base::Exception(base::ErrorKind::kResources, e.what_without_backtrace());
  }
}

void DeviceStager::restock(c10::Device device, size_t frames) {
  size_t number = 0;
  {
    std::lock_guard lock(shelf_->mutex);
    number = std::min({frames, shelf_->missed, kMaxRestocked - shelf_->restocked});
    shelf_->missed = shelf_->restocked + number == kMaxRestocked ? 0 : shelf_->missed - number;
    shelf_->restocked += number;
  }
  try {
    for (; number > 0; --number) {
      static_cast<void>(
          Shelf::lend(shelf_, pinned_bytes(device, static_cast<int64_t>(kChunkBytes)), 0));
    }
  } catch (const c10::Error&) {  // received chunks will use pageable memory
  }
}

std::vector<DeviceGroup> group_by_device(const std::vector<wire::TensorDesc>& tensors) {
  std::vector<DeviceGroup> groups;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const wire::DeviceRef device = tensors[i].device;
    if (device.is_cpu()) continue;
    auto it = std::ranges::find(groups, device, &DeviceGroup::device);
    if (it == groups.end()) it = groups.insert(groups.end(), DeviceGroup{device, {}, {}});
    it->tensors.push_back(i);
    it->layout.append(tensors[i].bytes());
  }
  return groups;
}

// ---- DeviceReceive ----

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
    if (header.payload_bytes == 0) {  // the sender has given up the transfer
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
        refusal = base::Error{
            base::ErrorKind::kOverloaded,
            fmt::format("rank {} has too many transfers open: {}", from_, open_.size())};
      }
      transfer = std::make_shared<IncomingTransfer>(stager_, device, bytes, std::move(refusal));
      transfer->hold_credit(credit_of_transfer(header), return_);
      open_.emplace(header.call_id, transfer);
    }
  }
  if (transfer->device() != device || transfer->bytes() != bytes ||
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
  if (transfer->device() != device || transfer->bytes() != bytes || !transfer->is_complete()) {
    wire::Reader::fail("a transfer that is not the message's");
  }
  return transfer;
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
      for (net::InFrame& frame : frames) copy_locked(frame.payload, std::move(frame.body));
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
  // Copies the bytes: their buffer is not pinned, and may be freed before the device reads it.
  base::BufferPtr block = stager_.host_block(to_c10(device_), rest.size());
  std::memcpy(block->data, rest.data(), rest.size());
  copy_locked({block->data, block->size}, block);
  return {memory_, StreamPoint::mark(stager_.in_stream(memory_.device()))};
}

// ---- DeviceSend ----

DeviceSend::DeviceSend(DeviceStager& stager, OutMessage message, wire::FrameHeader header,
                       const std::function<uint64_t()>& new_transfer)
    : stager_(stager),
      message_(std::move(message)),
      header_(header),
      sending_(stager.new_blocks_sent()) {
  // Turns autograd off, because it must not record the aliases made here.
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
  std::ranges::move(rests, std::back_inserter(pieces_));
  const net::OutFrame frame = to_frame(message_, header_, transfer_ids());
  wire::PayloadLayout payload{.bytes = frame.payload_bytes()};
  for (size_t i = chunks_; i < pieces_.size(); ++i)
    payload.append(pieces_[i].end - pieces_[i].begin);
  bytes_left_ = chunks_ * kChunkBytes + frame.meta.size() + payload.bytes;
  for (const Transfer& transfer : transfers_) {
    StreamPoint::mark(transfer.device).make_wait(stager_.out_stream(transfer.device));
  }
  begin_copies(kCopiesAhead);
}

DeviceSend::Transfer DeviceSend::make_transfer(DeviceGroup group) const {
  const uint64_t bytes = group.layout.bytes;
  if (bytes > wire::Limits{}.max_payload_bytes) {
    base::invalid(fmt::format("tensors of {} bytes for one device in one message (at most {})",
                              bytes, wire::Limits{}.max_payload_bytes));
  }
  const c10::Device device = message_.tensors[group.tensors[0]].device();
  Transfer transfer{std::move(group), 0, device, {}};
  for (const size_t i : transfer.group.tensors) {
    const at::Tensor& tensor = message_.tensors[i];
    if (tensor.device() != device) {  // copies wait only for work on `device`
      throw base::Exception(base::ErrorKind::kInternal,
                            fmt::format("tensors of {} and of {} are to go to the same device",
                                        device.str(), tensor.device().str()));
    }
    transfer.bytes.push_back(tensor.numel() == 0
                                 ? at::Tensor()
                                 : tensor.as_strided({tensor.numel()}, {1}).view(at::kByte));
  }
  return transfer;
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
  const wire::DeviceRef device = transfer.group.device;
  const int of_reply = header_.kind == wire::FrameKind::kReply ? wire::kOfReply : 0;
  const int channel = static_cast<int>(device.type) | device.index << 8 | of_reply;
  net::OutFrame frame;
  frame.header = {.kind = wire::FrameKind::kChunk,
                  .channel = static_cast<uint16_t>(channel),
                  .call_id = transfer.id,
                  .autograd_id = transfer.group.layout.bytes};
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
