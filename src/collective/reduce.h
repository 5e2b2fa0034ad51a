#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <c10/core/ScalarType.h>

#include "message.h"

namespace distrain::collective {

/// Returns true if reduce() supports the pair: all five operations for real floating dtypes; sum
/// and avg for complex; sum, product, min and max for integers and bool (as or, and, and, or).
bool can_reduce(ReduceOp op, c10::ScalarType dtype);

/// Computes out[i] = inputs[0][i] op inputs[1][i] op …, in this order for each element, so that
/// equal inputs give equal bits on each rank. Integers wrap around. Half and BFloat16 accumulate in
/// float32 and are rounded once, after the division of avg. min and max propagate NaN. `out` may be
/// one of the inputs. All hold `count` aligned elements.
void reduce(ReduceOp op, c10::ScalarType dtype, std::span<const uint8_t* const> inputs,
            size_t count, uint8_t* out);

}  // namespace distrain::collective
