#include "distrain/rows/kernels.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "distrain/base/error.h"
#include "kernel_functions.h"

namespace distrain::rows {
namespace {

// Number of rows that are prefetched together.
constexpr size_t kBatch = 32;

bool is_adagrad(const RowRule& rule) {
  return rule.optimizer == Optimizer::kAdagrad || rule.optimizer == Optimizer::kRowwiseAdagrad;
}
bool is_adam(const RowRule& rule) {
  return rule.optimizer == Optimizer::kAdam || rule.optimizer == Optimizer::kAdamW;
}

double corrected_rate(const RowRule& rule, const Step& step) {
  const auto n = static_cast<double>(step.number);
  if (is_adagrad(rule)) return step.lr / (1 + (n - 1) * rule.lr_decay);
  if (!is_adam(rule)) return step.lr;
  return step.lr * std::sqrt(1 - std::pow(rule.beta2, n)) / (1 - std::pow(rule.beta1, n));
}

template <class T>
UpdateConstants<T> constants_of(const RowRule& rule, const Step& step) {
  const bool adam_w = rule.optimizer == Optimizer::kAdamW;
  const double beta2 = rule.optimizer == Optimizer::kRmsProp ? rule.alpha : rule.beta2;
  return {.optimizer = rule.optimizer,
          .scale = static_cast<T>(step.gradient_scale),
          .rate = static_cast<T>(corrected_rate(rule, step)),
          .beta1 = static_cast<T>(rule.beta1),
          .share1 = static_cast<T>(1 - rule.beta1),
          .beta2 = static_cast<T>(beta2),
          .share2 = static_cast<T>(1 - beta2),
          .eps = static_cast<T>(rule.eps),
          .shrink = static_cast<T>(adam_w ? 1 - step.lr * rule.weight_decay : 1)};
}

const KernelFunctions& functions_of(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kAvx512Kernels;
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#endif
  static_cast<void>(isa);
  return kBaselineKernels;
}

template <class T>
KernelFunctions::Update<T> update_of(Isa isa) {
  if constexpr (std::is_same_v<T, double>)
    return functions_of(isa).update_doubles;
  else
    return functions_of(isa).update;
}

void prefetch(const void* begin, size_t bytes) {
  const auto* const at = static_cast<const char*>(begin);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 1);
  __builtin_prefetch(at + bytes - 1, 1);
}

// Updates the rows of the ids `begin` to `end` - 1. `find(first, rows)` sets the pointers of the
// rows of some ids, from `first` on, and prefetches the rows.
template <class T, class Find>
void update_batches(const UpdateConstants<T>& constants, size_t dim, const IdGroups& groups,
                    const Gradients<T>& gradients, size_t begin, size_t end, Isa isa,
                    const Find& find) {
  thread_local std::vector<T> buffer;  // kept for its memory
  buffer.resize(dim);
  std::array<RowPointers<T>, kBatch> rows;
  for (; begin < end; begin += kBatch) {
    const size_t count = std::min(kBatch, end - begin);
    find(begin, std::span(rows).first(count));
    update_of<T>(isa)(
        constants,
        {gradients, groups.starts().data() + begin, groups.positions().data(), dim, buffer.data()},
        rows.data(), count);
  }
}

}  // namespace

Isa best_isa() {
#if defined(__x86_64__)
  static const Isa isa = __builtin_cpu_supports("avx512f") ? Isa::kAvx512
                         : __builtin_cpu_supports("avx2")  ? Isa::kAvx2
                                                           : Isa::kBaseline;
  return isa;
#else
  return Isa::kBaseline;
#endif
}

size_t state_vectors(const RowRule& rule) {
  if (is_adam(rule)) return 2;
  return rule.optimizer == Optimizer::kAdagrad || rule.optimizer == Optimizer::kRmsProp ? 1 : 0;
}

void set_state(RowStoreOptions& options, const RowRule& rule) {
  options.state_floats = options.dim * state_vectors(rule);
  options.initial_state =
      is_adagrad(rule) ? static_cast<float>(rule.initial_accumulator_value) : 0.0F;
}

