#include "device_stager.h"

#include <algorithm>
#include <cstring>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "device_table.h"
#include "distrain/rpc/error.h"

namespace distrain::rpc {

namespace {

constexpr size_t kMaxIdleBlocks = 256;  // kept for reuse
constexpr size_t kCopiesAhead = 8;      // chunks being copied out before the one that is sent
constexpr size_t kMaxOpenTransfers = 1024;

}  // namespace

/// Pinned memory is dear to get and to give back.
struct DeviceStager::Shelf {
  std::mutex mutex;
  std::vector<at::Tensor> idle;  // uint8 [kChunkBytes] each

  static base::BufferPtr lend(const std::shared_ptr<Shelf>& shelf, at::Tensor block, size_t size) {
    auto* buffer = new base::Buffer{block.mutable_data_ptr<uint8_t>(), size};
    return base::BufferPtr(buffer, [shelf, block = std::move(block)](base::Buffer* b) {
      delete b;
      std::lock_guard lock(shelf->mutex);
      if (shelf->idle.size() < kMaxIdleBlocks) shelf->idle.push_back(block);
    });
  }
};

std::shared_ptr<DeviceStager::Shelf> DeviceStager::make_shelf() {
  return std::make_shared<Shelf>();
}

DeviceStager::~DeviceStager() {
  for (const auto& [point, memory] : released_) point.wait_on_host();
}

DeviceStager::Streams DeviceStager::streams_of(c10::Device device) {
  std::lock_guard lock(mutex_);
  const auto [it, is_new] = streams_.try_emplace({device.type(), device.index()},
                                                 Streams{side_stream(device), side_stream(device)});
  return it->second;
}

base::BufferPtr DeviceStager::idle_host_block(size_t size) {
  std::unique_lock lock(shelf_->mutex);
  if (size > kChunkBytes || shelf_->idle.empty()) return nullptr;
  at::Tensor block = std::move(shelf_->idle.back());
  shelf_->idle.pop_back();
  lock.unlock();
  return Shelf::lend(shelf_, std::move(block), size);
}

base::BufferPtr DeviceStager::host_block(c10::DeviceType type, size_t size) {
  sweep();
  if (auto block = idle_host_block(size)) return block;
  return Shelf::lend(shelf_, pinned_bytes(type, static_cast<int64_t>(kChunkBytes)), size);
}

void DeviceStager::release_at(StreamPoint point, base::BufferPtr memory) {
  std::lock_guard lock(mutex_);
  released_.emplace_back(std::move(point), std::move(memory));
}

void DeviceStager::sweep() {
  std::vector<base::BufferPtr> done;  // let go outside the lock
  std::lock_guard lock(mutex_);
  const auto end = std::remove_if(released_.begin(), released_.end(), [&](auto& entry) {
    if (!entry.first.reached()) return false;
    done.push_back(std::move(entry.second));
    return true;
  });
  released_.erase(end, released_.end());
}

std::vector<DeviceGroup> group_by_device(const std::vector<wire::TensorDesc>& tensors) {
  std::vector<DeviceGroup> groups;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const wire::DeviceRef device = tensors[i].device;
    if (device.is_cpu()) continue;
    auto it = std::find_if(groups.begin(), groups.end(),
                           [&](const DeviceGroup& group) { return group.device == device; });
    if (it == groups.end()) it = groups.insert(groups.end(), DeviceGroup{device, {}, {}});
    it->tensors.push_back(i);
    it->layout.append(tensors[i].bytes());
  }
  return groups;
}

// ---- in ----

