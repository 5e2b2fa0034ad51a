#include <atomic>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "distrain/base/future.h"
#include "support/catch.h"

using namespace distrain::base;
using namespace std::chrono_literals;

namespace {

Error some_error(const std::string& text) { return Error{ErrorKind::kBadData, text, 2, "op"}; }

template <class T>
ErrorKind error_kind(const Future<T>& future) {
  const auto& result = future.wait_result();
  return result.ok() ? ErrorKind{} : result.error().kind;
}

// Keeps posted tasks until run_all() is called, and counts the calls to bind().
class ManualExecutor final : public Executor {
 public:
  void post(Task task) override { tasks.push_back(std::move(task)); }
  Task bind(Task task) override {
    ++bound;
    return task;
  }
  void run_all() {
    while (!tasks.empty()) {
      std::vector<Task> now;
      now.swap(tasks);
      for (Task& task : now) task();
    }
  }
  std::vector<Task> tasks;
  int bound = 0;
};

InlineExecutor at_once;

}  // namespace

TEST_CASE("a promise passes a value to its future") {
  Promise<int> promise;
  const Future<int> future = promise.future();
  CHECK(future.valid());
  CHECK_FALSE(Future<int>().valid());
  CHECK_FALSE(future.done());
  CHECK(promise.set(3));
  CHECK(future.done());
  CHECK(future.wait() == 3);
  CHECK(future.wait() == 3);
}

TEST_CASE("a promise passes an error to its future") {
  Promise<void> promise;
  promise.fail(some_error("broken"));
  try {
    promise.future().wait();
    FAIL("no exception");
  } catch (const Exception& e) {
    CHECK(e.kind() == ErrorKind::kBadData);
    CHECK(e.error().rank == 2);
    CHECK(std::string(e.what()) == "broken");
  }
}

TEST_CASE("the first completion wins") {
  Promise<int> promise;
  CHECK(promise.set(1));
  CHECK_FALSE(promise.set(2));
  CHECK_FALSE(promise.fail(some_error("late")));
  CHECK(promise.future().wait() == 1);

  Promise<int> failed;
  CHECK(failed.fail(some_error("first")));
  CHECK_FALSE(failed.complete(Result<int>(4)));
  CHECK(error_kind(failed.future()) == ErrorKind::kBadData);
}

TEST_CASE("an abandoned promise fails its futures with cancelled") {
  Future<int> future;
  {
    Promise<int> promise;
    future = promise.future();
  }
  CHECK(error_kind(future) == ErrorKind::kCancelled);

  Promise<int> first;
  const Future<int> of_first = first.future();
  first = Promise<int>();  // assignment abandons the old promise, too
  CHECK(error_kind(of_first) == ErrorKind::kCancelled);

  Promise<int> moved = std::move(first);
  const Future<int> of_moved = moved.future();
  first = Promise<int>();
  CHECK_FALSE(of_moved.done());
  moved.set(1);
  CHECK(of_moved.wait() == 1);
}

TEST_CASE("take moves the value out") {
  Promise<std::unique_ptr<int>> promise;
  promise.set(std::make_unique<int>(9));
  CHECK(*promise.future().take() == 9);
}

TEST_CASE("futures may be created ready or failed") {
  CHECK(Future<int>::ready(4).wait() == 4);
  CHECK(error_kind(Future<int>::failed(some_error("x"))) == ErrorKind::kBadData);
  CHECK(Future<void>::ready({}).done());
}

TEST_CASE("wait_until returns at its deadline and leaves the future usable") {
  Promise<int> promise;
  const Future<int> future = promise.future();
  const TimePoint start = Clock::now();
  CHECK_FALSE(future.wait_until(start + 5ms));
  CHECK(Clock::now() >= start + 5ms);
  CHECK_FALSE(future.wait_until(start - 1h));
  promise.set(1);
  CHECK(future.wait_until(start - 1h));  // a completed future ignores the deadline
  CHECK(future.wait_until(kNever));
}

TEST_CASE("then returns a future of the function's result") {
  Promise<int> promise;
  const Future<std::string> text =
      promise.future().then(at_once, [](int& n) { return std::to_string(n); });
  const Future<void> nothing = promise.future().then(at_once, [](int) {});
  CHECK_FALSE(text.done());
  promise.set(12);
  CHECK(text.wait() == "12");
  nothing.wait();
  // then() also works on a future that is complete already.
  CHECK(promise.future().then(at_once, [](int n) { return n * 2; }).wait() == 24);
  CHECK(Future<void>::ready({}).then(at_once, [] { return 5; }).wait() == 5);
}

