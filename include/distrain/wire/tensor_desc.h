#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include "distrain/wire/codec.h"

namespace distrain::wire {

/// Element types. The numbers are not torch's, which may change from version to version.
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

/// Returns the bytes per element; 0 if `dtype` is unknown.
size_t element_bytes(DType dtype);

/// The order of a tensor's elements on the wire and in the receiver's memory.
enum class Layout : uint8_t {
  kRowMajor = 0,
  kChannelsLast = 1,    ///< as in torch, for four dimensions: N, H, W, C
  kChannelsLast3d = 2,  ///< as in torch, for five dimensions: N, D, H, W, C
};

enum class DeviceType : uint8_t { kCpu = 0, kCuda = 1, kPrivate = 2 };

/// A device of a rank; in a TensorDesc, of the receiver. On the wire: u8 type · u8 index.
struct DeviceRef {
  DeviceType type = DeviceType::kCpu;
  uint8_t index = 0;

  bool is_cpu() const { return type == DeviceType::kCpu; }
  friend auto operator<=>(const DeviceRef&, const DeviceRef&) = default;
};

void encode(DeviceRef device, Writer& out);
/// Reads a device. Throws `protocol` if the type is unknown or a CPU has an index.
DeviceRef decode_device(Reader& in);

/// Describes a dense tensor without gaps. On the wire:
///
///   u8 dtype · u8 dimensions · u8 layout · DeviceRef · dimensions × i64 size
///
/// The elements of tensors for the CPU lie in the frame's payload: the first tensor at its start,
/// each further tensor at the next multiple of 64. For tensors of other devices see Note [Tensors
/// of devices] in rpc/message.h.
struct TensorDesc {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> sizes;
  Layout layout = Layout::kRowMajor;
  DeviceRef device;

  uint64_t bytes() const;  ///< returns the size of all elements
};

/// The size of the smallest descriptor: that of a tensor without dimensions.
inline constexpr size_t kMinTensorDescBytes = 5;

void encode(const TensorDesc& desc, Writer& out);
/// Reads the number of dimensions, a u8. Throws `protocol` if it is above kMaxDimensions.
size_t decode_dimensions(Reader& in);
/// Reads the sizes of a tensor with `bytes` per element. Throws `protocol` if a size is negative or
/// if `bytes` times all nonzero sizes overflows an int64, because torch's strides could too.
std::vector<int64_t> decode_sizes(Reader& in, size_t dimensions, uint64_t bytes);
/// Reads a descriptor. Throws `protocol` for an unknown dtype, layout or device, too many
/// dimensions, sizes that decode_sizes() refuses, or a layout that does not fit the dimensions.
TensorDesc decode_tensor_desc(Reader& in);

/// Byte offsets of consecutive tensors in a payload, each a multiple of 64, and the payload's size.
struct PayloadLayout {
  std::vector<uint64_t> offsets;
  uint64_t bytes = 0;
  /// Appends a tensor of `more` bytes. Throws `protocol` on overflow.
  void append(uint64_t more);
};

}  // namespace distrain::wire
