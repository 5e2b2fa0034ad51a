#pragma once

#include "distrain/base/error.h"

namespace distrain::rpc {

/// Returns the current exception as an Error, like base::current_error(), but without the C++
/// backtrace that torch appends to what(). Must be called inside a catch block.
base::Error error_in_flight(base::ErrorKind otherwise);

}  // namespace distrain::rpc
