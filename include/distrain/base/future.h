#pragma once

#include <atomic>
#include <concepts>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "distrain/base/executor.h"
#include "distrain/base/thread_state.h"

namespace distrain::base {

template <class T>
class Future;

namespace detail {

/// The type that a future stores: Unit for a Future<void>, else `T`.
template <class T>
using Stored = std::conditional_t<std::is_void_v<T>, Unit, T>;

/// True if `F` can be called with the value of a Future<T>.
template <class F, class T>
concept Continues = (std::is_void_v<T> && std::invocable<F&>) || std::invocable<F&, Stored<T>&>;

template <class T>
struct IsFuture : std::false_type {
  using Value = T;
};
template <class T>
struct IsFuture<Future<T>> : std::true_type {
  using Value = T;
};

/// The state shared by a promise and its futures. The result is set once. Callers hold a reference
/// to the state, because a thread that waits may drop the last other one.
template <class V>
class FutureState {
 public:
  using Callback = UniqueFunction<void(Result<V>&)>;
  using OnCancel = UniqueFunction<void()>;

  /// A thread that polls for the result runs `loop`, which receives the result.
  explicit FutureState(EventLoopPtr loop = nullptr) : loop_(std::move(loop)) {}
  const EventLoopPtr& loop() const { return loop_; }

  bool ready() const { return ready_.load(std::memory_order_acquire); }
  /// Completes the future and returns true; returns false if the future is already complete. A
  /// value becomes valid when the device work that this thread has enqueued so far is done.
  bool complete(Result<V> result) {
    QueuedWorkPtr before = result.ok() ? base::queued_work() : nullptr;
    return complete(std::move(result), std::move(before));
  }
  /// Completes the future with a value that becomes valid when `before` is done. If `cancelled`,
  /// also stops the producer.
  bool complete(Result<V> result, QueuedWorkPtr before, bool cancelled = false) {
    std::vector<Callback> callbacks;
    OnCancel tell;  // called and destroyed without the lock
    {
      std::lock_guard lock(mutex_);
      if (result_) return false;
      cancelled_ = cancelled;
      tell = std::move(on_cancel_);
      result_.emplace(std::move(result));
      queued_work_ = std::move(before);
      callbacks.swap(callbacks_);
      ready_.store(true, std::memory_order_release);
    }
    condition_.notify_all();  // without the lock, for which a woken thread would wait again
    for (Callback& callback : callbacks) callback(*result_);
    if (cancelled && tell) tell();
    return true;
  }

  /// Sets `tell`, which cancel() calls to stop the producer. Calls `tell` now if already cancelled.
  void on_cancel(OnCancel tell) {
    {
      std::lock_guard lock(mutex_);
      if (!result_) {
        on_cancel_ = std::move(tell);
        return;
      }
      if (!cancelled_) return;
    }
    tell();
  }

  void cancel() { complete(Error{ErrorKind::kCancelled, "it was cancelled"}, nullptr, true); }

  void on_ready(Callback callback) {
    {
      std::lock_guard lock(mutex_);
      if (!result_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback(*result_);
  }

  /// Blocks until the future is done; returns false if `deadline` passes first.
  bool wait_until(TimePoint deadline) {
    if (ready()) return true;
    check_may_wait("Future::wait");
    if (thread_state().poll.poll([this] { return ready(); }, loop_.get())) return true;
    BlockingScope blocking;
    std::unique_lock lock(mutex_);
    return base::wait_until(condition_, lock, deadline, [this] { return result_.has_value(); });
  }

  // The following functions may be called only if ready().

  Result<V>& result() { return *result_; }
  /// Returns the result. Device work that this thread enqueues later waits for queued_work().
  Result<V>& use_result() {
    if (queued_work_) queued_work_->precede_this_thread();
    return *result_;
  }
  /// Returns the device work that produces the value; null for most values.
  const QueuedWorkPtr& queued_work() const { return queued_work_; }

 private:
  const EventLoopPtr loop_;
  std::atomic<bool> ready_{false};
  std::mutex mutex_;
  std::condition_variable condition_;
  std::optional<Result<V>> result_;
  QueuedWorkPtr queued_work_;  // written before ready_ is set
  std::vector<Callback> callbacks_;
  OnCancel on_cancel_;
  bool cancelled_ = false;  // true if cancel() completed the future
};

}  // namespace detail

/// A value, or an error, that another thread will produce. Copies share one state. Thread-safe.
template <class T>
class [[nodiscard]] Future {
 public:
  using Stored = detail::Stored<T>;

