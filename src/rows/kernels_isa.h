// The kernels, for the instruction set that DISTRAIN_KERNELS names. Each kernels_<isa>.cpp includes
// this file once. The compiler turns the loops over a row's elements into vector instructions.
#include "kernel_functions.h"

namespace distrain::rows {
namespace {

float root(float x) { return __builtin_sqrtf(x); }
double root(double x) { return __builtin_sqrt(x); }

// Writes the sum of `count` vectors, which are at multiples of `stride`, to `sum`. The position of
// the k-th is positions[k], or `first` + k if `positions` is null.
template <class T>
void add_up(const Gradients<T>& from, const uint32_t* positions, size_t first, size_t count,
            size_t dim, size_t stride, T* __restrict sum) {
  const auto position = [&](size_t k) { return positions ? positions[k] : first + k; };
  const auto vector = [&](size_t k) {
    const size_t p = position(k);
    return from.values + (from.rows ? from.rows[p] : p) * stride;
  };
  if (count == 0) {
    for (size_t i = 0; i < dim; ++i) sum[i] = 0;
  }
  for (size_t k = 0; k < count; ++k) {
    if (k + 4 < count) __builtin_prefetch(vector(k + 4));
    const T* __restrict term = vector(k);
    if (from.factors) {
      const T factor = from.factors[position(k)];
      if (k == 0) {
        for (size_t i = 0; i < dim; ++i) sum[i] = term[i] * factor;
      } else {
        for (size_t i = 0; i < dim; ++i) sum[i] += term[i] * factor;
      }
    } else if (k == 0) {
      for (size_t i = 0; i < dim; ++i) sum[i] = term[i];
    } else {
      for (size_t i = 0; i < dim; ++i) sum[i] += term[i];
    }
  }
}

// Returns the gradient of a row: its only vector, or the sum in the buffer.
template <class T>
const T* gradient_of(const GroupedGradients<T>& grouped, size_t row) {
  const Gradients<T>& from = grouped.gradients;
  const size_t start = grouped.starts[row];
  const size_t count = grouped.starts[row + 1] - start;
  if (count == 1 && !from.factors) {
    const size_t p = grouped.positions[start];
    return from.values + (from.rows ? from.rows[p] : p) * grouped.dim;
  }
  add_up(from, grouped.positions + start, 0, count, grouped.dim, grouped.dim, grouped.buffer);
  return grouped.buffer;
}

// Adds element i to the partial sum i % 16, so that all instruction sets round equally. The sums
// are one vector, because a loop over an array of them would pass through memory.
template <class T>
[[gnu::always_inline]] inline T sum_of_squares(const T* x, size_t dim) {
  constexpr size_t kSums = 16;
  typedef T Sums __attribute__((vector_size(kSums * sizeof(T))));
  Sums sums = {};
  size_t i = 0;
  for (; i + kSums <= dim; i += kSums) {
    Sums terms;
    __builtin_memcpy(&terms, x + i, sizeof terms);
    sums += terms * terms;
  }
  for (; i < dim; ++i) sums[i % kSums] += x[i] * x[i];
  const auto eight = __builtin_shufflevector(sums, sums, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(sums, sums, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
                    __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

template <class T>
void update_row(const UpdateConstants<T>& constants, const RowPointers<T>& row, size_t dim,
                const T* __restrict g) {
  const UpdateConstants<T> c = constants;  // a copy that the stores below cannot change
  T* __restrict w = row.value;
  T* __restrict a = row.states[0];
  T* __restrict b = row.states[1];
  switch (c.optimizer) {
    case Optimizer::kSgd:
      for (size_t i = 0; i < dim; ++i) w[i] -= g[i] * c.rate;
      break;
    case Optimizer::kAdagrad:
      for (size_t i = 0; i < dim; ++i) {
        a[i] += g[i] * g[i];
        w[i] -= g[i] / (root(a[i]) + c.eps) * c.rate;
      }
      break;
    case Optimizer::kRowwiseAdagrad: {
      *row.row_state += sum_of_squares(g, dim) / static_cast<T>(dim);
      const T rate = c.rate / (root(*row.row_state) + c.eps);
      for (size_t i = 0; i < dim; ++i) w[i] -= g[i] * rate;
      break;
    }
    case Optimizer::kAdam:
    case Optimizer::kAdamW:
      for (size_t i = 0; i < dim; ++i) {
        a[i] = a[i] * c.beta1 + g[i] * c.share1;
        b[i] = b[i] * c.beta2 + (g[i] * c.share2) * g[i];
        w[i] = w[i] * c.shrink - a[i] / (root(b[i]) + c.eps) * c.rate;
      }
      break;
    case Optimizer::kRmsProp:
      for (size_t i = 0; i < dim; ++i) {
        a[i] = a[i] * c.beta2 + (g[i] * c.share2) * g[i];
        w[i] -= (g[i] * c.rate) / (root(a[i]) + c.eps);
      }
      break;
  }
}

template <class T>
void update(const UpdateConstants<T>& constants, const GroupedGradients<T>& grouped,
            const RowPointers<T>* rows, size_t count) {
  for (size_t row = 0; row < count; ++row) {
    const T* gradient = gradient_of(grouped, row);
    if (constants.scale != 1) {
      for (size_t i = 0; i < grouped.dim; ++i) grouped.buffer[i] = gradient[i] * constants.scale;
      gradient = grouped.buffer;
    }
    update_row(constants, rows[row], grouped.dim, gradient);
    if (rows[row].updates) ++*rows[row].updates;
  }
}

double norm_squared(const GroupedGradients<float>& grouped, size_t count) {
  double sum = 0;
  for (size_t row = 0; row < count; ++row) {
    sum += sum_of_squares(gradient_of(grouped, row), grouped.dim);
  }
  return sum;
}

void sums(const GroupedGradients<float>& grouped, const uint32_t* place_of, float* sums,
          size_t count) {
  for (size_t row = 0; row < count; ++row) {
    const size_t start = grouped.starts[row];
    const uint32_t* positions = grouped.positions + start;
    add_up(grouped.gradients, positions, 0, grouped.starts[row + 1] - start, grouped.dim,
           grouped.dim, sums + place_of[positions[0]]);
  }
}

void pool(const Gradients<float>& terms, const int64_t* offsets, size_t dim, size_t stride,
          bool mean, float* pooled, size_t first, size_t last) {
  for (size_t bag = first; bag < last; ++bag) {
    const auto start = static_cast<size_t>(offsets[bag]);
    const auto count = static_cast<size_t>(offsets[bag + 1]) - start;
    float* __restrict sum = pooled + bag * dim;
    add_up(terms, nullptr, start, count, dim, stride, sum);
    if (!mean || count < 2) continue;
    for (size_t i = 0; i < dim; ++i) sum[i] /= static_cast<float>(count);
  }
}

}  // namespace

const KernelFunctions DISTRAIN_KERNELS = {update<float>, update<double>, norm_squared, sums, pool};

}  // namespace distrain::rows
