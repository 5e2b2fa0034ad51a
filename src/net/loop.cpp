#include "distrain/net/loop.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "net_impl.h"

namespace distrain::net {

// Throws `resources` if `code` is an error: these calls fail only without descriptors or memory.
static void check_uv(int code) {
  if (code >= 0) return;
  throw base::Exception(base::ErrorKind::kResources,
                        std::string("starting the event loop: ") + uv_strerror(code));
}

Loop::Impl::Impl()
    : process(getpid()),
      sleep_fd(epoll_create1(EPOLL_CLOEXEC)),
      timer_fd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  check_uv(sleep_fd.valid() && timer_fd.valid() ? 0 : uv_translate_sys_error(errno));
  check_uv(uv_loop_init(&uv));
  uv.data = this;
  check_uv(uv_async_init(&uv, &wakeup, [](uv_async_t* handle) noexcept {
    static_cast<Impl*>(handle->loop->data)->run_posted_on_loop();
  }));
  check_uv(uv_poll_init(&uv, &alarm, timer_fd.get()));
  uv_poll_start(&alarm, UV_READABLE, [](uv_poll_t* handle, int, int) noexcept {
    static_cast<Impl*>(handle->loop->data)->run_timers_on_loop();
  });
  epoll_event event{};
  check_uv(epoll_ctl(sleep_fd.get(), EPOLL_CTL_ADD, uv_backend_fd(&uv), &event) == 0
               ? 0
               : uv_translate_sys_error(errno));
  run_ready();  // registers the first watchers
  watch(EPOLLIN);
  thread = std::thread([this] { run(); });
}

void Loop::Impl::stop() {
  post([this] {
    stop_begun = true;
    const std::vector<std::shared_ptr<LoopResource>> open(resources.begin(), resources.end());
    for (const auto& resource : open) resource->shut_down_on_loop();
  });
  // Tasks hold streams, and streams hold this object (a cycle), so destroy those that never run.
  std::vector<base::Task> dropped;
  std::map<TimerKey, base::Task> dropped_timers;
  {
    std::lock_guard lock(mutex);
    stopping = true;
    dropped_timers.swap(timers);
    due.clear();
  }
  thread.join();
  // Wait until all post() calls have returned: a task may cause stop() before its post() returns.
  while (wakers.load(std::memory_order_acquire) > 0) std::this_thread::yield();
  uv_loop_close(&uv);
  std::lock_guard lock(mutex);
  dropped.swap(posted);
}

void Loop::Impl::assert_in_loop() const {
  if (in_loop()) return;
  std::fputs("distrain: fatal: a loop-only function called from another thread\n", stderr);
  std::abort();
}

// Sets the events for which the loop's thread wakes up.
void Loop::Impl::watch(uint32_t events) {
  epoll_event event{};
  event.events = events;
  epoll_ctl(sleep_fd.get(), EPOLL_CTL_MOD, uv_backend_fd(&uv), &event);
}

bool Loop::Impl::enter() {
  if (!role.try_lock()) {
    is_wanted.store(true, std::memory_order_relaxed);
    return false;
  }
  if (stop_begun || getpid() != process) {
    role.unlock();
    return false;
  }
  is_wanted.store(false, std::memory_order_relaxed);  // this thread may have been the one
  watch(0);
  return true;
}

bool Loop::Impl::run_ready() {
  const uint64_t seen = activity;
  bool& must_not_wait = base::thread_state().must_not_wait;
  must_not_wait = true;
  thread_id.store(std::this_thread::get_id(), std::memory_order_relaxed);
  // Runs once more while libuv has work that its descriptor does not show, such as new watchers.
  while (uv_run(&uv, UV_RUN_NOWAIT) != 0 && uv_backend_timeout(&uv) == 0) {
  }
  thread_id.store(std::thread::id(), std::memory_order_relaxed);
  must_not_wait = false;
  return activity != seen && !is_wanted.exchange(false, std::memory_order_relaxed);
}

void Loop::Impl::leave() {
  if (stop_begun) uv_async_send(&wakeup);  // the loop's thread ends the loop
  watch(EPOLLIN);
  role.unlock();
}

void Loop::Impl::run() {
  pthread_setname_np(pthread_self(), "dt-loop");
  base::AdaptivePoll& poll = base::thread_state().poll;
  base::TimePoint poll_until{};
  base::Duration yielded{};
  for (;;) {
    const bool is_free = role.try_lock();
    const bool has_received = is_free && run_ready();
    if (is_free && stop_begun) break;
    if (is_free) role.unlock();
    const base::TimePoint now = base::Clock::now();
    if (has_received) poll_until = now + base::AdaptivePoll::kWindow;
    if (yielded > base::Duration::zero()) poll.note_yield(yielded, has_received, now);
    yielded = {};
    if (is_free && now < poll_until && poll.allowed(now)) {
      sched_yield();
      yielded = base::Clock::now() - now;
      continue;
    }
    if (!is_free) sched_yield();  // the other thread may be about to stop watching the events
    epoll_event event;
    epoll_wait(sleep_fd.get(), &event, 1, -1);
  }
  uv_close(reinterpret_cast<uv_handle_t*>(&wakeup), nullptr);
  uv_close(reinterpret_cast<uv_handle_t*>(&alarm), nullptr);
  run_ready();
  role.unlock();
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
  for (base::Task& task : tasks) task();
}

uint64_t Loop::Impl::call_at(base::TimePoint when, base::Task task) {
  std::lock_guard lock(mutex);
  const uint64_t id = next_timer++;
  if (stopping) return id;
  timers.emplace(TimerKey(when, id), std::move(task));
  due.emplace(id, when);
  arm_locked();
  return id;
}

// Sets the timerfd for the first timer, unless it is set for an earlier time already.
void Loop::Impl::arm_locked() {
  if (timers.empty() || timers.begin()->first.first >= armed_for) return;
  armed_for = timers.begin()->first.first;
  const int64_t ns = std::max<int64_t>(armed_for.time_since_epoch().count(), 1);  // 0 disarms
  itimerspec spec{};
  spec.it_value = {.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
  timerfd_settime(timer_fd.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void Loop::Impl::run_timers_on_loop() {
  uint64_t expirations = 0;
  while (read(timer_fd.get(), &expirations, sizeof expirations) < 0 && errno == EINTR) {
  }
  const base::TimePoint now = base::Clock::now();
  for (;;) {
    base::Task task;
    {
      std::lock_guard lock(mutex);
      armed_for = base::kNever;
      if (timers.empty() || timers.begin()->first.first > now) return arm_locked();
      const auto first = timers.extract(timers.begin());
      due.erase(first.key().second);
      task = std::move(first.mapped());
    }
    task();
  }
}

void Loop::Impl::cancel(uint64_t id) {
  decltype(timers)::node_type dropped;  // destroyed without the lock
  std::lock_guard lock(mutex);
  const auto found = due.find(id);
  if (found == due.end()) return;
  dropped = timers.extract(TimerKey(found->second, id));
  due.erase(found);
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
base::EventLoopPtr Loop::event_loop() const { return impl_; }
base::BufferPool& Loop::buffers() { return impl_->buffers; }

}  // namespace distrain::net