TEST_CASE("then runs on the executor that was bound at its registration") {
  ManualExecutor executor;
  Promise<int> promise;
  const Future<int> future = promise.future().then(executor, [](int n) { return n + 1; });
  CHECK(executor.bound == 1);
  promise.set(1);
  CHECK(executor.tasks.size() == 1);
  CHECK_FALSE(future.done());
  executor.run_all();
  CHECK(future.wait() == 2);
}

TEST_CASE("a continuation that the executor drops is cancelled") {
  ManualExecutor executor;
  Promise<int> promise;
  const Future<int> future = promise.future().then(executor, [](int n) { return n; });
  promise.set(1);
  executor.tasks.clear();
  CHECK(error_kind(future) == ErrorKind::kCancelled);
}

TEST_CASE("errors skip then, and exceptions become errors") {
  int calls = 0;
  const auto count = [&calls](int n) {
    ++calls;
    return n;
  };
  const Future<int> past =
      Future<int>::failed(some_error("x")).then(at_once, count).then(at_once, count);
  CHECK(error_kind(past) == ErrorKind::kBadData);
  CHECK(past.wait_result().error().op == "op");
  CHECK(calls == 0);

  const Future<int> thrown = Future<int>::ready(1).then(
      at_once, [](int) -> int { throw Exception(some_error("thrown")); });
  CHECK(error_kind(thrown) == ErrorKind::kBadData);
  const Future<int> other =
      Future<int>::ready(1).then(at_once, [](int) -> int { throw std::runtime_error("y"); });
  CHECK(error_kind(other) == ErrorKind::kInternal);
}

TEST_CASE("a nested future is unwrapped") {
  Promise<int> outer;
  Promise<std::string> inner;
  const Future<std::string> future =
      outer.future().then(at_once, [&inner](int) { return inner.future(); });
  outer.set(1);
  CHECK_FALSE(future.done());
  inner.set("deep");
  CHECK(future.wait() == "deep");

  const Future<void> failed = Future<int>::ready(1).then(
      at_once, [](int) { return Future<void>::failed(some_error("inner")); });
  CHECK(error_kind(failed) == ErrorKind::kBadData);

  const Future<int> abandoned =
      Future<int>::ready(1).then(at_once, [](int) { return Promise<int>().future(); });
  CHECK(error_kind(abandoned) == ErrorKind::kCancelled);
}

TEST_CASE("a long chain of continuations does not overflow the stack") {
  Promise<int> promise;
  Future<int> future = promise.future();
  for (int i = 0; i < 1000; ++i) future = future.then(at_once, [](int n) { return n + 1; });
  promise.set(0);
  CHECK(future.wait() == 1000);
}

TEST_CASE("a completed future holds no state of its continuations") {
  auto captured = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = captured;
  Promise<int> promise;
  promise.future().on_complete(at_once, [captured](Result<int>&) {});
  captured.reset();
  CHECK_FALSE(watch.expired());
  promise.set(1);
  CHECK(watch.expired());
}

TEST_CASE("wait_all throws the first error without waiting for the other futures") {
  std::vector<Promise<int>> promises(3);
  std::vector<Future<int>> futures;
  for (const auto& promise : promises) futures.push_back(promise.future());
  std::thread other([&promises] { promises[2].fail(some_error("third")); });
  try {
    wait_all(futures);
    FAIL("no exception");
  } catch (const Exception& e) {
    CHECK(std::string(e.what()) == "third");
    CHECK_FALSE(futures[0].done());
    CHECK_FALSE(futures[1].done());
  }
  other.join();
  promises[1].fail(some_error("second"));  // ignored by the wait_all() above
  promises[0].set(1);
  wait_all(std::vector{futures[0], Future<int>::ready(2)});
  wait_all(std::vector<Future<int>>{});
}

TEST_CASE("callbacks registered while the promise is being set run exactly once each") {
  constexpr int kThreads = 4, kRounds = 200, kCallbacks = 8;
  for (int round = 0; round < kRounds; ++round) {
    Promise<int> promise;
    const Future<int> future = promise.future();
    std::atomic<int> calls{0}, sum{0}, won{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kCallbacks; ++i) {
          future.on_complete(at_once, [&](Result<int>& r) {
            ++calls;
            sum += r.value();
          });
          if (i == t) won += promise.set(t + 1) ? 1 : 0;
        }
      });
    }
    const int value = future.wait();
    for (std::thread& thread : threads) thread.join();
    REQUIRE(won == 1);
    REQUIRE(calls == kThreads * kCallbacks);
    REQUIRE(sum == kThreads * kCallbacks * value);
  }
}

