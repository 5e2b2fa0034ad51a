#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include "distrain/autograd/context.h"

namespace distrain::autograd {

/// A post-accumulate hook that is also called in passes of a context, in which AccumulateGrad does
/// not run. Post-accumulate hooks of other types make such a pass fail.
class LeafHook : public torch::autograd::PostAccumulateGradHook {
 public:
  /// Called once per pass with this rank's final gradient, on the thread that computed it, after
  /// the hooks of on_gradient_ready. An exception fails the pass. After a failure `context.runs()`
  /// returns false.
  virtual void on_context_gradient(const ContextRef& context, const at::Tensor& gradient) = 0;
};

}  // namespace distrain::autograd
