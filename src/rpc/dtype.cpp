#include "distrain/rpc/dtype.h"

#include "distrain/base/error.h"

namespace distrain::rpc {

wire::DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return wire::DType::kUInt8;
    case at::kChar:
      return wire::DType::kInt8;
    case at::kShort:
      return wire::DType::kInt16;
    case at::kInt:
      return wire::DType::kInt32;
    case at::kLong:
      return wire::DType::kInt64;
    case at::kHalf:
      return wire::DType::kFloat16;
    case at::kBFloat16:
      return wire::DType::kBFloat16;
    case at::kFloat:
      return wire::DType::kFloat32;
    case at::kDouble:
      return wire::DType::kFloat64;
    case at::kBool:
      return wire::DType::kBool;
    case at::kComplexFloat:
      return wire::DType::kComplex64;
    case at::kComplexDouble:
      return wire::DType::kComplex128;
    case at::kUInt16:
      return wire::DType::kUInt16;
    case at::kUInt32:
      return wire::DType::kUInt32;
    case at::kUInt64:
      return wire::DType::kUInt64;
    default:
      throw base::Exception(
          base::ErrorKind::kInvalid,
          std::string("tensors of dtype ") + c10::toString(type) + " cannot be sent or saved");
  }
}

at::ScalarType to_scalar_type(wire::DType dtype) {
  switch (dtype) {
    case wire::DType::kUInt8:
      return at::kByte;
    case wire::DType::kInt8:
      return at::kChar;
    case wire::DType::kInt16:
      return at::kShort;
    case wire::DType::kInt32:
      return at::kInt;
    case wire::DType::kInt64:
      return at::kLong;
    case wire::DType::kFloat16:
      return at::kHalf;
    case wire::DType::kBFloat16:
      return at::kBFloat16;
    case wire::DType::kFloat32:
      return at::kFloat;
    case wire::DType::kFloat64:
      return at::kDouble;
    case wire::DType::kBool:
      return at::kBool;
    case wire::DType::kComplex64:
      return at::kComplexFloat;
    case wire::DType::kComplex128:
      return at::kComplexDouble;
    case wire::DType::kUInt16:
      return at::kUInt16;
    case wire::DType::kUInt32:
      return at::kUInt32;
    case wire::DType::kUInt64:
      return at::kUInt64;
  }
  wire::Reader::fail("an unknown tensor dtype");
}

}  // namespace distrain::rpc
