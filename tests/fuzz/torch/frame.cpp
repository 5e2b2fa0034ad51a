#include "frame.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "../src/rpc/device/device_transfer.h"
#include "support/payload.h"

namespace distrain::fuzz {

namespace {

constexpr uint64_t kMostPayload = uint64_t{1} << 20;

bool is_on_cpu(const std::vector<wire::TensorDesc>& descs) {
  return std::all_of(descs.begin(), descs.end(),
                     [](const wire::TensorDesc& desc) { return desc.device.is_cpu(); });
}

// Returns the tensor descriptors in `meta` and their payload size, or nullopt if they are invalid.
std::optional<std::pair<std::vector<wire::TensorDesc>, uint64_t>> read_descs(Input meta,
                                                                             uint32_t count) {
  try {
    wire::Reader reader(meta);
    std::vector<wire::TensorDesc> descs;
    for (uint32_t i = 0; i < count; ++i) descs.push_back(wire::decode_tensor_desc(reader));
    const uint64_t bytes = testing::layout_payload(descs).bytes;
    return std::pair(std::move(descs), bytes);
  } catch (const base::Exception&) {
    return std::nullopt;
  }
}

// Checks that every element of `tensor` is in `payload` or in the tensor's own memory.
void check_inside(const at::Tensor& tensor, Input payload) {
  check(tensor.defined() && tensor.device().is_cpu(), "a message's tensors are there");
  if (tensor.numel() == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  uint64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    check(tensor.stride(dim) >= 0, "strides are not negative");
    last += static_cast<uint64_t>(tensor.size(dim) - 1) * static_cast<uint64_t>(tensor.stride(dim));
  }
  const uintptr_t end = begin + (last + 1) * tensor.element_size();
  const auto lies_in = [&](const void* memory, size_t bytes) {
    const auto first = reinterpret_cast<uintptr_t>(memory);
    return begin >= first && end >= begin && end <= first + bytes;
  };
  check(lies_in(payload.data(), payload.size()) ||
            lies_in(tensor.storage().data(), tensor.storage().nbytes()),
        "a tensor lies in what was received, or in memory of its own");
  // Reads the first and the last byte so that address sanitizer detects invalid memory.
  static_cast<void>(*reinterpret_cast<const volatile uint8_t*>(begin));
  static_cast<void>(*reinterpret_cast<const volatile uint8_t*>(end - 1));
  check(begin % wire::kPayloadAlignment == 0, "tensors are aligned");
}

}  // namespace

std::optional<rpc::InMessage> read_frame(Input input) {
  if (input.size() < wire::kHeaderBytes) return std::nullopt;
  std::array<uint8_t, wire::kHeaderBytes> head;
  std::copy_n(input.begin(), head.size(), head.begin());
  const uint32_t magic = wire::magic_of(head);
  std::memcpy(head.data(), &magic, sizeof magic);
  const auto decoded = wire::decode_header(head, wire::Limits{});
  if (!decoded.ok()) return std::nullopt;
  wire::FrameHeader header = decoded.value();

  const Input rest = input.subspan(head.size());
  header.meta_bytes = static_cast<uint32_t>(std::min<size_t>(header.meta_bytes, rest.size()));
  const Input meta = rest.first(header.meta_bytes);
  const auto descs = read_descs(meta, header.tensor_count);
  header.payload_bytes = std::min<uint64_t>(header.payload_bytes, kMostPayload);
  // Sets the payload size to what the descriptors need. One input in eight keeps its own size.
  if (descs && is_on_cpu(descs->first) && descs->second <= kMostPayload &&
      header.call_id % 8 != 0) {
    header.payload_bytes = descs->second;
  }
  base::BufferPool pool(0);
  net::InFrame frame;
  frame.header = header;
  frame.body = pool.allocate(std::max<uint64_t>(header.body_bytes(), 1));
  check(frame.body != nullptr, "there is memory");
  std::memset(frame.body->data, 0, frame.body->size);
  std::copy(meta.begin(), meta.end(), frame.body->data);
  const Input body(frame.body->data, header.body_bytes());
  frame.meta = body.first(header.meta_bytes);
  frame.payload = body.subspan(header.payload_offset());
  const size_t behind = std::min<size_t>(header.payload_offset(), rest.size());
  const Input payload =
      rest.subspan(behind, std::min<size_t>(rest.size() - behind, header.payload_bytes));
  std::copy(payload.begin(), payload.end(), frame.body->data + header.payload_offset());

  const Input memory = frame.payload;
  rpc::DeviceStager stager;
  try {
    rpc::InMessage message = rpc::from_frame(std::move(frame), 1, stager, nullptr);
    check(message.tensors.size() == header.tensor_count, "a message has the tensors it says");
    for (const at::Tensor& tensor : message.tensors) check_inside(tensor, memory);
    check(message.requires_grad.size() == (header.autograd_id == 0 ? 0 : header.tensor_count),
          "each tensor is said to require a gradient or not");
    return message;
  } catch (const base::Exception& e) {
    check(e.kind() == base::ErrorKind::kProtocol, "what does not fit is refused as 'protocol'");
  } catch (const std::exception&) {
    // Torch throws if this machine does not have the device of a tensor descriptor.
    check(descs && !is_on_cpu(descs->first), "nothing but our own errors, but for devices");
  }
  return std::nullopt;
}

Bytes frame_bytes(rpc::OutMessage message, wire::FrameHeader header) {
  const net::OutFrame frame = rpc::to_frame(std::move(message), header);
  header = frame.header;
  header.meta_bytes = static_cast<uint32_t>(frame.meta.size());
  header.payload_bytes = 0;
  for (const auto& piece : frame.payload) header.payload_bytes += piece.size();
  Bytes bytes(wire::kHeaderBytes);
  encode_header(header, std::span<uint8_t, wire::kHeaderBytes>(bytes.data(), wire::kHeaderBytes));
  bytes.insert(bytes.end(), frame.meta.begin(), frame.meta.end());
  bytes.resize(wire::kHeaderBytes + header.payload_offset());
  for (const auto& piece : frame.payload) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

}  // namespace distrain::fuzz
