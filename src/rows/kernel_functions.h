#pragma once

#include "distrain/rows/rule.h"

// The kernels of one instruction set, and what they take. As rule.h, this header has no inline
// functions: the linker keeps one copy of such a function, which might be one with AVX.

namespace distrain::rows {

/// A step's options, computed once and in the type of the values.
template <class T>
struct UpdateConstants {
  Optimizer optimizer;
  T scale;
  T rate;  // the learning rate, corrected for the step
  T beta1;
  T share1;  // 1 - beta1
  T beta2;   // RMSprop: alpha
  T share2;  // 1 - beta2
  T eps;
  T shrink;  // AdamW: 1 - lr * weight_decay
};

/// Gradients by row: row i is the sum of the vectors at the positions `positions[starts[i]]` to
/// `positions[starts[i + 1] - 1]`.
template <class T>
struct GroupedGradients {
  Gradients<T> gradients;
  const uint32_t* starts;
  const uint32_t* positions;
  size_t dim;
  T* buffer;  // `dim` elements, of one row's sum
};

template <class T>
struct RowPointers {
  T* value;
  T* states[kMaxStates];
  T* row_state;
  uint32_t* updates;  // null if rows have no counts
};

struct KernelFunctions {
  template <class T>
  using Update = void (*)(const UpdateConstants<T>&, const GroupedGradients<T>&,
                          const RowPointers<T>* rows, size_t count);
  Update<float> update;
  Update<double> update_doubles;
  /// Adds the squares of the gradients of `count` rows.
  double (*norm_squared)(const GroupedGradients<float>&, size_t count);
  /// Writes the sums of the gradients of `count` rows: see sum_gradients().
  void (*sums)(const GroupedGradients<float>&, const uint32_t* place_of, float* sums, size_t count);
  /// Pools the bags `first` to `last` - 1: bag b has the positions offsets[b] to offsets[b + 1]
  /// - 1.
  void (*pool)(const Gradients<float>& terms, const int64_t* offsets, size_t dim, size_t stride,
               bool mean, float* pooled, size_t first, size_t last);
};

extern const KernelFunctions kBaselineKernels, kAvx2Kernels, kAvx512Kernels;

}  // namespace distrain::rows
