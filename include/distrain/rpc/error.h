#pragma once

#include "distrain/base/error.h"

namespace distrain::rpc {

/// Returns the current exception as an Error, as base::current_error() does, but without the C++
/// backtrace that torch appends to what(). Call it only inside a catch block.
base::Error error_in_flight(base::ErrorKind otherwise);

}  // namespace distrain::rpc
