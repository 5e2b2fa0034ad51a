#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/base/executor.h"
#include "distrain/base/queued_work.h"
#include "distrain/base/result.h"
#include "distrain/base/thread_state.h"

namespace distrain::base {

template <class T>
class Future;

namespace detail {

/// `void` is not a value: a Future<void> holds a Unit.
template <class T>
using Stored = std::conditional_t<std::is_void_v<T>, Unit, T>;

template <class T>
struct IsFuture : std::false_type {
  using Value = T;
};
template <class T>
struct IsFuture<Future<T>> : std::true_type {
  using Value = T;
};

/// The state shared by a promise and its futures. Written once; callbacks run outside the lock.
template <class V>
class FutureState {
 public:
  using Callback = UniqueFunction<void(Result<V>&)>;
  using OnCancel = UniqueFunction<void()>;

  bool ready() const { return ready_.load(std::memory_order_acquire); }

  /// False when it was completed before: the first one wins. The value is there when what this
  /// thread has given to devices is done.
  bool complete(Result<V> result) {
    QueuedWorkPtr before = result.ok() ? base::queued_work() : nullptr;
    return complete(std::move(result), std::move(before));
  }
  /// The same, for a value that is there when `before` is done.
  bool complete(Result<V> result, QueuedWorkPtr before) {
    OnCancel unneeded;
    return complete(std::move(result), std::move(before), unneeded, false);
  }

  /// What cancel() does to whoever is to bring the value.
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

  void cancel() {
    OnCancel tell;
    Error error{ErrorKind::kCancelled, "it was cancelled"};
    if (complete(std::move(error), nullptr, tell, true) && tell) tell();
  }

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

  /// False when `deadline` passed first.
  bool wait_until(TimePoint deadline) {
    if (ready()) return true;
    check_may_wait("Future::wait");
    if (thread_state().poll.poll([this] { return ready(); })) return true;
    BlockingScope blocking;
    std::unique_lock lock(mutex_);
    ++waiters_;
    const auto done = [this] { return result_.has_value(); };
    bool completed = true;
    if (deadline == kNever) {
      condition_.wait(lock, done);
    } else {
      completed = condition_.wait_until(lock, deadline, done);
    }
    --waiters_;
    return completed;
  }

  /// To be called when ready only.
  Result<V>& result() { return *result_; }
  /// The same, for use on this thread.
  Result<V>& use_result() {
    if (queued_work_) queued_work_->precede_this_thread();
    return *result_;
  }
  /// When ready: what has to be done before the value is there, mostly null.
  const QueuedWorkPtr& queued_work() const { return queued_work_; }

 private:
  /// Gives back what cancel() would have told, so that it is called, or dies, outside the lock.
  bool complete(Result<V> result, QueuedWorkPtr before, OnCancel& tell, bool cancelled) {
    std::vector<Callback> callbacks;
    bool wake = false;
    {
      std::lock_guard lock(mutex_);
      if (result_) return false;
      cancelled_ = cancelled;
      tell = std::move(on_cancel_);
      result_.emplace(std::move(result));
      queued_work_ = std::move(before);
      callbacks.swap(callbacks_);
      wake = waiters_ > 0;
      ready_.store(true, std::memory_order_release);
      // Notified under the lock: the last waiter may destroy this state right after it.
      if (wake) condition_.notify_all();
    }
    for (Callback& callback : callbacks) callback(*result_);
    return true;
  }

  std::atomic<bool> ready_{false};
  std::mutex mutex_;
  std::condition_variable condition_;
  int waiters_ = 0;
  std::optional<Result<V>> result_;
  QueuedWorkPtr queued_work_;  // written before ready_
  std::vector<Callback> callbacks_;
  OnCancel on_cancel_;
  bool cancelled_ = false;  // by cancel()
};

}  // namespace detail

/// A value that another thread will bring, or an error. A handle: copies share it. Thread-safe.
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

  /// Blocks until there is a result; throws `Exception` with its error, if it is one.
  /// Never call it on the loop thread (checked: fatal). On a pool thread the pool grows meanwhile.
  T wait() const {
    state_->wait_until(kNever);
    return static_cast<T>(state_->use_result().value());
  }

