#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include "distrain/wire/codec.h"
#include "distrain/wire/limits.h"

namespace distrain::wire {

/// Element types, with numbers of our own: torch's may change from version to version.
enum class DType : uint8_t {
  kUInt8 = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kBFloat16 = 7,
  kFloat32 = 8,
  kFloat64 = 9,
  kBool = 10,
  kComplex64 = 11,
  kComplex128 = 12,
  kUInt16 = 13,
  kUInt32 = 14,
  kUInt64 = 15,
  kFloat8E5M2 = 16,
  kFloat8E4M3 = 17,
  kFloat8E5M2Fnuz = 18,
  kFloat8E4M3Fnuz = 19,
  kFloat8E8M0 = 20,
  kComplex32 = 21,
};

/// Bytes an element; 0 for a number that is no DType.
size_t element_bytes(DType dtype);

/// The order in which a tensor's elements travel and lie in the receiver's memory.
enum class Layout : uint8_t {
  kRowMajor = 0,
  kChannelsLast = 1,    ///< torch's, of four dimensions: N, H, W, C
  kChannelsLast3d = 2,  ///< of five: N, D, H, W, C
};

enum class DeviceType : uint8_t { kCpu = 0, kCuda = 1, kPrivate = 2 };

/// A device of the receiver: u8 type · u8 index.
struct DeviceRef {
  DeviceType type = DeviceType::kCpu;
  uint8_t index = 0;

  bool is_cpu() const { return type == DeviceType::kCpu; }
  friend auto operator<=>(const DeviceRef&, const DeviceRef&) = default;
};

void encode(DeviceRef device, Writer& out);
/// Throws `protocol` for an unknown type, and for a CPU with an index.
DeviceRef decode_device(Reader& in);

/// A dense tensor without gaps, as it travels.
///
///   u8 dtype · u8 dimensions · u8 layout · DeviceRef · dimensions × i64 size
///
/// The elements of those that go to the CPU lie in the frame's payload in the order of their
/// layout, the first at the payload's start, each further one at the next multiple of 64. For those
/// that go to another device see Note [Tensors of devices] in rpc/message.h.
struct TensorDesc {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> sizes;
  Layout layout = Layout::kRowMajor;
  DeviceRef device;

  uint64_t bytes() const;  ///< of its elements
};

/// The fewest bytes that a descriptor takes.
inline constexpr size_t kMinTensorDescBytes = 5;

void encode(const TensorDesc& desc, Writer& out);

/// Reads how many dimensions a tensor has, as a u8. Throws `protocol` for too many.
size_t decode_dimensions(Reader& in);
/// Reads so many sizes. Throws `protocol` if one is negative, or if `bytes` times the sizes other
/// than 0 does not fit, because torch computes strides from that product.
std::vector<int64_t> decode_sizes(Reader& in, size_t dimensions, uint64_t bytes);

/// Throws `protocol` for an unknown dtype, layout or device, too many dimensions, a layout of other
/// dimensions, a negative size or a product of sizes that does not fit.
TensorDesc decode_tensor_desc(Reader& in);

/// Byte offsets of tensors one after the other, each at a multiple of 64, and their length.
struct PayloadLayout {
  std::vector<uint64_t> offsets;
  uint64_t bytes = 0;

  /// Puts `more` bytes behind. Throws `protocol` on overflow.
  void append(uint64_t more);
};

}  // namespace distrain::wire
