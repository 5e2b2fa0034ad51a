#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <c10/core/ScalarType.h>

#include "message.h"

namespace distrain::collective {

/// Whether `reduce` knows this pair: all five operations for real floating dtypes; sum and avg for
/// complex ones; sum, product, min and max for integers; for bool ("or", "and", "and", "or").
bool can_reduce(ReduceOp op, c10::ScalarType dtype);

/// out[i] = inputs[0][i] op inputs[1][i] op …, strictly in this order for every element, so that
/// equal inputs give equal bits wherever it runs. Integers wrap around. Half and BFloat16
/// accumulate in float32 and are rounded once, at the end; avg divides then. min and max keep a
/// NaN. `out` may be one of the inputs. All hold `count` aligned elements.
void reduce(ReduceOp op, c10::ScalarType dtype, std::span<const uint8_t* const> inputs,
            size_t count, uint8_t* out);

}  // namespace distrain::collective
