#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace distrain::ddp {

/// One backward pass of an engine other than torch's and distrain's, in which AccumulateGrad's
/// hooks do not run.
class GradientPass {
 public:
  virtual ~GradientPass() = default;

  /// Returns the pass's gradient of `variable`, or an undefined tensor. Thread-safe.
  virtual at::Tensor gradient(const at::Tensor& variable) = 0;

  /// Replaces the pass's gradient of `variable`. Thread-safe.
  virtual void set_gradient(const at::Tensor& variable, at::Tensor gradient) = 0;

  /// Registers `fn` before the pass runs. It is called once, with the final local gradient of
  /// `variable`, on the thread that computed it, and not at all if there is no gradient.
  virtual void on_gradient_ready(const at::Tensor& variable,
                                 std::function<void(const at::Tensor& gradient)> fn) = 0;

  /// Registers `fn` before the pass runs. It is called once, after this rank's last
  /// on_gradient_ready hook, on a thread that may block; backward() waits for `fn` and throws its
  /// error. A failed pass must destroy `fn` at once, because that makes the reducer give it up.
  virtual void on_pass_end(std::function<void()> fn) = 0;
};

}  // namespace distrain::ddp
