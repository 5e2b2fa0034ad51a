#pragma once

#include <string>

#include "distrain/base/error.h"

namespace distrain::nn {

/// Calls `make`. If it throws `resources`, rethrows the error with advice to lower `options`.
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

/// Makes large CPU tensors of this process reuse the memory blocks of freed tensors of about the
/// same size. Call it once, before any thread and any tensor exists; `app::main` does.
///
/// Every training step allocates the same sizes, from several threads. malloc would split and join
/// free memory in varying orders, so the process would grow for thousands of steps.
void reuse_tensor_memory();

}  // namespace distrain::nn
