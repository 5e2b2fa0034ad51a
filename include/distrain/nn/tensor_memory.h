#pragma once

#include <string>

#include "distrain/base/error.h"

namespace distrain::nn {

/// Calls `make`. If memory runs out, the error says that `options` set the size.
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

/// From now on big tensors of this process come from blocks that earlier ones of their size left.
/// To be called once, before any thread and any tensor; `app::main` does.
///
/// A training step asks for the same sizes again and again, from several threads at a time. malloc
/// would cut and join its free memory in an order that differs from step to step, so that the
/// process goes on growing for thousands of steps; this way it has what one step needs, of each
/// size as many blocks as were ever in use at once.
void reuse_tensor_memory();

}  // namespace distrain::nn
