#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/base/thread_pool.h"
#include "support/catch.h"

using namespace distrain::base;
using namespace std::chrono_literals;

namespace {

ThreadPool::Options options(int size, int cap = 512) { return {"pool", size, cap}; }

template <class F>
auto submit(ThreadPool& pool, F fn) {
  using T = std::invoke_result_t<F&>;
  Promise<T> promise;
  Future<T> future = promise.future();
  pool.post([promise = std::move(promise), fn = std::move(fn)]() mutable {
    try {
      if constexpr (std::is_void_v<T>) {
        fn();
        promise.set();
      } else {
        promise.set(fn());
      }
    } catch (...) {
      promise.fail(current_error(ErrorKind::kInternal));
    }
  });
  return future;
}

// Waits up to 20 s until the pool has `wanted` threads; returns its number of threads.
int settled_threads(const ThreadPool& pool, int wanted) {
  const TimePoint end = Clock::now() + 20s;
  while (pool.threads() != wanted && Clock::now() < end) std::this_thread::yield();
  return pool.threads();
}

}  // namespace

TEST_CASE("tasks start in the order of their posting") {
  std::vector<int> order;
  ThreadPool pool(options(1));
  for (int i = 0; i < 1000; ++i) pool.post([&order, i] { order.push_back(i); });
  pool.stop();
  REQUIRE(order.size() == 1000);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("threads start when needed, up to the size of the pool") {
  ThreadPool pool(options(3));
  CHECK(pool.threads() == 0);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::vector<Future<void>> futures;
  for (int i = 0; i < 500; ++i) {
    futures.push_back(submit(pool, [&] {
      std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    }));
  }
  wait_all(futures);
  CHECK(ids.size() <= 3);
  CHECK(pool.threads() <= 3);
}

TEST_CASE("as many tasks run at once as the pool's size") {
  ThreadPool pool(options(4));
  for (int round = 0; round < 100; ++round) {
    // The pool's threads do not exist yet, poll for their next task, are about to sleep, or sleep.
    if (round % 3 == 1) submit(pool, [] {}).wait();
    if (round % 3 == 2) std::this_thread::sleep_for(std::chrono::microseconds(20 * (round % 10)));
    std::atomic<int> here{0};
    std::vector<Future<void>> futures;
    for (int i = 0; i < 4; ++i) {
      futures.push_back(submit(pool, [&here] {
        ++here;
        while (here < 4) std::this_thread::yield();  // passes only if four threads run
      }));
    }
    wait_all(futures);
  }
}

TEST_CASE("the pool grows while tasks wait, and shrinks again") {
  ThreadPool pool(options(2));
  Promise<void> gate;
  const Future<void> opened = gate.future();
  std::vector<Future<void>> waiting;
  for (int i = 0; i < 20; ++i) waiting.push_back(submit(pool, [opened] { opened.wait(); }));
  // The pool runs another task while 20 tasks block.
  CHECK(submit(pool, [] { return 7; }).wait() == 7);
  CHECK(pool.threads() >= 21);
  gate.set();
  wait_all(waiting);
  CHECK(settled_threads(pool, 2) == 2);
  CHECK(submit(pool, [] { return 8; }).wait() == 8);
}

TEST_CASE("nested waits 64 deep do not deadlock a pool of one thread") {
  ThreadPool pool(options(1));
  std::function<int(int)> nest = [&](int depth) -> int {
    if (depth == 0) return 0;
    return 1 + submit(pool, [&nest, depth] { return nest(depth - 1); }).wait();
  };
  for (int round = 0; round < 3; ++round) {
    CHECK(submit(pool, [&nest] { return nest(64); }).wait() == 64);
  }
  CHECK(settled_threads(pool, 1) == 1);
}

TEST_CASE("a wait beyond the cap fails with overloaded, and the pool still works") {
  ThreadPool pool(options(1, 8));
  std::function<int(int)> nest = [&](int depth) -> int {
    if (depth == 0) return 0;
    return 1 + submit(pool, [&nest, depth] { return nest(depth - 1); }).wait();
  };
  CHECK(submit(pool, [&nest] { return nest(7); }).wait() == 7);
  const auto result = submit(pool, [&nest] { return nest(8); }).wait_result();
  REQUIRE_FALSE(result.ok());
  CHECK(result.error().kind == ErrorKind::kOverloaded);
  CHECK(result.error().message.find("8") != std::string::npos);
  CHECK(submit(pool, [&nest] { return nest(7); }).wait() == 7);
}

TEST_CASE("two pools that call each other do not deadlock") {
  ThreadPool a(options(1)), b(options(1));
  std::function<int(int)> bounce = [&](int depth) -> int {
    if (depth == 0) return 0;
    ThreadPool& next = depth % 2 == 0 ? a : b;
    return 1 + submit(next, [&bounce, depth] { return bounce(depth - 1); }).wait();
  };
  CHECK(bounce(40) == 40);
}

TEST_CASE("stop runs queued tasks; tasks that are posted later are dropped") {
  std::atomic<int> ran{0};
  auto dropped = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = dropped;
  ThreadPool pool(options(2));
  for (int i = 0; i < 200; ++i) {
    pool.post([&ran, &pool, i] {
      ++ran;
      if (i == 199) pool.post([] {});  // may be dropped, must not hang
    });
  }
  pool.stop();
  CHECK(ran == 200);
  pool.post([dropped, &ran] { ++ran; });
  dropped.reset();
  CHECK(watch.expired());
  CHECK(ran == 200);
  pool.stop();
  CHECK(pool.threads() == 0);
}

TEST_CASE("stop returns while tasks wait for queued tasks") {
  for (int round = 0; round < 20; ++round) {
    Promise<void> gate;
    const Future<void> opened = gate.future();
    std::vector<Future<void>> futures;
    {
      ThreadPool pool(options(1));
      for (int i = 0; i < 10; ++i) futures.push_back(submit(pool, [opened] { opened.wait(); }));
      futures.push_back(submit(pool, [&gate] { gate.set(); }));
    }
    wait_all(futures);
  }
}

TEST_CASE("a pool that never ran a task can be stopped") {
  ThreadPool pool(options(2));
  pool.stop();
}

TEST_CASE("a task's captures are destroyed before the next task, outside the pool's lock") {
  ThreadPool pool(options(1));
  struct PostsWhenDestroyed {
    ThreadPool& pool;
    std::atomic<int>& count;
    ~PostsWhenDestroyed() {
      pool.post([&count = count] { ++count; });
    }
  };
  std::atomic<int> count{0};
  pool.post([own = std::unique_ptr<PostsWhenDestroyed>(new PostsWhenDestroyed{pool, count})] {
    static_cast<void>(own);
  });
  submit(pool, [] {}).wait();
  const TimePoint end = Clock::now() + 20s;
  while (count == 0 && Clock::now() < end) std::this_thread::yield();
  CHECK(count == 1);
}

TEST_CASE("many threads post, wait and continue") {
  ThreadPool pool(options(3));
  constexpr int kThreads = 4, kTasks = 400;
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<Future<int>> futures;
      for (int i = 0; i < kTasks; ++i) {
        Future<int> first = submit(pool, [i] { return i; });
        if (i % 3 == 0) {
          futures.push_back(submit(pool, [first] { return first.wait(); }));
        } else {
          futures.push_back(first.then(pool, [](int n) { return n; }));
        }
        if (i % 50 == t) static_cast<void>(futures.back().wait());
      }
      for (const Future<int>& future : futures) sum += future.wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(sum == int64_t{kThreads} * kTasks * (kTasks - 1) / 2);
  CHECK(settled_threads(pool, 3) <= 3);
}
