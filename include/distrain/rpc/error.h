#pragma once

#include "distrain/base/error.h"

namespace distrain::rpc {

/// As base::current_error, but without the C++ backtrace that torch's exceptions carry in what().
/// To be called inside a catch block only.
base::Error error_in_flight(base::ErrorKind otherwise);

}  // namespace distrain::rpc
