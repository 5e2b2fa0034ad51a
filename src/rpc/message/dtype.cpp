#include "distrain/rpc/dtype.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "distrain/base/error.h"

namespace distrain::rpc {

namespace {

using wire::DType;

// The most common types first, because find() is a linear search.
constexpr std::pair<at::ScalarType, DType> kDTypes[] = {
    {at::kFloat, DType::kFloat32},
    {at::kLong, DType::kInt64},
    {at::kDouble, DType::kFloat64},
    {at::kBFloat16, DType::kBFloat16},
    {at::kHalf, DType::kFloat16},
    {at::kByte, DType::kUInt8},
    {at::kBool, DType::kBool},
    {at::kInt, DType::kInt32},
    {at::kShort, DType::kInt16},
    {at::kChar, DType::kInt8},
    {at::kUInt16, DType::kUInt16},
    {at::kUInt32, DType::kUInt32},
    {at::kUInt64, DType::kUInt64},
    {at::kComplexFloat, DType::kComplex64},
    {at::kComplexDouble, DType::kComplex128},
    {at::kComplexHalf, DType::kComplex32},
    {at::kFloat8_e5m2, DType::kFloat8E5M2},
    {at::kFloat8_e4m3fn, DType::kFloat8E4M3},
    {at::kFloat8_e5m2fnuz, DType::kFloat8E5M2Fnuz},
    {at::kFloat8_e4m3fnuz, DType::kFloat8E4M3Fnuz},
    {at::kFloat8_e8m0fnu, DType::kFloat8E8M0},
};

const auto* find(at::ScalarType type) {
  return std::ranges::find(kDTypes, type, &std::pair<at::ScalarType, DType>::first);
}

}  // namespace

wire::DType to_dtype(at::ScalarType type) {
  if (const auto* found = find(type); found != std::end(kDTypes)) return found->second;
  base::invalid(std::string("tensors of dtype ") + c10::toString(type) +
                " cannot be sent or saved");
}

at::ScalarType to_scalar_type(wire::DType dtype) {
  const auto* found = std::ranges::find(kDTypes, dtype, &std::pair<at::ScalarType, DType>::second);
  if (found == std::end(kDTypes)) wire::Reader::fail("an unknown tensor dtype");
  return found->first;
}

std::string kind_that_cannot_be_sent(const at::Tensor& tensor) {
  const bool is_sparse = tensor.layout() == at::kSparse;
  if (tensor.is_nested()) return "a nested tensor";
  if (!is_sparse && tensor.layout() != at::kStrided) {
    std::ostringstream text;
    text << "a tensor of layout " << tensor.layout();
    return text.str();
  }
  if (tensor.is_quantized()) return "a quantized tensor";
  if (find(tensor.scalar_type()) == std::end(kDTypes)) {
    return std::string("a tensor of dtype ") + c10::toString(tensor.scalar_type());
  }
  if (tensor.is_meta()) return "a tensor on the device meta";
  // For example functorch's wrappers, lazily allocated zeros, and storage that was resized to 0.
  if (!is_sparse && (!tensor.has_storage() || (tensor.numel() > 0 && !tensor.storage().data()))) {
    return "a tensor without memory";
  }
  return {};
}

}  // namespace distrain::rpc
