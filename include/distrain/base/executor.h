#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "distrain/base/error.h"

namespace distrain::base {

template <class Signature>
class UniqueFunction;

/// A move-only std::function, for closures that own values that cannot be copied. Stores small
/// closures without an allocation, because each RPC creates several closures.
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
    // Destroy the old closure last, because its destructor may use this UniqueFunction.
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
    void (*move)(void* from, void* to) noexcept;  // constructs `to`, destroys `from`
    void (*destroy)(void* function) noexcept;
  };
  template <class F>
  static constexpr Operations kOperations = {
      [](void* function, Args&&... args) -> R {
        // The cast discards the result if R is void.
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

/// Device work that a thread has enqueued before it completed a future, and that may still run. A
/// thread that uses the future's value orders its own device work after this work.
class QueuedWork {
 public:
  virtual ~QueuedWork() = default;
  /// Orders the calling thread's later device work after this work. Does not block the thread.
  virtual void precede_this_thread() const noexcept = 0;
};
using QueuedWorkPtr = std::shared_ptr<const QueuedWork>;

/// A function that returns the device work that the calling thread has enqueued, or null if none.
using FindQueuedWork = QueuedWorkPtr (*)() noexcept;

namespace detail {
// Global, because a future has no pointer to an agent and all agents share the accelerators.
inline constinit std::atomic<FindQueuedWork> find_queued_work{nullptr};
}  // namespace detail

/// Sets the function that queued_work() calls. Called when a device is first used. Thread-safe.
inline void set_queued_work_finder(FindQueuedWork find) { detail::find_queued_work = find; }

/// Returns the device work that this thread has enqueued; null if no device is in use.
inline QueuedWorkPtr queued_work() {
  const FindQueuedWork find = detail::find_queued_work.load(std::memory_order_acquire);
  return find ? find() : nullptr;
}

using Task = UniqueFunction<void()>;

/// Returns a task that first orders its thread's device work after `work` and then runs `task`.
inline Task behind(QueuedWorkPtr work, Task task) {
  if (!work) return task;
  return [work = std::move(work), task = std::move(task)]() mutable {
    work->precede_this_thread();
    task();
    task = Task();
  };
}

/// Runs continuations and handlers. A future keeps the executor of its continuation alive until the
/// future is done, if a shared pointer owns that executor.
class Executor : public std::enable_shared_from_this<Executor> {
 public:
  virtual ~Executor() = default;
  /// Schedules `task` on a thread of this executor. Thread-safe; never throws.
  virtual void post(Task task) = 0;
  /// Schedules `task` and orders its device work after `work`, which computes a value for `task`.
  virtual void post_behind(QueuedWorkPtr work, Task task) {
    post(behind(std::move(work), std::move(task)));
  }

  /// Called when a continuation is registered. Returns a task that runs `task` with the autograd
  /// context and torch's thread-local state of the calling thread. By default, returns `task`.
  virtual Task bind(Task task) { return task; }
  /// Called in a catch block around a continuation. Returns the caught exception as an Error, whose
  /// kind is `otherwise` if the type of the exception does not determine a kind.
  virtual Error error_in_flight(ErrorKind otherwise) const { return current_error(otherwise); }
};

/// Runs each task inside post(). Use it only for tasks of a few instructions that take no lock.
class InlineExecutor final : public Executor {
 public:
  void post(Task task) override { task(); }
};

}  // namespace distrain::base
