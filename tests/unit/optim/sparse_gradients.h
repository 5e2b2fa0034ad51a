#pragma once

#include <vector>

#include <ATen/ATen.h>

namespace distrain::optim {

inline constexpr int kSteps = 20;

inline double difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  return (a - b).abs().max().item<double>();
}

inline at::Tensor sparse(const std::vector<int64_t>& rows, const at::Tensor& values,
                         at::IntArrayRef shape) {
  return at::sparse_coo_tensor(at::tensor(rows, at::kLong).unsqueeze(0), values, shape);
}

/// A sparse gradient with repeated rows, and the equal dense gradient.
struct SparsePair {
  at::Tensor sparse_gradient;
  at::Tensor dense_gradient;
};
inline SparsePair random_rows(int64_t rows, int64_t dim, int64_t count,
                              at::ScalarType type = at::kFloat) {
  const at::Tensor numbers = at::randint(0, rows, {1, count}, at::kLong);
  const at::Tensor values = at::randn({count, dim}, type);
  const at::Tensor gradient = at::sparse_coo_tensor(numbers, values, {rows, dim});
  return {gradient, gradient.to_dense()};
}

}  // namespace distrain::optim
