// Sparse tensors of the fake device: their indices and values are tensors on the device.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/SparseTensorUtils.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "support/fake_device_internal.h"

namespace distrain::testing::fake_device {
namespace {

using at::Tensor;

Tensor make(const Tensor& like, const Tensor& indices, const Tensor& values, bool coalesced) {
  return at::_sparse_coo_tensor_with_dims_and_tensors(
      like.sparse_dim(), like.dense_dim(), like.sizes(), indices, values,
      values.options().layout(at::kSparse), coalesced);
}

Tensor on_cpu(Launch& launch, const Tensor& sparse) {
  return at::_sparse_coo_tensor_unsafe(launch.operand(sparse._indices()),
                                       launch.operand(sparse._values()), sparse.sizes(),
                                       at::TensorOptions(), sparse.is_coalesced());
}

Tensor& add_to_dense(Tensor& dense, const Tensor& sparse, const at::Scalar& alpha) {
  if (sparse._nnz() == 0) return dense;
  Launch launch;
  launch.submit([there = launch.operand(dense), sum = on_cpu(launch, sparse), alpha] {
    Tensor(there).add_(sum, alpha);
  });
  return dense;
}

Tensor& add_(Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  TORCH_CHECK(other.is_sparse(), "torch adds sparse to dense, not dense to sparse");
  if (!self.is_sparse()) return add_to_dense(self, other, alpha);
  at::sparse::get_sparse_impl(self)->set_indices_and_values_unsafe(
      at::cat({self._indices(), other._indices()}, 1),
      at::cat({self._values(), other._values().mul(alpha)}));
  at::sparse::get_sparse_impl(self)->set_coalesced(false);
  return self;
}

Tensor add(const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  TORCH_CHECK(other.is_sparse(), "torch adds sparse to dense, not dense to sparse");
  if (!self.is_sparse()) {
    Tensor sum = self.clone();
    return add_to_dense(sum, other, alpha);
  }
  return make(self, at::cat({self._indices(), other._indices()}, 1),
              at::cat({self._values(), other._values().mul(alpha)}), false);
}

Tensor by_scalar(const Tensor& self, const Tensor& other,
                 Tensor (*compute)(const Tensor&, const Tensor&)) {
  TORCH_CHECK(self.is_sparse() && other.dim() == 0 && !other.is_sparse(),
              "sparse tensors on the fake device are multiplied and divided by scalars only");
  return make(self, self._indices(), compute(self._values(), other), self.is_coalesced());
}

Tensor mul(const Tensor& self, const Tensor& other) { return by_scalar(self, other, at::mul); }
Tensor div(const Tensor& self, const Tensor& other) { return by_scalar(self, other, at::div); }

Tensor& mul_(Tensor& self, const Tensor& other) {
  TORCH_CHECK(self.is_sparse() && other.dim() == 0 && !other.is_sparse(),
              "sparse tensors on the fake device are multiplied by scalars only");
  self._values().mul_(other);
  return self;
}

// Waits for the stream, as on CUDA, because the host needs the number of distinct rows.
Tensor coalesce(const Tensor& self) {
  const Lock lock;
  Launch launch;
  const Tensor repeated = on_cpu(launch, self);
  launch.synchronize();
  const at::AutoDispatchBelowADInplaceOrView kernels_only;
  const Tensor once = at::_coalesce(repeated);
  return make(self, publish(self.device(), once._indices()), publish(self.device(), once._values()),
              true);
}

Tensor to_dense(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<bool>) {
  Tensor dense = at::zeros(self.sizes(), self._values().options());
  add_to_dense(dense, self, 1);
  return dtype ? dense.to(*dtype) : dense;
}

Tensor clone(const Tensor& self, std::optional<at::MemoryFormat>) {
  return make(self, self._indices().clone(), self._values().clone(), self.is_coalesced());
}

Tensor& zero_(Tensor& self) { return at::native::zero_sparse_(self); }

// The functions below make `device` current, because torch creates sparse tensors there.

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<at::Device> device,
             std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::native::empty_sparse_symint(size, dtype, layout, device, pinned, format);
}

Tensor with_dims(int64_t sparse_dim, int64_t dense_dim, c10::IntArrayRef size,
                 std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pinned) {
  const c10::OptionalDeviceGuard guard(device);
  return at::native::new_with_dims_sparse(sparse_dim, dense_dim, size, dtype, layout, device,
                                          pinned);
}

Tensor with_tensors(int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size,
                    const Tensor& indices, const Tensor& values,
                    std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                    std::optional<at::Device> device, std::optional<bool> pinned,
                    std::optional<bool> coalesced) {
  const c10::DeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(
      sparse_dim, dense_dim, size, indices, values, dtype, layout, device, pinned, coalesced);
}

void unknown(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), " of sparse tensors on the fake device");
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_like", at::native::empty_like_sparse_coo);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", with_tensors);
  m.impl("_sparse_coo_tensor_with_dims", with_dims);
  m.impl("sparse_resize_", at::native::sparse_resize_);
  m.impl("sparse_resize_and_clear_", at::native::sparse_resize_and_clear_);
  m.impl("resize_as_sparse_", at::native::resize_as_sparse_);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("_coalesce", coalesce);
  m.impl("copy_", at::native::copy_sparse_wrapper_);
  m.impl("clone", clone);
  m.impl("zero_", zero_);
  m.impl("add.Tensor", add);
  m.impl("add_.Tensor", add_);
  m.impl("mul.Tensor", mul);
  m.impl("mul_.Tensor", mul_);
  m.impl("div.Tensor", div);
  m.impl("_to_dense", to_dense);
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&unknown>());
}

}  // namespace
}  // namespace distrain::testing::fake_device
