#include <algorithm>
#include <atomic>
#include <csignal>
#include <functional>
#include <random>
#include <set>
#include <thread>

#include <sys/wait.h>

#include "net_impl.h"
#include "net_support.h"

using namespace distrain;
using namespace distrain::net;

TEST_CASE("posted tasks run on the loop in their order") {
  Loop loop;
  CHECK_FALSE(loop.in_loop());
  std::vector<int> order;
  bool inside = true;
  for (int i = 0; i < 1000; ++i) {
    loop.post([&, i] {
      order.push_back(i);
      inside &= loop.in_loop();
    });
  }
  on_loop(loop, [] {});
  CHECK(inside);
  CHECK(order.size() == 1000);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("the order of each posting thread is kept") {
  Loop loop;
  constexpr int kThreads = 4, kTasks = 2000;
  std::vector<std::vector<int>> seen(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kTasks; ++i) loop.post([&seen, t, i] { seen[t].push_back(i); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  on_loop(loop, [] {});
  for (const auto& one : seen) {
    CHECK(one.size() == kTasks);
    CHECK(std::is_sorted(one.begin(), one.end()));
  }
}

TEST_CASE("a task that a task posts runs after those that wait already") {
  Loop loop;
  std::vector<int> order;
  base::Promise<void> done;
  on_loop(loop, [&] {
    loop.post([&] {
      order.push_back(1);
      loop.post([&] {
        order.push_back(3);
        done.set();
      });
    });
    loop.post([&] { order.push_back(2); });
    order.push_back(0);
  });
  done.future().wait();
  on_loop(loop, [] {});
  CHECK(order == std::vector<int>{0, 1, 2, 3});
}

TEST_CASE("polling does not go on after a heartbeat, because no frame follows it") {
  Record record;  // outlives the loop, which reports the stream's end to it
  Loop loop;
  auto ends = Unix::connected();
  const StreamPtr stream = started(loop, std::move(ends.first), record);
  const auto activity = [&] {
    uint64_t seen = 0;
    on_loop(loop, [&] { seen = loop.impl()->activity; });
    return seen;
  };
  const auto send_and_count = [&](wire::FrameKind kind) {
    OutFrame frame;
    frame.header.kind = kind;
    const uint64_t before = activity();
    REQUIRE(raw_write(ends.second.get(), wire_bytes(frame)));
    REQUIRE(record.wait_frames(1));
    record.take();
    return activity() - before;
  };
  CHECK(send_and_count(wire::FrameKind::kHeartbeat) == 0);
  CHECK(send_and_count(wire::FrameKind::kCall) == 1);
}

TEST_CASE("wake-ups are not lost") {
  Loop loop;
  std::atomic<int> ran{0};
  std::mt19937 random(1);
  for (int i = 0; i < 3000; ++i) {
    on_loop(loop, [&ran] { ++ran; });
    for (unsigned spin = random() % 2000; spin > 0; --spin) asm volatile("");
  }
  CHECK(ran == 3000);
}

TEST_CASE("timers run in the order of their times and not early") {
  Loop loop;
  std::vector<int> order;
  bool early = false;
  base::Promise<void> done;
  const int delays[] = {7, 3, 5, 1, 9, 5, 0};
  on_loop(loop, [&] {  // on the loop so that no timer runs before all are set
    const base::TimePoint start = base::Clock::now() + 2ms;
    for (int i = 0; i < 7; ++i) {
      const base::TimePoint when = start + delays[i] * 1ms;
      loop.call_at(when, [&, i, when] {
        early |= base::Clock::now() < when;
        order.push_back(i);
        if (i == 4) done.set();
      });
    }
  });
  done.future().wait();
  on_loop(loop, [] {});
  CHECK(order == std::vector<int>{6, 3, 1, 2, 5, 0, 4});
  CHECK_FALSE(early);
}

TEST_CASE("a due timer runs at once, a timer for kNever does not run") {
  Loop loop;
  base::Promise<void> done;
  loop.call_at(base::kNever, [&done] { done.fail({}); });
  loop.call_at(base::Clock::now() - 1h, [&done] { done.set(); });
  loop.call_at(base::kNever - 1ns, [&done] { done.fail({}); });
  done.future().wait();
}

TEST_CASE("timers may be set inside the loop and inside timers") {
  Loop loop;
  base::Promise<int> done;
  int count = 0;
  std::function<void()> again = [&] {
    if (++count == 5) {
      done.set(count);
    } else {
      loop.call_at(base::Clock::now() + 1ms, [&again] { again(); });
    }
  };
  on_loop(loop, [&] { loop.call_at(base::Clock::now(), [&again] { again(); }); });
  CHECK(done.future().wait() == 5);
}

TEST_CASE("a cancelled timer does not run and releases its task") {
  Loop loop;
  std::atomic<bool> ran{false};
  auto token = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = token;
  const uint64_t id = loop.call_at(base::Clock::now() + 1h, [&ran, token] { ran = true; });
  token.reset();
  // One task sets and cancels the timer so that the timer cannot run before it is cancelled.
  on_loop(loop, [&] { loop.cancel(loop.call_at(base::Clock::now() + 3ms, [&] { ran = true; })); });
  loop.cancel(id);
  base::Promise<void> later;
  const uint64_t last = loop.call_at(base::Clock::now() + 6ms, [&later] { later.set(); });
  later.future().wait();
  CHECK(watch.expired());
  CHECK_FALSE(ran);
  loop.cancel(last);  // has run already: no effect
  loop.cancel(123456);
  on_loop(loop, [] {});
}

// call_at() returns before the loop adds the timer, so a fast reply may cancel its timeout earlier.
TEST_CASE("the loop cancels a timer that is still in its queue") {
  Loop loop;
  std::atomic<bool> ran{false};
  auto token = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = token;
  std::atomic<uint64_t> id{0};
  loop.post([&] {
    while (id == 0) std::this_thread::yield();
    loop.cancel(id);
  });
  id = loop.call_at(base::Clock::now() + 2ms, [&ran, token] { ran = true; });
  token.reset();
  base::Promise<void> later;
  loop.call_at(base::Clock::now() + 5ms, [&later] { later.set(); });
  later.future().wait();
  CHECK_FALSE(ran);
  CHECK(watch.expired());
}

TEST_CASE("a timer can cancel other timers and itself inside its task") {
  Loop loop;
  bool other_ran = false;
  base::Promise<void> done;
  on_loop(loop, [&] {
    const base::TimePoint when = base::Clock::now() + 1ms;
    const auto ids = std::make_shared<std::vector<uint64_t>>();
    ids->push_back(loop.call_at(when, [&loop, ids] {
      for (const uint64_t id : *ids) loop.cancel(id);
    }));
    ids->push_back(loop.call_at(when, [&] { other_ran = true; }));
    loop.call_at(when, [&] { done.set(); });
  });
  done.future().wait();
  CHECK_FALSE(other_ran);
}

TEST_CASE("many timers from many threads run, except the half that is cancelled") {
  Loop loop;
  std::atomic<int> ran{0}, wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 300; ++i) {
        if (i % 2) {
          loop.cancel(loop.call_at(base::Clock::now() + 1h, [&] { ++wrong; }));
        } else {
          loop.call_at(base::Clock::now() + std::chrono::microseconds(random() % 5000),
                       [&] { ++ran; });
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const base::TimePoint end = base::deadline_after(kLongest);
  while (ran < 600 && base::Clock::now() < end) std::this_thread::yield();
  CHECK(ran == 600);
  CHECK(wrong == 0);
}

TEST_CASE("an idle loop uses no CPU") {
  Loop loop;
  loop.call_at(base::Clock::now() + 1h, [] {});
  auto [first, second] = Unix::connected();
  Record record;
  const StreamPtr stream = started(loop, std::move(first), record);
  REQUIRE(raw_write(second.get(), wire_bytes(make_frame(1, 1, 1))));
  REQUIRE(record.wait_frames(1));
  std::this_thread::sleep_for(5ms);  // longer than the loop polls after activity
  CHECK(uses_no_cpu());
  stream->close(false);
  REQUIRE(record.wait_closed());
}

TEST_CASE("a loop that ends drops the tasks that it has not run") {
  auto token = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = token;
  base::Future<void> future;
  {
    Loop loop;
    base::Promise<void> promise;
    future = promise.future();
    loop.call_at(base::Clock::now() + 1h, [token, own = std::move(promise)] {});
    token.reset();
  }
  CHECK(watch.expired());
  CHECK(future.wait_result().error().kind == base::ErrorKind::kCancelled);
}

TEST_CASE("a loop may end at once, and while its tasks post tasks") {
  for (int i = 0; i < 100; ++i) Loop loop;
  for (int i = 0; i < 50; ++i) {
    std::function<void()> on;
    Loop loop;
    on = [&loop, &on] { loop.post([&on] { on(); }); };
    loop.post([&on] { on(); });
  }
}

// The test destroys the loop as soon as the task has run; post() may not have returned by then.
TEST_CASE("a loop may be destroyed as soon as a posted task has run") {
  std::atomic<Loop*> mailbox{nullptr};
  std::atomic<int> ran{0};
  constexpr int kRounds = 300;
  std::thread poster([&] {
    for (int i = 0; i < kRounds; ++i) {
      Loop* loop = nullptr;
      while (!(loop = mailbox.exchange(nullptr))) sched_yield();
      loop->post([&ran] { ++ran; });
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    Loop loop;
    loop.post([] {});  // wakes the loop
    mailbox = &loop;
    while (ran <= i) sched_yield();
  }
  poster.join();
  CHECK(ran == kRounds);
}

// ---- other threads run the loop ----

// Runs the loop on this thread until `done()` is true, as a thread does that waits for longer than
// it may poll.
template <class Done>
void run_here(Loop& loop, Done done) {
  const base::EventLoopPtr events = loop.event_loop();
  const base::TimePoint end = base::deadline_after(kLongest);
  while (!events->enter()) REQUIRE(base::Clock::now() < end);
  while (!done() && base::Clock::now() < end) events->run_ready();
  events->leave();
}

TEST_CASE("a thread that has entered the loop runs its tasks, timers and messages") {
  Record record;
  Loop loop;
  auto [first, second] = Unix::connected();
  const StreamPtr stream = started(loop, std::move(first), record);
  std::set<std::thread::id> ran_on;
  bool in_loop = true, waits = true;
  int left = 3;
  const auto note = [&] {
    ran_on.insert(std::this_thread::get_id());
    in_loop &= loop.in_loop();
    waits &= !base::thread_state().must_not_wait;
    --left;
  };
  on_loop(loop, [&] {
    stream->set_handler_on_loop({[&](InFrame) { note(); }, [&](const base::Error&) {}, {}});
  });
  const base::EventLoopPtr events = loop.event_loop();
  while (!events->enter()) sched_yield();
  loop.post(note);
  loop.call_at(base::Clock::now() + 2ms, note);
  REQUIRE(raw_write(second.get(), wire_bytes(make_frame(1, 10, 10))));
  CHECK_FALSE(loop.in_loop());
  bool received = false;
  while (left > 0) received |= events->run_ready();
  CHECK(received);
  CHECK(ran_on == std::set{std::this_thread::get_id()});
  CHECK(in_loop);
  CHECK_FALSE(waits);
  CHECK_FALSE(loop.in_loop());
  CHECK_FALSE(base::thread_state().must_not_wait);
  // If another thread wants to run the loop, this thread should not go on polling.
  bool entered = true;
  std::thread([&] { entered = events->enter(); }).join();
  CHECK_FALSE(entered);
  left = 1;
  received = false;
  REQUIRE(raw_write(second.get(), wire_bytes(make_frame(3, 10, 10))));
  while (left > 0) received |= events->run_ready();
  CHECK_FALSE(received);
  // What comes before leave() and is not run wakes the loop's own thread.
  left = 2;
  ran_on.clear();
  loop.post(note);
  REQUIRE(raw_write(second.get(), wire_bytes(make_frame(2, 10, 10))));
  events->leave();
  const base::TimePoint end = base::deadline_after(kLongest);
  for (int now = 1; now > 0 && base::Clock::now() < end; on_loop(loop, [&] { now = left; })) {
  }
  on_loop(loop, [&] { CHECK(left == 0); });
  CHECK_FALSE(ran_on.contains(std::this_thread::get_id()));
  on_loop(loop, [&] { stream->set_handler_on_loop(record.handler()); });
  CHECK(uses_no_cpu());
}

TEST_CASE("no task and no timer is lost while several threads run the loop in turn") {
  Loop loop;
  std::atomic<int> ran{0};
  std::atomic<bool> over{false};
  bool inside = false, overlap = false;
  const auto task = [&] {
    overlap |= std::exchange(inside, true) || !loop.in_loop();
    sched_yield();
    inside = false;
    ++ran;
  };
  std::vector<std::thread> runners;
  for (int t = 0; t < 3; ++t) {
    runners.emplace_back([&, events = loop.event_loop()] {
      base::AdaptivePoll poll;
      std::mt19937 random(7);
      while (!over) {
        int looks = static_cast<int>(random() % 4);
        poll.poll([&looks] { return --looks < 0; }, events.get());
        sched_yield();
      }
    });
  }
  constexpr int kRounds = 1000;
  for (int i = 0; i < kRounds; ++i) {
    loop.post(task);
    loop.call_at(base::Clock::now() + std::chrono::microseconds(i % 300), task);
    const base::TimePoint end = base::deadline_after(kLongest);
    while (ran < 2 * i + 2 && base::Clock::now() < end) sched_yield();
    if (base::Clock::now() >= end) break;
  }
  CHECK(ran == 2 * kRounds);
  over = true;
  for (std::thread& runner : runners) runner.join();
  CHECK_FALSE(overlap);
}

TEST_CASE("a loop may end while other threads run it, and whoever runs it may begin its end") {
  for (int i = 0; i < 100; ++i) {
    std::atomic<bool> over{false};
    std::atomic<int> entered_late{0};
    Record record;
    auto loop = std::make_unique<Loop>();
    const base::EventLoopPtr events = loop->event_loop();
    auto [first, second] = Unix::connected();
    const StreamPtr stream = started(*loop, std::move(first), record);
    std::vector<std::thread> runners;
    for (int t = 0; t < 2; ++t) {
      runners.emplace_back([&, events] {
        while (!over) {
          if (!events->enter()) continue;
          events->run_ready();
          events->leave();
        }
        if (events->enter()) ++entered_late;
      });
    }
    if (i % 2 == 0) on_loop(*loop, [] {});
    loop = nullptr;
    over = true;
    for (std::thread& runner : runners) runner.join();
    CHECK(entered_late == 0);
    if (i % 2 == 0) CHECK(record.closes() == 1);
  }
}

TEST_CASE("a thread that waits for a future runs the loop of that future and no other") {
  std::atomic<int> here{0}, strange{0};
  const std::thread::id self = std::this_thread::get_id();
  std::function<void()> again;
  Loop one, two;
  again = [&] {
    if (std::this_thread::get_id() == self) ++strange;
    two.post(again);
  };
  two.post(again);
  // The loop's own thread may be first. Repeats until this thread was.
  const base::TimePoint end = base::deadline_after(kLongest);
  while (here == 0 && base::Clock::now() < end) {
    auto promise = std::make_shared<base::Promise<void>>(one.event_loop());
    const base::Future<void> future = promise->future();
    const auto derived = future.shared();
    one.post([&, promise] {
      if (std::this_thread::get_id() == self) ++here;
      promise->set();
    });
    here % 2 == 0 ? future.wait() : derived.wait();
  }
  CHECK(here > 0);
  CHECK(strange == 0);
}

TEST_CASE("a forked child does not run its parent's loop") {
  Loop loop;
  on_loop(loop, [] {});
  const base::EventLoopPtr events = loop.event_loop();
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) _exit(events->enter() ? 1 : 0);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  bool ran = false;
  run_here(loop, [&, posted = false]() mutable {
    if (!std::exchange(posted, true)) loop.post([&ran] { ran = true; });
    return ran;
  });
  CHECK(ran);
}

TEST_CASE("two loops work in one process") {
  Loop one, two;
  base::Promise<bool> done;
  one.post([&] { two.post([&] { done.set(two.in_loop() && !one.in_loop()); }); });
  CHECK(done.future().wait());
}

TEST_CASE("waiting on the loop thread aborts the process") {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);
    ::close(STDERR_FILENO);  // hides the expected message
    Loop loop;
    base::Promise<void> never;
    on_loop(loop, [&never] { never.future().wait(); });
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGABRT);
}
