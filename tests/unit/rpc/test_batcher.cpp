#include <atomic>
#include <thread>

#include "distrain/base/thread_pool.h"
#include "distrain/rpc/batcher.h"
#include "support/catch.h"

using namespace distrain;
using base::Future;
using rpc::Batcher;

namespace {

using Squares = Batcher<int, int>;

std::vector<int> squares(const std::vector<int>& numbers) {
  std::vector<int> answers;
  for (const int number : numbers) answers.push_back(number * number);
  return answers;
}

}  // namespace

TEST_CASE("a single request is answered at once") {
  base::ThreadPool pool({});
  const auto asker = std::this_thread::get_id();
  Squares batcher(pool, [&](const std::vector<int>& numbers) {
    CHECK(std::this_thread::get_id() == asker);
    CHECK(numbers.size() == 1);
    return squares(numbers);
  });
  for (int i = 0; i < 10; ++i) {
    const Future<int> answer = batcher.ask(i);
    CHECK(answer.done());
    CHECK(answer.wait() == i * i);
  }
  CHECK(pool.threads() == 0);
}

TEST_CASE("requests that arrive during a pass are all answered by the next one") {
  base::ThreadPool pool({});
  base::Promise<void> go, running;
  std::vector<size_t> sizes;
  Squares batcher(pool, [&](const std::vector<int>& numbers) {
    if (sizes.empty()) {
      running.set();
      go.future().wait();
    }
    sizes.push_back(numbers.size());
    return squares(numbers);
  });
  std::thread first([&] { CHECK(batcher.ask(1).wait() == 1); });
  running.future().wait();
  std::vector<Future<int>> answers;
  for (int i = 2; i < 10; ++i) answers.push_back(batcher.ask(i));
  for (const auto& answer : answers) CHECK_FALSE(answer.done());
  go.set();
  first.join();
  for (int i = 2; i < 10; ++i) CHECK(answers[static_cast<size_t>(i - 2)].wait() == i * i);
  CHECK(sizes == std::vector<size_t>{1, 8});
}

TEST_CASE("many threads get their own answers, with one pass at a time") {
  constexpr int kThreads = 8, kAsks = 3000;
  base::ThreadPool pool({});
  std::atomic<int> inside{0}, wrong{0}, asked{0};
  Squares batcher(pool, [&](const std::vector<int>& numbers) {
    if (++inside != 1 || numbers.empty() || numbers.size() > kThreads) ++wrong;
    asked += static_cast<int>(numbers.size());
    auto answers = squares(numbers);
    --inside;
    return answers;
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kAsks; ++i) {
        const int number = (t * kAsks + i) % 40000;
        if (batcher.ask(number).wait() != number * number) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(asked == kThreads * kAsks);
}

namespace {

class DroppingExecutor final : public base::Executor {
 public:
  void post(base::Task) override { ++dropped; }
  int dropped = 0;
};

/// A batcher whose first batch does not complete before the test sets `go`.
struct HeldBatcher {
  explicit HeldBatcher(base::Executor& executor)
      : batcher(executor, [this](const std::vector<int>& numbers) {
          if (first_pass.exchange(false)) {
            running.set();
            go.future().wait();
          }
          if (numbers[0] < 0) throw base::Exception(base::ErrorKind::kInvalid, "below 0");
          return squares(numbers);
        }) {}

  std::atomic<bool> first_pass{true};
  base::Promise<void> go, running;
  Squares batcher;
};

}  // namespace

TEST_CASE("a pass that an executor drops cancels its waiting requests, and the next pass works") {
  DroppingExecutor executor;
  HeldBatcher held(executor);
  std::thread first([&] { CHECK(held.batcher.ask(2).wait() == 4); });
  held.running.future().wait();
  const Future<int> waiting[] = {held.batcher.ask(3), held.batcher.ask(4)};
  held.go.set();
  first.join();
  CHECK(executor.dropped == 1);
  for (const auto& answer : waiting) {
    REQUIRE(answer.done());
    CHECK(answer.wait_result().error().kind == base::ErrorKind::kCancelled);
  }
  CHECK(held.batcher.ask(5).wait() == 25);
}

TEST_CASE("a pass that throws has ended before its requests fail") {
  base::ThreadPool pool({});
  base::InlineExecutor at_once;
  HeldBatcher held(pool);
  std::thread first([&] { CHECK(held.batcher.ask(2).wait() == 4); });
  held.running.future().wait();
  const Future<int> bad = held.batcher.ask(-1);
  base::Promise<int> next;
  const Future<int> answered_at_once = next.future();
  bad.on_complete(at_once, [&](base::Result<int>&) {
    const Future<int> answer = held.batcher.ask(3);
    next.set(answer.done() ? answer.wait() : -1);
  });
  held.go.set();
  first.join();
  CHECK(answered_at_once.wait() == 9);
  CHECK(bad.wait_result().error().kind == base::ErrorKind::kInvalid);
}

TEST_CASE("a pass that throws fails its own requests, and the next pass works") {
  base::ThreadPool pool({});
  Squares batcher(pool, [&](const std::vector<int>& numbers) {
    if (numbers[0] < 0) throw base::Exception(base::ErrorKind::kInvalid, "below 0");
    return squares(numbers);
  });
  CHECK(batcher.ask(-1).wait_result().error().kind == base::ErrorKind::kInvalid);
  CHECK(batcher.ask(3).wait() == 9);
}