  Future() = default;
  explicit Future(std::shared_ptr<detail::FutureState<Stored>> state) : state_(std::move(state)) {}

  static Future ready(Stored value) { return from_result(Result<Stored>(std::move(value))); }
  static Future failed(Error error) { return from_result(Result<Stored>(std::move(error))); }
  static Future from_result(Result<Stored> result) {
    auto state = std::make_shared<detail::FutureState<Stored>>();
    state->complete(std::move(result));
    return Future(std::move(state));
  }

  bool valid() const { return state_ != nullptr; }
  bool done() const { return state_->ready(); }
  /// Blocks until the future is done and returns its value; throws `Exception` if it has an error.
  /// Aborts the process if called on the loop thread. A thread pool grows while its threads wait.
  T wait() const { return static_cast<T>(wait_for_use().value()); }
  /// Waits as wait() does, then moves the value out. Nothing else may read the value.
  Stored take() const { return std::move(wait_for_use().value()); }
  /// Blocks until the future is done and returns its result, a value or an error.
  const Result<Stored>& wait_result() const { return wait_for_use(); }
  /// Blocks until the future is done; returns false if `deadline` passes first.
  bool wait_until(TimePoint deadline) const { return state_->wait_until(deadline); }
  /// Fails this future and its copies with `cancelled` unless they are done, and notifies the
  /// producer of the value. If then() made this future, also cancels the source future. A remote
  /// call that has not begun is not run; a remote call that is running is not interrupted.
  void cancel() const { state_->cancel(); }
  /// Returns a future of the same value whose cancel() does not cancel this future.
  Future shared() const {
    auto state = std::make_shared<detail::FutureState<Stored>>(state_->loop());
    state_->on_ready([state, source = state_.get()](Result<Stored>& result) {
      state->complete(result, source->queued_work());
    });
    return Future(std::move(state));
  }

  /// Calls `fn(Result<Stored>&)` on `executor` when the future is done, with the thread-local state
  /// of the thread that calls on_complete() (see Executor::bind).
  template <class F>
  void on_complete(Executor& executor, F fn) const {
    auto state = state_;
    Task task = executor.bind([state, fn = std::move(fn)]() mutable { fn(state->result()); });
    state_->on_ready([&executor, kept = executor.weak_from_this().lock(), state = state.get(),
                      task = std::move(task)](auto&) mutable {
      executor.post_behind(state->queued_work(), std::move(task));
    });
  }

  /// Calls `fn(value)` on `executor` when this future has its value. Returns a future of the result
  /// (flattened if `fn` returns a Future). If this future fails, passes on its error without `fn`.
  template <class F>
  auto then(Executor& executor, F fn) const requires detail::Continues<F, T>;

  const std::shared_ptr<detail::FutureState<Stored>>& state() const { return state_; }

 private:
  Result<Stored>& wait_for_use() const {
    state_->wait_until(kNever);
    return state_->use_result();
  }

  std::shared_ptr<detail::FutureState<Stored>> state_;
};

/// The producer's end of a Future. If destroyed while incomplete, fails the Future (`cancelled`).
template <class T>
class Promise {
 public:
  using Stored = detail::Stored<T>;

  Promise() : Promise(nullptr) {}
  /// A thread that polls for the value runs `loop`, which receives the value.
  explicit Promise(EventLoopPtr loop)
      : state_(std::make_shared<detail::FutureState<Stored>>(std::move(loop))) {}
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&& other) noexcept {
    abandon();
    state_ = std::move(other.state_);
    return *this;
  }
  ~Promise() { abandon(); }

