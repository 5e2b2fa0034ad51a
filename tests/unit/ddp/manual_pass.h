#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include "../src/autograd/context_state.h"
#include "distrain/autograd/context.h"
#include "distrain/base/error.h"
#include "distrain/ddp/reducer.h"

namespace distrain::testing {

/// A backward pass of an autograd context without an agent. The test decides which gradients come,
/// in which order, and when the pass ends. The pass does not use `.grad`.
class ManualPass {
 public:
  explicit ManualPass(ddp::Reducer& reducer)
      : id_(next_id()), context_(std::make_shared<autograd::ContextState>(id_)) {
    reducer.expect(autograd::ContextRef(context_));
    context_->pass_or(id_, [] { return nullptr; });
  }

  /// Hands the reducer the final gradient of `variable` on this rank. A gradient that the caller
  /// moves in is not copied, so its shape or device may differ from that of `variable`.
  void give(const at::Tensor& variable, at::Tensor gradient) {
    context_->accumulate(variable, std::move(gradient), id_);
    auto& hook = *torch::autograd::impl::post_acc_grad_hooks(variable);
    dynamic_cast<autograd::LeafHook&>(hook).on_context_gradient(autograd::ContextRef(context_, id_),
                                                                context_->gradient(variable));
  }
  /// Ends the pass, as an engine does after the last gradient. Throws the reducer's error.
  void end() {
    for (const auto& hook : context_->end_hooks_of(id_)) hook();
  }
  /// Ends the pass as a failed one.
  void fail() { context_->fail_pass(id_, {base::ErrorKind::kCancelled, "failed by the test"}); }

  /// Computes the gradients of `loss`, hands the reducer those of `variables` in their order, and
  /// ends the pass. Skips variables that `loss` does not use.
  void backward(const at::Tensor& loss, const std::vector<at::Tensor>& variables) {
    const auto gradients =
        torch::autograd::grad({loss}, variables, {}, /*retain_graph=*/true, false, true);
    for (size_t i = 0; i < variables.size(); ++i) {
      if (gradients[i].defined()) give(variables[i], gradients[i]);
    }
    end();
  }

  /// Returns this rank's gradient of `variable` or, after end(), the mean over the ranks.
  at::Tensor gradient(const at::Tensor& variable) const { return context_->gradient(variable); }

 private:
  static uint64_t next_id() {
    static std::atomic<uint64_t> next{uint64_t{1} << 62};  // beyond the ids of agents' contexts
    return next++;
  }

  const uint64_t id_;  // of the context and of the pass
  std::shared_ptr<autograd::ContextState> context_;
};

}  // namespace distrain::testing
