#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace distrain::base {

template <class Signature>
class UniqueFunction;

/// A move-only std::function, for closures that own what cannot be copied.
template <class R, class... Args>
class UniqueFunction<R(Args...)> {
 public:
  UniqueFunction() = default;

  template <class F>
  requires(!std::is_same_v<std::decay_t<F>, UniqueFunction> &&
           std::is_invocable_r_v<R, std::decay_t<F>&, Args...>)
      UniqueFunction(F&& f)  // NOLINT: implicit, as std::function's
      : callable_(std::make_unique<Holder<std::decay_t<F>>>(std::forward<F>(f))) {}

  explicit operator bool() const { return callable_ != nullptr; }
  R operator()(Args... args) { return callable_->call(std::forward<Args>(args)...); }

 private:
  struct Callable {
    virtual ~Callable() = default;
    virtual R call(Args... args) = 0;
  };
  template <class F>
  struct Holder final : Callable {
    explicit Holder(F f) : function(std::move(f)) {}
    R call(Args... args) override {
      if constexpr (std::is_void_v<R>) {
        function(std::forward<Args>(args)...);  // its result, if it has one, is nobody's
      } else {
        return function(std::forward<Args>(args)...);
      }
    }
    F function;
  };

  std::unique_ptr<Callable> callable_;
};

}  // namespace distrain::base