  /// As wait(), but moves the value out: for one owner, once.
  Stored take() const {
    state_->wait_until(kNever);
    return std::move(state_->use_result().value());
  }

  /// Blocks until there is a result and gives it back, error or not.
  const Result<Stored>& wait_result() const {
    state_->wait_until(kNever);
    return state_->use_result();
  }

  /// False when `deadline` passed first; the future stays usable.
  bool wait_until(TimePoint deadline) const { return state_->wait_until(deadline); }

  /// Nobody wants the value any more: unless it is there, this and all copies fail with
  /// `cancelled`, and what was to bring it is told, as is what this one was made from by then(). A
  /// remote call that has not begun is not run; one that runs is not ended.
  void cancel() const { state_->cancel(); }

  /// The same value for one of several who wait for it: its cancel() leaves this one as it is.
  Future shared() const {
    auto state = std::make_shared<detail::FutureState<Stored>>();
    state_->on_ready([state, source = state_.get()](Result<Stored>& result) {
      state->complete(result, source->queued_work());
    });
    return Future(std::move(state));
  }

  /// Calls `fn(Result<Stored>&)` on `executor` once there is a result, with the thread-local state
  /// of the thread that calls this (see Executor::bind).
  template <class F>
  void on_complete(Executor& executor, F fn) const {
    auto state = state_;
    Task task = executor.bind([state, fn = std::move(fn)]() mutable { fn(state->result()); });
    state_->on_ready([&executor, kept = executor.weak_from_this().lock(), state = state.get(),
                      task = std::move(task)](auto&) mutable {
      executor.post_behind(state->queued_work(), std::move(task));
    });
  }

  /// The future of `fn(value)`, also if `fn` returns a Future; an error goes past `fn`.
  template <class F>
  auto then(Executor& executor, F fn) const;

  const std::shared_ptr<detail::FutureState<Stored>>& state() const { return state_; }

 private:
  std::shared_ptr<detail::FutureState<Stored>> state_;
};

/// The writing end. A promise that is destroyed unfulfilled fails its futures with `cancelled`.
template <class T>
class Promise {
 public:
  using Stored = detail::Stored<T>;

  Promise() : state_(std::make_shared<detail::FutureState<Stored>>()) {}
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&& other) noexcept {
    abandon();
    state_ = std::move(other.state_);
    return *this;
  }
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;
  ~Promise() { abandon(); }

  Future<T> future() const { return Future<T>(state_); }

  /// Each gives back false when the promise had been completed before. The promise may be destroyed
  /// as soon as its future is done, even while the call is still returning on another thread.
  bool set(Stored value) { return complete(Result<Stored>(std::move(value))); }
  bool set() requires std::is_void_v<T> { return set(Unit{}); }
  bool fail(Error error) { return complete(Result<Stored>(std::move(error))); }
  bool complete(Result<Stored> result) {
    const auto state = state_;  // ours may be gone before the callbacks have run
    return state->complete(std::move(result));
  }
  /// For the value of another future, which is there when `before` is done.
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
auto Future<T>::then(Executor& executor, F fn) const {
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

  auto promise = std::make_shared<Promise<U>>();
  Future<U> future = promise->future();
  auto state = state_;
  future.state()->on_cancel([source = std::weak_ptr(state_)] {
    if (const auto known = source.lock()) known->cancel();
  });
  Task task = executor.bind([state, promise, &executor, fn = std::move(fn), call]() mutable {
    Result<Stored>& result = state->result();
    // Told already, or cancelled; `fn` only dies here.
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
    // An error does not wait for a thread of the executor: all of them may be waiting for it.
    if (!result.ok()) promise->fail(result.error());
    executor.post_behind(state->queued_work(), std::move(task));
  });
  return future;
}

/// Returns when all have a value; throws as soon as one has failed, the first to do so: one that
/// fails may be what the others would wait for.
template <class T>
void wait_all(std::span<const Future<T>> futures) {
  if (futures.size() == 1) return static_cast<void>(futures[0].wait_result().value());
  if (futures.empty()) return;
  struct Shared {
    std::atomic<size_t> left;
    Promise<void> done;
  };
  const auto shared = std::make_shared<Shared>();
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