base::Task DeviceStager::add_chunk_on_loop(int from, net::InFrame frame) {
  const wire::FrameHeader& header = frame.header;
  const wire::DeviceRef device{static_cast<wire::DeviceType>(header.channel & 0xff),
                               static_cast<uint8_t>(header.channel >> 8)};
  if (device.is_cpu() || device.type > wire::DeviceType::kPrivate) {
    wire::Reader::fail("a chunk for no device");
  }
  if (header.autograd_id > wire::Limits{}.max_payload_bytes) {
    wire::Reader::fail("a transfer beyond the limits");
  }
  std::shared_ptr<Arrival> arrival;
  {
    std::lock_guard lock(arrivals_mutex_);
    if (header.payload_bytes == 0) {  // its sender has given up on it
      const auto given_up = arrivals_.extract({from, header.call_id});
      if (!given_up.empty()) arrival = given_up.mapped();
      return {};
    }
    const auto [it, is_new] = arrivals_.try_emplace({from, header.call_id});
    if (is_new) {
      if (arrivals_.size() > kMaxOpenTransfers) wire::Reader::fail("too many open transfers");
      it->second = std::make_shared<Arrival>(*this, device, header.autograd_id);
    }
    arrival = it->second;
  }
  if (!(arrival->device() == device) || arrival->bytes() != header.autograd_id ||
      arrival->received() != header.context_id || header.payload_bytes != kChunkBytes ||
      arrival->received() + kChunkBytes > chunked_bytes(arrival->bytes())) {
    wire::Reader::fail("a chunk that does not fit its transfer");
  }
  if (!arrival->add_on_loop(std::move(frame))) return {};
  return [arrival] { arrival->copy_queued(); };
}

std::shared_ptr<Arrival> DeviceStager::take_arrival(int from, uint64_t id, wire::DeviceRef device,
                                                    uint64_t bytes) {
  if (chunked_bytes(bytes) == 0) return std::make_shared<Arrival>(*this, device, bytes);
  std::lock_guard lock(arrivals_mutex_);
  const auto it = arrivals_.find({from, id});
  if (it == arrivals_.end()) wire::Reader::fail("a transfer that has not come");
  const std::shared_ptr<Arrival> arrival = std::move(it->second);
  arrivals_.erase(it);
  if (!(arrival->device() == device) || arrival->bytes() != bytes ||
      arrival->received() != chunked_bytes(bytes)) {
    wire::Reader::fail("a transfer that is not the message's");
  }
  return arrival;
}

void DeviceStager::forget(int from) {
  std::vector<std::shared_ptr<Arrival>> gone;  // let go outside the lock
  std::lock_guard lock(arrivals_mutex_);
  for (auto it = arrivals_.lower_bound({from, 0});
       it != arrivals_.end() && it->first.first == from;) {
    const Arrival& arrival = *it->second;
    if (arrival.received() == chunked_bytes(arrival.bytes())) {
      ++it;
      continue;
    }
    gone.push_back(std::move(it->second));
    it = arrivals_.erase(it);
  }
}

bool Arrival::add_on_loop(net::InFrame frame) {
  received_ += frame.payload.size();
  std::lock_guard lock(queue_mutex_);
  queue_.push_back(std::move(frame));
  return !std::exchange(copying_, true);
}

void Arrival::copy_queued() {
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
    } catch (...) {
      error_ = error_in_flight(base::ErrorKind::kResources);
    }
  }
}

