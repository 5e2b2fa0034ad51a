#include "distrain/net/loop.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <pthread.h>

#include "distrain/base/process.h"
#include "distrain/base/thread_state.h"
#include "net_impl.h"

namespace distrain::net {
namespace {

// Throws `resources` if `code` is an error: these calls fail only without descriptors or memory.
void check_uv(int code) {
  if (code >= 0) return;
  throw base::Exception(base::ErrorKind::kResources,
                        std::string("starting the event loop: ") + uv_strerror(code));
}

}  // namespace

Loop::Impl::Impl() {
  check_uv(uv_loop_init(&uv));
  uv.data = this;
  check_uv(uv_async_init(&uv, &wakeup, [](uv_async_t* handle) noexcept {
    static_cast<Impl*>(handle->loop->data)->run_posted_on_loop();
  }));
  thread = std::thread([this] { run(); });
}

void Loop::Impl::stop() {
  post([this] {
    stop_begun = true;
    while (!timers.empty()) remove_timer_on_loop(timers.begin()->first);
    const std::vector<std::shared_ptr<LoopResource>> open(resources.begin(), resources.end());
    for (const auto& resource : open) resource->shut_down_on_loop();
    uv_close(reinterpret_cast<uv_handle_t*>(&wakeup), nullptr);
  });
  {
    std::lock_guard lock(mutex);
    stopping = true;
  }
  thread.join();
  // Wait until all post() calls have returned: a task may cause stop() before its post() returns.
  while (wakers.load(std::memory_order_acquire) > 0) std::this_thread::yield();
  uv_loop_close(&uv);
  // Destroy the tasks that never ran: tasks hold streams, and streams hold this object (a cycle).
  std::vector<base::Task> dropped;
  {
    std::lock_guard lock(mutex);
    dropped.swap(posted);
  }
}

void Loop::Impl::assert_in_loop() const {
  if (in_loop()) return;
  std::fputs("distrain: fatal: a loop-only function called from another thread\n", stderr);
  std::abort();
}

void Loop::Impl::run() {
  thread_id = std::this_thread::get_id();
  pthread_setname_np(pthread_self(), "dt-loop");
  // Block SIGPIPE: libuv writes without MSG_NOSIGNAL, and a closed peer must not end the process.
  const sigset_t signals = base::signal_set({SIGPIPE});
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  base::thread_state().must_not_wait = true;
  base::AdaptivePoll& poll = base::thread_state().poll;
  uint64_t seen = activity;
  base::TimePoint poll_until{};
  // Runs until stop() has closed all handles: uv_run() then returns 0.
  for (;;) {
    base::TimePoint now = base::Clock::now();
    if (activity != seen) {
      seen = activity;
      poll_until = now + base::AdaptivePoll::kWindow;
    }
    if (now < poll_until && poll.allowed(now) && !stop_begun) {
      if (uv_run(&uv, UV_RUN_NOWAIT) == 0) return;
      if (activity == seen) poll.yield(base::Clock::now());
    } else {
      if (uv_run(&uv, UV_RUN_ONCE) == 0) return;
    }
  }
}

void Loop::Impl::post(base::Task task) {
  {
    std::lock_guard lock(mutex);
    if (stopping) return;
    posted.push_back(std::move(task));
    if (posted.size() > 1) return;  // the first task's post() sends the wake-up
    wakers.fetch_add(1, std::memory_order_relaxed);
  }
  uv_async_send(&wakeup);
  wakers.fetch_sub(1, std::memory_order_release);
}

void Loop::Impl::run_posted_on_loop() {
  std::vector<base::Task> tasks;
  {
    std::lock_guard lock(mutex);
    tasks.swap(posted);
  }
  note_activity_on_loop();
  for (base::Task& task : tasks) task();
}

uint64_t Loop::Impl::call_at(base::TimePoint when, base::Task task) {
  const uint64_t id = next_timer++;
  auto add = [this, id, when, task = std::move(task)]() mutable {
    if (stop_begun || cancelled_early.contains(id)) return;
    Timer* const timer = timers[id] = new Timer{{}, id, std::move(task)};
    timer->handle.data = timer;
    uv_timer_init(&uv, &timer->handle);
    uv_update_time(&uv);
    const auto due_ms = std::chrono::ceil<std::chrono::milliseconds>(when.time_since_epoch());
    const int64_t wait = due_ms.count() - static_cast<int64_t>(uv_now(&uv));
    uv_timer_start(
        &timer->handle,
        [](uv_timer_t* handle) noexcept {
          auto* const due = static_cast<Timer*>(handle->data);
          base::Task due_task = std::move(due->task);
          static_cast<Impl*>(handle->loop->data)->remove_timer_on_loop(due->id);
          due_task();
        },
        static_cast<uint64_t>(std::max<int64_t>(wait, 0)), 0);
  };
  if (in_loop()) {
    add();
  } else {
    post(std::move(add));
  }
  return id;
}

// Cancels a timer. If it is not found, it has run or the task that adds it is still queued. The id
// in `cancelled_early` makes that task add nothing, and the task posted here removes the id.
void Loop::Impl::cancel(uint64_t id) {
  if (!in_loop()) {
    post([this, id] { remove_timer_on_loop(id); });
  } else if (!remove_timer_on_loop(id)) {
    cancelled_early.insert(id);
    post([this, id] { cancelled_early.erase(id); });
  }
}

bool Loop::Impl::remove_timer_on_loop(uint64_t id) {
  const auto found = timers.extract(id);
  if (!found) return false;
  Timer* const timer = found.mapped();
  const base::Task dropped = std::move(timer->task);  // destroyed after `timers` changes
  uv_close(reinterpret_cast<uv_handle_t*>(&timer->handle),
           [](uv_handle_t* handle) noexcept { delete static_cast<Timer*>(handle->data); });
  return true;
}

void Loop::Impl::hold_on_loop(std::shared_ptr<LoopResource> resource) {
  assert_in_loop();
  LoopResource* raw = resource.get();
  resources.insert(std::move(resource));
  if (stop_begun) raw->shut_down_on_loop();
}

void Loop::Impl::release_on_loop(LoopResource* resource) {
  assert_in_loop();
  const auto it = std::ranges::find(resources, resource, &std::shared_ptr<LoopResource>::get);
  if (it != resources.end()) resources.erase(it);
}

Loop::Loop() : impl_(std::make_shared<Impl>()) {}
Loop::~Loop() { impl_->stop(); }
void Loop::post(base::Task task) { impl_->post(std::move(task)); }
uint64_t Loop::call_at(base::TimePoint when, base::Task task) {
  return impl_->call_at(when, std::move(task));
}
void Loop::cancel(uint64_t timer) { impl_->cancel(timer); }
bool Loop::in_loop() const { return impl_->in_loop(); }
base::BufferPool& Loop::buffers() { return impl_->buffers; }

}  // namespace distrain::net
