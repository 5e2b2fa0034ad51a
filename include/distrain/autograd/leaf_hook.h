#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include "distrain/autograd/context.h"

namespace distrain::autograd {

/// A leaf's post-accumulate hook that sees the leaf's gradients in passes of a context, too, where
/// AccumulateGrad does not run. Other hooks than this and Context::on_gradient_ready's fail there.
class LeafHook : public torch::autograd::PostAccumulateGradHook {
 public:
  /// Called once a pass with this rank's final gradient, on the thread that computed it, after
  /// those of on_gradient_ready. The pass fails with what it throws. It may have failed by then:
  /// context.runs() returns false for good.
  virtual void on_context_gradient(const ContextRef& context, const at::Tensor& gradient) = 0;
};

}  // namespace distrain::autograd