void Arrival::copy_locked(std::span<const uint8_t> from, base::BufferPtr keep) {
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

std::pair<at::Tensor, StreamPoint> Arrival::finish(std::span<const uint8_t> rest) {
  copy_queued();
  std::lock_guard copying(copy_mutex_);
  if (error_) throw base::Exception(*error_);
  // Out of the message's buffer, which is not the device's to read and goes with the message.
  base::BufferPtr block = stager_.host_block(to_c10(device_).type(), rest.size());
  std::memcpy(block->data, rest.data(), rest.size());
  copy_locked({block->data, block->size}, block);
  return {memory_, StreamPoint::mark(stager_.in_stream(memory_.device()))};
}

// ---- out ----

Departure::Departure(DeviceStager& stager, OutMessage message, wire::FrameHeader header,
                     const std::function<uint64_t()>& new_transfer)
    : stager_(stager), message_(std::move(message)), header_(header) {
  // Plain aliases, which autograd does not see.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::vector<Piece> rests;
  for (DeviceGroup& group : group_by_device(describe(message_))) {
    Transfer transfer{std::move(group), 0, {}};
    for (const size_t i : transfer.group.tensors) {
      const at::Tensor& tensor = message_.tensors[i];
      transfer.bytes.push_back(tensor.numel() == 0
                                   ? at::Tensor()
                                   : tensor.as_strided({tensor.numel()}, {1}).view(at::kByte));
    }
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
  for (const Transfer& transfer : transfers_) {
    const c10::Device device = message_.tensors[transfer.group.tensors[0]].device();
    StreamPoint::mark(device).make_wait(stager_.out_stream(device));
  }
  try {
    begin_copies(kCopiesAhead);
  } catch (...) {
    await_copies();
    throw;
  }
}

// The tensors, and the blocks that are written to, are needed until then.
Departure::~Departure() { await_copies(); }

void Departure::await_copies() const {
  for (const Piece& piece : pieces_) piece.copied.wait_on_host();
}

void Departure::begin_copies(size_t until) {
  for (; begun_ < std::min(until, pieces_.size()); ++begun_) begin_copy(pieces_[begun_]);
}

void Departure::begin_copy(Piece& piece) {
  const at::NoGradGuard no_grad;
  const Transfer& transfer = transfers_[piece.transfer];
  const auto size = piece.end - piece.begin;
  const c10::Device device = message_.tensors[transfer.group.tensors[0]].device();
  piece.block = stager_.host_block(device.type(), size);
  const c10::Stream stream = stager_.out_stream(device);
  const c10::StreamGuard guard(stream);
  uint64_t filled = piece.begin;
  const auto fill_gap = [&](uint64_t until) {  // of what lay in the block before
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

net::OutFrame Departure::chunk_of(const Transfer& transfer) const {
  net::OutFrame frame;
  frame.header.kind = wire::FrameKind::kChunk;
  const wire::DeviceRef device = transfer.group.device;
  frame.header.channel =
      static_cast<uint16_t>(static_cast<uint16_t>(device.type) | device.index << 8);
  frame.header.call_id = transfer.id;
  frame.header.autograd_id = transfer.group.layout.bytes;
  return frame;
}

base::Status Departure::send(const std::function<base::Status(net::OutFrame)>& send) {
  try {
    return send_chunks(send);
  } catch (...) {
    // An empty chunk: the message will not come.
    for (const Transfer& transfer : transfers_) {
      if (transfer.id != 0) static_cast<void>(send(chunk_of(transfer)));
    }
    throw;
  }
}

base::Status Departure::send_chunks(const std::function<base::Status(net::OutFrame)>& send) {
  for (size_t i = 0; i < chunks_; ++i) {
    begin_copies(i + kCopiesAhead);
    Piece& piece = pieces_[i];
    piece.copied.wait_on_host();
    net::OutFrame frame = chunk_of(transfers_[piece.transfer]);
    frame.header.context_id = piece.begin;
    frame.payload.emplace_back(piece.block->data, piece.block->size);
    frame.keep_alive = std::move(piece.block);
    if (base::Status sent = send(std::move(frame)); !sent.ok()) return sent;
  }
  begin_copies(pieces_.size());
  std::vector<uint64_t> ids;
  for (const Transfer& transfer : transfers_) ids.push_back(transfer.id);
  std::vector<base::BufferPtr> rests(transfers_.size());
  for (size_t i = chunks_; i < pieces_.size(); ++i) {
    pieces_[i].copied.wait_on_host();
    rests[pieces_[i].transfer] = std::move(pieces_[i].block);
  }
  return send(to_frame(std::move(message_), header_, ids, rests));
}

}  // namespace distrain::rpc
