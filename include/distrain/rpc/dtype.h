#pragma once

#include <c10/core/ScalarType.h>

#include "distrain/wire/tensor_desc.h"

namespace distrain::rpc {

/// Element types as they are written down. Throws `invalid` for those that are not (quantized
/// ones).
wire::DType to_dtype(at::ScalarType type);
/// Throws `protocol` for a number that is none.
at::ScalarType to_scalar_type(wire::DType dtype);

}  // namespace distrain::rpc
