#pragma once

#include <cstddef>
#include <cstdint>

// This header has no inline functions, because the files that are compiled for AVX include it.

namespace distrain::rows {

enum class Optimizer : uint8_t { kSgd, kAdagrad, kRowwiseAdagrad, kAdam, kAdamW, kRmsProp };

/// Options of an optimizer of rows, by the names and with the defaults of torch.optim.
///
/// An update changes only rows that have a gradient, and their state. Adam is
/// torch.optim.SparseAdam: the moments of a row decay only when the row has a gradient, and eps is
/// added before the bias correction. AdamW does the same after it has multiplied the row by 1 - lr
/// * weight_decay. RMSprop's averages decay in the same lazy way. If every row has a gradient in
/// each step, SGD, Adagrad and RMSprop equal torch.optim's for dense gradients.
///
/// Row-wise Adagrad keeps one sum for each row: sum += mean of the gradient's squares, and
/// value -= lr / (sqrt(sum) + eps) * gradient, as FBGEMM's EXACT_ROWWISE_ADAGRAD.
struct RowRule {
  Optimizer optimizer = Optimizer::kSgd;
  double lr_decay = 0;                   ///< Adagrad, also row-wise
  double initial_accumulator_value = 0;  ///< Adagrad, also row-wise
  double eps = 1e-10;
  double beta1 = 0.9;       ///< Adam, AdamW
  double beta2 = 0.999;     ///< Adam, AdamW
  double alpha = 0.99;      ///< RMSprop
  double weight_decay = 0;  ///< AdamW
};

struct Step {
  double lr = 0;
  int64_t number = 1;         ///< the number of the table's step, from 1
  double gradient_scale = 1;  ///< multiplies each gradient, for clipping
};

/// The gradients of a push. The gradient of a position is the vector `values` + row * dim, times
/// the position's factor.
template <class T>
struct Gradients {
  const T* values = nullptr;
  const uint32_t* rows = nullptr;  ///< by position; if null, vector i belongs to position i
  const T* factors = nullptr;      ///< by position; if null, all are 1
};

/// A row has at most this number of state vectors as long as its value: Adagrad's `sum`, Adam's
/// `exp_avg` and `exp_avg_sq`, RMSprop's `square_avg`. Row-wise Adagrad keeps one number instead.
inline constexpr size_t kMaxStates = 2;

}  // namespace distrain::rows
