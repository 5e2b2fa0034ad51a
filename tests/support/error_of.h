#pragma once

#include <functional>

#include "distrain/base/error.h"

namespace distrain::testing {

/// Returns the error that `fn` throws, or an `internal` error "(no error)" if `fn` throws none.
inline base::Error error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const base::Exception& e) {
    return e.error();
  }
  return base::Error{base::ErrorKind::kInternal, "(no error)", -1, {}};
}

}  // namespace distrain::testing
