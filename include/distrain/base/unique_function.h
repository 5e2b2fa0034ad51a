#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

namespace distrain::base {

template <class Signature>
class UniqueFunction;

/// A move-only std::function, for closures that own values that cannot be copied. Small closures
/// are stored inline, without an allocation, because every call makes some.
template <class R, class... Args>
class UniqueFunction<R(Args...)> {
 public:
  UniqueFunction() = default;

  template <class F>
  requires(!std::is_same_v<std::decay_t<F>, UniqueFunction> &&
           std::is_invocable_r_v<R, std::decay_t<F>&, Args...>)
      UniqueFunction(F&& f) {  // NOLINT: implicit, as std::function's
    using Function = std::decay_t<F>;
    if constexpr (kFits<Function>) {
      new (memory_) Function(std::forward<F>(f));
      operations_ = &kOperations<Function>;
    } else {
      *this = [held = std::make_unique<Function>(std::forward<F>(f))](Args... args) -> R {
        return static_cast<R>((*held)(std::forward<Args>(args)...));
      };
    }
  }
  UniqueFunction(UniqueFunction&& other) noexcept { take(other); }
  UniqueFunction& operator=(UniqueFunction&& other) noexcept {
    if (this == &other) return *this;
    // The old closure's destructor may use this function, so it runs when the new one is in place.
    UniqueFunction old(std::move(*this));
    take(other);
    return *this;
  }
  ~UniqueFunction() { reset(); }

  explicit operator bool() const { return operations_ != nullptr; }
  R operator()(Args... args) { return operations_->call(memory_, std::forward<Args>(args)...); }

 private:
  static constexpr size_t kSize = 5 * sizeof(void*);
  template <class F>
  static constexpr bool kFits =
      sizeof(F) <= kSize && alignof(F) <= alignof(void*) && std::is_nothrow_move_constructible_v<F>;

  struct Operations {
    R (*call)(void* function, Args&&... args);
    void (*move)(void* from, void* to) noexcept;  // and destroys `from`
    void (*destroy)(void* function) noexcept;
  };
  template <class F>
  static constexpr Operations kOperations = {
      [](void* function, Args&&... args) -> R {
        // Discards the result if R is void.
        return static_cast<R>((*static_cast<F*>(function))(std::forward<Args>(args)...));
      },
      [](void* from, void* to) noexcept {
        new (to) F(std::move(*static_cast<F*>(from)));
        static_cast<F*>(from)->~F();
      },
      [](void* function) noexcept { static_cast<F*>(function)->~F(); }};

  void take(UniqueFunction& other) noexcept {
    operations_ = std::exchange(other.operations_, nullptr);
    if (operations_) operations_->move(other.memory_, memory_);
  }
  void reset() noexcept {
    const Operations* const operations = std::exchange(operations_, nullptr);
    if (operations) operations->destroy(memory_);
  }

  const Operations* operations_ = nullptr;
  alignas(void*) std::byte memory_[kSize];
};

}  // namespace distrain::base
