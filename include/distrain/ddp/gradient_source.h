#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace distrain::ddp {

/// One backward pass of an engine that is neither torch's nor distrain's, as seen by what reduces
/// its gradients: AccumulateGrad's hooks do not fire in such a pass.
class GradientPass {
 public:
  virtual ~GradientPass() = default;

  /// The gradient that this pass has for `variable`; undefined when it has none. Thread-safe.
  virtual at::Tensor gradient(const at::Tensor& variable) = 0;

  /// Puts `gradient` in the place of what the pass has for `variable`. Thread-safe.
  virtual void set_gradient(const at::Tensor& variable, at::Tensor gradient) = 0;

  /// To be registered before the pass runs. `fn` is called once, with the final local gradient of
  /// `variable`, on the thread that computed it; not at all if the pass has no gradient for it.
  virtual void on_gradient_ready(const at::Tensor& variable,
                                 std::function<void(const at::Tensor& gradient)> fn) = 0;

  /// To be registered before the pass runs. `fn` is called once, after the last on_gradient_ready
  /// of this rank, on a thread that may block; backward() returns after it and throws what it
  /// throws. A pass that fails before its end destroys `fn` without calling it: that tells the
  /// reducer to give up its part, so it must not be put off.
  virtual void on_pass_end(std::function<void()> fn) = 0;
};

}  // namespace distrain::ddp
