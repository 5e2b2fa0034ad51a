#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/base/thread_pool.h"
#include "support/catch.h"

using namespace distrain;

TEST_CASE("a serial thread runs tasks in order, including tasks that block") {
  base::Promise<void> gate;
  std::vector<int> order;
  {
    base::SerialThread thread("test");
    CHECK(thread.idle());
    thread.post([&, opened = gate.future()] {
      opened.wait();
      order.push_back(0);
    });
    for (int i = 1; i < 100; ++i) thread.post([&, i] { order.push_back(i); });
    CHECK_FALSE(thread.idle());
    gate.set();
  }
  CHECK(order.size() == 100);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("a serial thread that is released by its own task runs the queued tasks and ends") {
  auto thread = std::make_shared<base::SerialThread>("test");
  const std::weak_ptr<base::SerialThread> watch = thread;
  base::Promise<void> gate;
  base::Promise<bool> ended;
  std::vector<int> order;
  thread->post([&, opened = gate.future(), last = thread]() mutable {
    opened.wait();
    last = nullptr;
    ended.set(watch.expired());
  });
  for (int i = 0; i < 10; ++i) thread->post([&, i] { order.push_back(i); });
  thread = nullptr;
  gate.set();
  CHECK(ended.future().wait());
  CHECK(order.size() == 10);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("a serial thread is idle once its last task is destroyed") {
  base::SerialThread thread("test");
  for (int i = 0; i < 100; ++i) {
    auto held = std::make_shared<int>(i);
    const std::weak_ptr<int> watch = held;
    thread.post([held = std::move(held)] {});
    while (!thread.idle()) std::this_thread::yield();
    CHECK(watch.expired());
  }
}
