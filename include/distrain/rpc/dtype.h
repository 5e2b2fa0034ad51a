#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "distrain/wire/tensor_desc.h"

namespace distrain::rpc {

/// Element types as they are written down. Throws `invalid` for others (quantized ones).
wire::DType to_dtype(at::ScalarType type);
/// Throws `protocol` for a number that is none.
at::ScalarType to_scalar_type(wire::DType dtype);

/// Returns what kind of tensor this is if its elements cannot be sent to another rank, such as "a
/// nested tensor"; otherwise an empty string.
std::string kind_that_cannot_be_sent(const at::Tensor& tensor);

}  // namespace distrain::rpc
