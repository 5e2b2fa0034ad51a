#pragma once

#include <vector>

#include "distrain/wire/tensor_desc.h"

namespace distrain::testing {

/// Returns the offset of each of `tensors` in the payload of a message that carries them in order.
inline wire::PayloadLayout layout_payload(const std::vector<wire::TensorDesc>& tensors) {
  wire::PayloadLayout layout;
  for (const wire::TensorDesc& tensor : tensors) layout.append(tensor.bytes());
  return layout;
}

}  // namespace distrain::testing
