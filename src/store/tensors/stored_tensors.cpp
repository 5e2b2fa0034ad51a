#include "distrain/store/stored_tensors.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "distrain/rpc/dtype.h"

namespace distrain::store {

StoredTensor to_stored(const at::Tensor& tensor, std::vector<at::Tensor>& kept) {
  const at::Tensor plain = tensor.detach().cpu().contiguous();
  kept.push_back(plain);
  return {rpc::to_dtype(plain.scalar_type()),
          plain.sizes().vec(),
          {static_cast<const uint8_t*>(plain.const_data_ptr()), plain.nbytes()}};
}

at::Tensor to_tensor(const StoredTensor& stored) {
  at::Tensor tensor = at::empty(stored.shape, rpc::to_scalar_type(stored.dtype));
  std::ranges::copy(stored.bytes, static_cast<uint8_t*>(tensor.mutable_data_ptr()));
  return tensor;
}

rpc::NamedTensors read_tensors(const std::string& path) {
  rpc::NamedTensors tensors;
  const Safetensors file = Safetensors::read(path);
  for (const auto& [name, stored] : file.tensors()) tensors[name] = to_tensor(stored);
  return tensors;
}

}  // namespace distrain::store
