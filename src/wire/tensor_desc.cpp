#include "distrain/wire/tensor_desc.h"

#include <iterator>

namespace distrain::wire {

size_t element_bytes(DType dtype) {
  // Indexed by DType, from kUInt8 = 1 to kComplex32 = 21.
  constexpr uint8_t kBytes[] = {0, 1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 8, 16, 2, 4, 8, 1, 1, 1, 1, 1, 4};
  const auto number = static_cast<size_t>(dtype);
  return number < std::size(kBytes) ? kBytes[number] : 0;
}

uint64_t TensorDesc::bytes() const {
  uint64_t bytes = element_bytes(dtype);
  for (const int64_t size : sizes) bytes *= static_cast<uint64_t>(size);
  return bytes;
}

void encode(DeviceRef device, Writer& out) {
  out.put(device.type);
  out.put(device.index);
}

DeviceRef decode_device(Reader& in) {
  DeviceRef device;
  device.type = in.get<DeviceType>();
  device.index = in.get<uint8_t>();
  if (device.type > DeviceType::kPrivate) Reader::fail("an unknown type of device");
  if (device.is_cpu() && device.index != 0) Reader::fail("a CPU with a number");
  return device;
}

void encode(const TensorDesc& desc, Writer& out) {
  out.put(desc.dtype);
  out.put(static_cast<uint8_t>(desc.sizes.size()));
  out.put(desc.layout);
  encode(desc.device, out);
  for (const int64_t size : desc.sizes) out.put(size);
}

size_t decode_dimensions(Reader& in) {
  const size_t dimensions = in.get<uint8_t>();
  if (dimensions > kMaxDimensions) Reader::fail("a tensor of too many dimensions");
  return dimensions;
}

std::vector<int64_t> decode_sizes(Reader& in, size_t dimensions, uint64_t bytes) {
  std::vector<int64_t> sizes(dimensions);
  for (int64_t& size : sizes) {
    size = in.get<int64_t>();
    if (size < 0) Reader::fail("a negative tensor size");
    if (size != 0 && (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) ||
                      bytes > static_cast<uint64_t>(INT64_MAX))) {
      Reader::fail("a tensor size that overflows");
    }
  }
  return sizes;
}

TensorDesc decode_tensor_desc(Reader& in) {
  TensorDesc desc;
  desc.dtype = static_cast<DType>(in.get<uint8_t>());
  const uint64_t bytes = element_bytes(desc.dtype);
  if (bytes == 0) Reader::fail("an unknown tensor dtype");
  const size_t dimensions = decode_dimensions(in);
  desc.layout = in.get<Layout>();
  const bool fits = desc.layout == Layout::kRowMajor ||
                    (desc.layout == Layout::kChannelsLast && dimensions == 4) ||
                    (desc.layout == Layout::kChannelsLast3d && dimensions == 5);
  if (!fits) Reader::fail("an unknown layout, or one of other dimensions");
  desc.device = decode_device(in);
  desc.sizes = decode_sizes(in, dimensions, bytes);
  return desc;
}

void PayloadLayout::append(uint64_t more) {
  const uint64_t offset = align_payload(bytes);
  offsets.push_back(offset);
  if (offset < bytes || __builtin_add_overflow(offset, more, &bytes)) {
    Reader::fail("a payload size that overflows");
  }
}

}  // namespace distrain::wire
