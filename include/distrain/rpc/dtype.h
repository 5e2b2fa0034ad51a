#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "distrain/wire/tensor_desc.h"

namespace distrain::rpc {

/// Returns the wire's number of an element type. Throws `invalid` if it cannot be sent (quantized).
wire::DType to_dtype(at::ScalarType type);
/// Returns the element type for a wire format's number. Throws `protocol` if the number is unknown.
at::ScalarType to_scalar_type(wire::DType dtype);

/// Returns a description such as "a nested tensor" if `tensor` cannot be sent; otherwise "".
std::string kind_that_cannot_be_sent(const at::Tensor& tensor);

}  // namespace distrain::rpc
