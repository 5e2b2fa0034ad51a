#pragma once

#include <utility>

#include "distrain/autograd/context.h"
#include "distrain/ddp/gradient_source.h"

namespace distrain::ddp {

/// The next backward pass of a distributed autograd context, for Reducer::attach.
class ContextPass final : public GradientPass {
 public:
  explicit ContextPass(autograd::Context& context) : context_(context) {}

  uint64_t id() const override { return context_.id(); }
  at::Tensor gradient(const at::Tensor& variable) override { return context_.gradient(variable); }
  void set_gradient(const at::Tensor& variable, at::Tensor gradient) override {
    context_.set_gradient(variable, std::move(gradient));
  }
  void on_gradient_ready(const at::Tensor& variable,
                         std::function<void(const at::Tensor& gradient)> fn) override {
    context_.on_gradient_ready(variable, std::move(fn));
  }
  void on_pass_end(std::function<void()> fn) override { context_.on_pass_end(std::move(fn)); }

 private:
  autograd::Context& context_;
};

}  // namespace distrain::ddp
