#pragma once

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
};

/// Bytes an element; 0 for a number that is no DType.
size_t element_bytes(DType dtype);

/// A dense, contiguous tensor in a frame's payload.
///
///   u8 dtype · u8 dimensions · dimensions × i64 size
///
/// Its elements lie in the payload in row-major order. The first tensor begins at the payload's
/// start, each further one at the next multiple of 64.
struct TensorDesc {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> sizes;

  uint64_t bytes() const;  ///< of its elements
};

void encode(const TensorDesc& desc, Writer& out);

/// Throws `protocol` for an unknown dtype, too many dimensions, a negative size or a product of
/// sizes that does not fit.
TensorDesc decode_tensor_desc(Reader& in);

/// Byte offsets of the tensors in a payload, and its length. Throws `protocol` on overflow.
struct PayloadLayout {
  std::vector<uint64_t> offsets;
  uint64_t bytes = 0;
};
PayloadLayout layout_payload(const std::vector<TensorDesc>& tensors);

}  // namespace distrain::wire
