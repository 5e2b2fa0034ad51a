#pragma once

#include "distrain/base/error.h"

namespace distrain::rpc {

/// Converts the caught exception to an Error, without the C++ backtrace of torch's exceptions. The
/// kind is `otherwise` if the exception has no kind. Must be called inside a catch block.
base::Error error_in_flight(base::ErrorKind otherwise);

}  // namespace distrain::rpc
