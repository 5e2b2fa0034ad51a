#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_set>
#include <vector>

#include <uv.h>

#include "distrain/net/loop.h"

namespace distrain::net {

/// An object with open libuv handles, which are closed when the loop ends.
class LoopResource {
 public:
  virtual ~LoopResource() = default;
  virtual void shut_down_on_loop() = 0;
};

/// State shared with streams and listeners, which may outlive the Loop. After stop() no task runs.
struct Loop::Impl {
  Impl();
  void stop();

  void post(base::Task task);
  uint64_t call_at(base::TimePoint when, base::Task task);
  void cancel(uint64_t id);
  void assert_in_loop() const;

  // Owns `resource` until the resource has closed its handles and calls release_on_loop().
  void hold_on_loop(std::shared_ptr<LoopResource> resource);
  void release_on_loop(LoopResource* resource);
  void note_activity_on_loop() { ++activity; }
  /// Returns the buffer into which streams read before they know a frame's size. All share it,
  /// because each stream consumes its bytes before another one reads.
  std::span<uint8_t> scratch_on_loop() {
    constexpr size_t kBytes = 64 * 1024;
    if (!scratch) scratch = std::make_unique_for_overwrite<uint8_t[]>(kBytes);
    return {scratch.get(), kBytes};
  }

  /// Returns the time of the last wake-up, in whole milliseconds. libuv's clock is base::Clock.
  base::TimePoint now_on_loop() const {
    return base::TimePoint(std::chrono::milliseconds(uv_now(&uv)));
  }

  bool in_loop() const {
    return thread_id.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

  uv_loop_t uv;
  base::BufferPool buffers;
  uint64_t activity = 0;  // counts events after which the loop polls; loop thread only

 private:
  void run();
  void run_posted_on_loop();
  void run_timers_on_loop();
  bool remove_timer_on_loop(uint64_t id);
  void arm_timer_on_loop();

  uv_async_t wakeup;
  uv_timer_t timer;
  std::atomic<std::thread::id> thread_id;

  std::mutex mutex;
  std::vector<base::Task> posted;  // guarded by mutex
  bool stopping = false;           // guarded by mutex; tasks are dropped from now on
  std::atomic<int> wakers{0};      // threads inside uv_async_send
  std::atomic<uint64_t> next_timer{1};

  // Loop thread only.
  bool stop_begun = false;
  std::unique_ptr<uint8_t[]> scratch;
  std::multimap<base::TimePoint, std::pair<uint64_t, base::Task>> timers;
  std::unordered_set<uint64_t> cancelled_early;  // ids of timers that are not added yet
  base::TimePoint armed_for = base::kNever;
  std::unordered_set<std::shared_ptr<LoopResource>> resources;
  std::thread thread;
};

}  // namespace distrain::net