BagGradients::BagGradients(const Bags& bags) {
  const size_t total = bags.size() == 0 ? 0 : static_cast<size_t>(bags.offsets.back());
  rows.resize(total);
  if (bags.mean || !bags.weights.empty()) factors.resize(total);
  for (size_t bag = 0; bag < bags.size(); ++bag) {
    const auto start = static_cast<size_t>(bags.offsets[bag]);
    const auto end = static_cast<size_t>(bags.offsets[bag + 1]);
    const float share = bags.mean && end > start ? 1 / static_cast<float>(end - start) : 1;
    std::fill_n(rows.data() + start, end - start, static_cast<uint32_t>(bag));
    if (factors.empty()) continue;
    for (size_t p = start; p < end; ++p) {
      factors[p] = bags.weights.empty() ? share : bags.weights[p] * share;
    }
  }
}

void update_rows(RowStore& store, const RowRule& rule, const Step& step, const IdGroups& groups,
                 std::span<const RowNumber> numbers, const Gradients<float>& gradients,
                 size_t first, size_t last, Isa isa) {
  if (store.options().state_floats != store.options().dim * state_vectors(rule)) {
    base::invalid("the rows of this store have no state for the optimizer: see set_state()");
  }
  for (size_t i = first; i < last; ++i) {
    if (numbers[i] == kNoRow) {
      base::invalid("there is a gradient for the id " + std::to_string(groups.ids()[i]) +
                    ", of which a table has no row");
    }
  }
  const size_t dim = store.options().dim;
  const UpdateConstants<float> constants = constants_of<float>(rule, step);
  using Rows = std::span<RowPointers<float>>;
  store.for_each_range(
      groups, numbers, first, last, [&](RowStore::LockedRows& locked, size_t begin, size_t end) {
        const auto find = [&](size_t at, Rows rows) {
          for (size_t i = 0; i < rows.size(); ++i) {
            Row& row = locked[at + i];
            prefetch(&row, store.block_bytes());
            float* const value = row.value();
            rows[i] = {value, {value + dim, value + 2 * dim}, &row.row_state, &row.updates};
          }
          for (size_t i = 0; i < rows.size(); ++i) locked.before_update(at + i);
        };
        update_batches(constants, dim, groups, gradients, begin, end, isa, find);
      });
}

template <class T>
void update_arrays(const RowArrays<T>& arrays, size_t dim, const RowRule& rule, const Step& step,
                   const IdGroups& groups, const Gradients<T>& gradients, size_t first, size_t last,
                   Isa isa) {
  const size_t states = state_vectors(rule);
  const auto find = [&](size_t at, std::span<RowPointers<T>> rows) {
    for (size_t i = 0; i < rows.size(); ++i) {
      const uint64_t id = groups.ids()[at + i];
      const auto row_of = [&](T* array, size_t width) {
        prefetch(array + id * width, width * sizeof(T));
        return array + id * width;
      };
      rows[i] = {row_of(arrays.values, dim), {}, nullptr, nullptr};
      for (size_t k = 0; k < states; ++k) rows[i].states[k] = row_of(arrays.states[k], dim);
      if (arrays.row_states) rows[i].row_state = row_of(arrays.row_states, 1);
    }
  };
  update_batches(constants_of<T>(rule, step), dim, groups, gradients, first, last, isa, find);
}

double gradient_norm_squared(size_t dim, const IdGroups& groups, const Gradients<float>& gradients,
                             size_t first, size_t last, Isa isa) {
  std::vector<float> buffer(dim);
  return functions_of(isa).norm_squared(
      {gradients, groups.starts().data() + first, groups.positions().data(), dim, buffer.data()},
      last - first);
}

void sum_gradients(size_t dim, const IdGroups& groups, const Gradients<float>& gradients,
                   std::span<const uint32_t> place_of, float* sums, size_t first, size_t last,
                   Isa isa) {
  functions_of(isa).sums(
      {gradients, groups.starts().data() + first, groups.positions().data(), dim, nullptr},
      place_of.data(), sums, last - first);
}

void pool_rows(const float* values, size_t dim, size_t stride, std::span<const uint32_t> row_of,
               const Bags& bags, float* pooled, size_t first, size_t last, Isa isa) {
  const Gradients<float> terms{values, row_of.data(),
                               bags.weights.empty() ? nullptr : bags.weights.data()};
  functions_of(isa).pool(terms, bags.offsets.data(), dim, stride, bags.mean, pooled, first, last);
}

template void update_arrays(const RowArrays<float>&, size_t, const RowRule&, const Step&,
                            const IdGroups&, const Gradients<float>&, size_t, size_t, Isa);
template void update_arrays(const RowArrays<double>&, size_t, const RowRule&, const Step&,
                            const IdGroups&, const Gradients<double>&, size_t, size_t, Isa);

}  // namespace distrain::rows