TEST_CASE("many waiters on many threads all wake up") {
  for (int round = 0; round < 50; ++round) {
    Promise<std::string> promise;
    std::atomic<int> right{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&right, future = promise.future(), t] {
        if (t % 2 == 0) {
          right += future.wait() == "here";
        } else {
          right += future.wait_until(Clock::now() + 60s);
        }
      });
    }
    promise.set("here");
    for (std::thread& thread : threads) thread.join();
    REQUIRE(right == 8);
  }
}

// The waiter may destroy the promise as soon as it sees the value, while set() is still returning.
TEST_CASE("a promise may be destroyed as soon as its future is complete") {
  std::atomic<Promise<int>*> mailbox{nullptr};
  constexpr int kRounds = 3000;
  std::thread setter([&mailbox] {
    for (int i = 0; i < kRounds; ++i) {
      Promise<int>* promise = nullptr;
      while (!(promise = mailbox.exchange(nullptr))) sched_yield();
      promise->set(i);
    }
  });
  bool right = true;
  for (int i = 0; i < kRounds; ++i) {
    auto promise = std::make_unique<Promise<int>>();
    mailbox = promise.get();
    right &= promise->future().wait() == i;
  }
  setter.join();
  CHECK(right);
}

TEST_CASE("a blocking wait notifies its observer, a wait on a completed future does not") {
  struct Observer final : BlockObserver {
    void on_block() override { ++blocks; }
    void on_unblock() override { ++unblocks; }
    int blocks = 0, unblocks = 0;
  } observer;
  thread_state().observer = &observer;
  static_cast<void>(Future<int>::ready(1).wait());
  CHECK(observer.blocks == 0);
  Promise<int> promise;
  CHECK_FALSE(promise.future().wait_until(Clock::now() + 1ms));
  CHECK(observer.blocks == 1);
  CHECK(observer.unblocks == 1);

  struct Refusing final : BlockObserver {
    void on_block() override { throw Exception(ErrorKind::kOverloaded, "full"); }
    void on_unblock() override { ++unblocks; }
    int unblocks = 0;
  } refusing;
  thread_state().observer = &refusing;
  CHECK_THROWS_AS(promise.future().wait(), Exception);
  CHECK(refusing.unblocks == 0);
  thread_state().observer = nullptr;
}

TEST_CASE("waiting on a thread that must not wait aborts the process") {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);  // Catch2's handler would report to the test's output
    ::close(STDERR_FILENO);         // hides the expected message
    thread_state().must_not_wait = true;
    static_cast<void>(
        Future<int>::ready(1).wait());  // allowed, because a completed future needs no waiting
    Promise<int> promise;
    static_cast<void>(promise.future().wait_until(Clock::now() + 1ms));
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGABRT);
}

TEST_CASE("the producer is notified once that nobody wants its value") {
  for (int round = 0; round < 2000; ++round) {
    Promise<int> promise;
    const Future<int> future = promise.future();
    std::atomic<int> told{0};
    future.state()->on_cancel([&] { ++told; });
    std::thread other([&] { future.cancel(); });
    future.cancel();
    other.join();
    REQUIRE(told == 1);
    REQUIRE(error_kind(future) == ErrorKind::kCancelled);
  }
}

TEST_CASE("a cancellation reaches the future that a continuation returned") {
  InlineExecutor executor;
  for (const bool is_late : {false, true}) {
    CAPTURE(is_late);
    Promise<int> first, second;
    bool told = false;
    second.future().state()->on_cancel([&] { told = true; });
    std::optional<Future<int>> both;
    const auto next = [&](int) {
      if (is_late) both->cancel();  // while the continuation runs
      return second.future();
    };
    both = first.future().then(executor, next);
    first.set(1);
    if (!is_late) both->cancel();
    CHECK(told);
    CHECK(error_kind(*both) == ErrorKind::kCancelled);
  }
}

TEST_CASE("a continuation of a cancelled future does not run") {
  ManualExecutor executor;
  Promise<int> first;
  bool ran = false;
  const Future<int> next = first.future().then(executor, [&](int value) {
    ran = true;
    return value;
  });
  first.set(1);
  next.cancel();
  for (Task& task : executor.tasks) task();
  CHECK_FALSE(ran);
}
