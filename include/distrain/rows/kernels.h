#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "distrain/rows/row_store.h"
#include "distrain/rows/rule.h"

namespace distrain::rows {

// Note [Kernels of rows]
//
// An update takes the distinct ids of a push (IdGroups) and touches each row once: it sums the
// gradients of the id's positions in a buffer of one row, then reads value and state, and writes
// both. A lookup copies each distinct row once under its stripe's lock; bags are pooled from that
// copy, so they can be pooled on a trainer, too.
//
// The code of a kernel (kernels_isa.h) is compiled for several instruction sets, of which the
// processor's best is chosen at run time. Multiplications and additions are not fused, and sums
// over a row's elements use 16 partial sums everywhere. So all instruction sets give the same bits.

size_t state_vectors(const RowRule& rule);
/// Sets `state_floats` and `initial_state` of a row store for this rule.
void set_state(RowStoreOptions& options, const RowRule& rule);

/// Sums or means over bags of positions, as torch's EmbeddingBag with include_last_offset. The
/// caller checks that the offsets start at 0, ascend, and end at the number of positions.
struct Bags {
  std::span<const int64_t> offsets;  ///< bag b has the positions offsets[b] to offsets[b + 1] - 1
  std::span<const float> weights{};  ///< by position; if empty, all are 1
  bool mean = false;                 ///< divides the sum by the number of the bag's positions

  size_t size() const { return offsets.empty() ? 0 : offsets.size() - 1; }
};

/// The bag of each position and the factor of its gradient, from which of() makes Gradients that
/// give each position the gradient of its bag.
struct BagGradients {
  explicit BagGradients(const Bags& bags);
  Gradients<float> of(const float* values) const {
    return {values, rows.data(), factors.empty() ? nullptr : factors.data()};
  }

  std::vector<uint32_t> rows;  // the bag of each position
  std::vector<float> factors;  // empty if all are 1
};

/// Instruction sets that the kernels are compiled for.
enum class Isa : uint8_t { kBaseline, kAvx2, kAvx512 };
/// Returns the best instruction set of this processor.
Isa best_isa();

/// Updates the rows of the ids `first` to `last` - 1 of `groups`, whose row numbers are in
/// `numbers`. Throws `invalid`, before any update, if one of them has no row or the store was made
/// without set_state(). Threads may update disjoint ranges at the same time: see IdGroups::split.
void update_rows(RowStore& store, const RowRule& rule, const Step& step, const IdGroups& groups,
                 std::span<const RowNumber> numbers, const Gradients<float>& gradients,
                 size_t first, size_t last, Isa isa = best_isa());

/// Rows in arrays: row `id` is `values` + id * dim, and so for its state vectors.
template <class T>
struct RowArrays {
  T* values = nullptr;
  std::array<T*, kMaxStates> states{};
  T* row_states = nullptr;  ///< row-wise Adagrad's sums, one for each row
};

/// Updates rows of plain arrays. All ids must be below the number of rows. Takes no lock. T is
/// float or double.
template <class T>
void update_arrays(const RowArrays<T>& arrays, size_t dim, const RowRule& rule, const Step& step,
                   const IdGroups& groups, const Gradients<T>& gradients, size_t first, size_t last,
                   Isa isa = best_isa());

/// Returns the sum of the squares of the gradients of the ids `first` to `last` - 1, where the
/// gradients of an id are added first. The result is not finite if a gradient is not finite.
double gradient_norm_squared(size_t dim, const IdGroups& groups, const Gradients<float>& gradients,
                             size_t first, size_t last, Isa isa = best_isa());

/// Adds the gradients of each id. Writes the sum of the i-th id to `sums` + place_of[p], where p is
/// the id's first position, for each i from `first` to `last` - 1.
void sum_gradients(size_t dim, const IdGroups& groups, const Gradients<float>& gradients,
                   std::span<const uint32_t> place_of, float* sums, size_t first, size_t last,
                   Isa isa = best_isa());

/// Pools the bags `first` to `last` - 1 into `pooled` + bag * dim. Position p adds the vector
/// `values` + row_of[p] * stride: see RowStore::read and IdGroups::inverse. An empty bag gives
/// zeros.
void pool_rows(const float* values, size_t dim, size_t stride, std::span<const uint32_t> row_of,
               const Bags& bags, float* pooled, size_t first, size_t last, Isa isa = best_isa());

}  // namespace distrain::rows
