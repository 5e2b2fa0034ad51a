#pragma once

#include <string>

#include "distrain/base/error.h"

namespace distrain::nn {

/// Returns make(), which allocates tensors. If make() throws `resources`, adds advice to the error:
/// to lower `options`, which names the options that determine the tensors' sizes.
template <class F>
auto sized_by(const std::string& options, const F& make) {
  try {
    return make();
  } catch (const base::Exception& e) {
    if (e.kind() != base::ErrorKind::kResources) throw;
    base::Error error = e.error();
    error.message += ": smaller values of " + options + " need less";
    throw base::Exception(std::move(error));
  }
}

}  // namespace distrain::nn