  Future<T> future() const { return Future<T>(state_); }
  /// set(), fail() and complete() return false if the promise is already complete. Another thread
  /// may destroy the promise as soon as the future is done, even before the call has returned.
  bool set(Stored value) { return complete(Result<Stored>(std::move(value))); }
  bool set() requires std::is_void_v<T> { return set(Unit{}); }
  bool fail(Error error) { return complete(Result<Stored>(std::move(error))); }
  bool complete(Result<Stored> result) {
    const auto state = state_;  // a copy, because this promise may be destroyed now
    return state->complete(std::move(result));
  }
  /// Completes the promise with another future's value, which becomes valid when `before` is done.
  bool complete(Result<Stored> result, QueuedWorkPtr before) {
    const auto state = state_;
    return state->complete(std::move(result), std::move(before));
  }

 private:
  void abandon() {
    if (state_ && !state_->ready()) {
      fail(Error{ErrorKind::kCancelled, "the operation was abandoned"});
    }
  }

  std::shared_ptr<detail::FutureState<Stored>> state_;
};

template <class T>
template <class F>
auto Future<T>::then(Executor& executor, F fn) const requires detail::Continues<F, T> {
  constexpr auto call = [](F& f, Stored& value) -> decltype(auto) {
    if constexpr (std::is_void_v<T>) {
      static_cast<void>(value);
      return f();
    } else {
      return f(value);
    }
  };
  using Returned = detail::IsFuture<std::decay_t<decltype(call(fn, std::declval<Stored&>()))>>;
  using U = typename Returned::Value;
  constexpr bool kNested = Returned::value;

  auto promise = std::make_shared<Promise<U>>(state_->loop());
  Future<U> future = promise->future();
  auto state = state_;
  future.state()->on_cancel([source = std::weak_ptr(state_)] {
    if (const auto known = source.lock()) known->cancel();
  });
  Task task = executor.bind([state, promise, &executor, fn = std::move(fn), call]() mutable {
    Result<Stored>& result = state->result();
    // Skip `fn` if the source future failed, or if the new future is done, for example cancelled.
    if (!result.ok() || promise->future().done()) return;
    try {
      if constexpr (kNested) {
        auto inner = call(fn, result.unchecked());
        promise->future().state()->on_cancel([inner = std::weak_ptr(inner.state())] {
          if (const auto known = inner.lock()) known->cancel();
        });
        inner.state()->on_ready([promise, state = inner.state().get()](auto& r) {
          promise->complete(r, state->queued_work());
        });
      } else if constexpr (std::is_void_v<U>) {
        call(fn, result.unchecked());
        promise->set();
      } else {
        promise->set(call(fn, result.unchecked()));
      }
    } catch (...) {
      promise->fail(executor.error_in_flight(ErrorKind::kInternal));
    }
  });
  state_->on_ready([&executor, kept = executor.weak_from_this().lock(), promise,
                    state = state_.get(), task = std::move(task)](Result<Stored>& result) mutable {
    // Fail the new future here, because all threads of `executor` may be waiting for that future.
    if (!result.ok()) promise->fail(result.error());
    executor.post_behind(state->queued_work(), std::move(task));
  });
  return future;
}

/// Blocks until all futures have values. If a future fails, throws its error at once, because the
/// other futures may depend on the failed operation and never be done.
template <class T>
void wait_all(std::span<const Future<T>> futures) {
  if (futures.size() == 1) return static_cast<void>(futures[0].wait_result().value());
  if (futures.empty()) return;
  struct Shared {
    explicit Shared(EventLoopPtr loop) : done(std::move(loop)) {}
    std::atomic<size_t> left;
    Promise<void> done;
  };
  const auto shared = std::make_shared<Shared>(futures[0].state()->loop());
  shared->left = futures.size();
  for (const Future<T>& future : futures) {
    future.state()->on_ready([shared](auto& result) {
      if (!result.ok()) {
        shared->done.fail(result.error());
      } else if (shared->left.fetch_sub(1) == 1) {
        shared->done.set();
      }
    });
  }
  shared->done.future().wait();
}
template <class T>
void wait_all(const std::vector<Future<T>>& futures) {
  wait_all(std::span<const Future<T>>(futures));
}

}  // namespace distrain::base
