#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "distrain/base/clock.h"

namespace distrain::base {

/// A recorded time span. Its texts are literals or come from Tracer::intern().
struct TraceEvent {
  enum class Kind : uint8_t {
    kSlice,    ///< work of one thread; slices of a thread are nested or disjoint
    kFlowOut,  ///< a slice that causes another: an arrow (flow `id`) leaves it at time `value`
    kFlowIn,   ///< a slice caused by another: the arrow (flow `id`) ends at the start of the slice
    kAsync,    ///< an operation that no thread runs, such as a call; `id` is unique
  };
  Kind kind = Kind::kSlice;
  const char* name = "";
  const char* category = "";
  const char* key = nullptr;  ///< label of `value`; null if `value` is not shown
  int64_t value = 0;
  int64_t start = 0;  ///< in ns of base::Clock
  int64_t end = 0;
  uint64_t id = 0;  ///< equal in both slices of a flow, otherwise unique in the job
};

/// The events of one thread, or of successive threads of the same name.
struct TraceTrack {
  std::string name;
  std::vector<TraceEvent> events;  ///< in order of their ends
};

struct RankTrace {
  int rank = 0;
  std::string role;
  std::vector<TraceTrack> tracks;
  uint64_t dropped = 0;  ///< number of events that were not recorded because of the limit
};

class TraceLane;

/// Records the events of one rank, for `--trace`. Each agent has its own tracer.
///
/// Records only between start() and stop(). Each thread writes to its own lane, a list of events,
/// without a lock, in about 100 ns an event. A new thread reuses the lane of an exited thread of
/// the same name. Thread-safe. Interned texts live as long as the tracer.
class Tracer {
 public:
  static constexpr size_t kLimit = 1'000'000;  ///< the most events that a rank records

  /// A simulated clock of another machine, for tests.
  struct FalseClock {
    std::string domain;  ///< empty: this machine's clock
    int64_t ahead = 0;   ///< ns by which the clock was ahead when the tracer was created
    double drift = 0;    ///< ns gained per ns since the tracer was created
  };

  Tracer();
  explicit Tracer(FalseClock clock);
  ~Tracer();
  /// Starts recording. After `limit` events, further events are only counted, in dropped().
  void start(size_t limit = kLimit);
  void stop() { on_.store(false, std::memory_order_relaxed); }
  /// Call it after stop(). Waits until the open slices have ended and are recorded. Returns false
  /// if slices are still open after `limit`. Must not be called within a slice.
  bool wait_until_closed(Duration limit) const;
  bool on() const { return on_.load(std::memory_order_relaxed); }
  /// Returns the time of base::Clock in ns, as events store it.
  static int64_t now() { return Clock::now().time_since_epoch().count(); }
  /// Converts a time to the clock that other ranks see: base::Clock, or the FalseClock in tests.
  int64_t shown(int64_t ns) const;
  /// Returns a text that is equal for ranks that share one base::Clock.
  std::string clock_domain() const;
  /// Records `event` in the lane of the calling thread.
  void record(const TraceEvent& event);
  /// Returns the lane of the calling thread.
  TraceLane& lane();
  /// Returns `prefix` + `text` as a string that lives as long as the tracer.
  const char* intern(std::string_view prefix, std::string_view text);
  /// Returns a new id for a kAsync event. Callers add `rank << 40`, so that no other rank uses it.
  uint64_t next_id() { return next_id_.fetch_add(1, std::memory_order_relaxed); }
  /// Returns a copy of the events so far. Other threads may record concurrently.
  std::vector<TraceTrack> tracks() const;
  uint64_t dropped() const;
  /// Returns the tracer that this thread is bound to, or null.
  static std::shared_ptr<Tracer> of_thread();

 private:
  friend class TraceLane;
  friend class TraceBinding;
  TraceLane& take_lane(const char* name);
  TraceLane& new_lane_locked(const char* name);
  void give_back(TraceLane& lane);
  bool reserve(size_t events);

  const FalseClock clock_;
  const int64_t born_ = now();
  std::atomic<bool> on_{false};
  std::atomic<size_t> left_{0};  // events that may still be recorded
  std::atomic<uint64_t> next_id_{1};
  mutable std::mutex mutex_;  // guards the members below
  std::vector<std::unique_ptr<TraceLane>> lanes_;
  std::vector<TraceLane*> free_;
  std::unordered_map<std::thread::id, TraceLane*> strangers_;  // lanes of unbound threads
  std::unordered_set<std::string> texts_;
};

/// One thread's events, in blocks. Other threads may read the first `used` events of a block.
class TraceLane {
 public:
  TraceLane(Tracer& tracer, std::string name, size_t number);
  ~TraceLane();

  Tracer& tracer() const { return tracer_; }
  void record(const TraceEvent& event);
  const char* intern(std::string_view text);
  /// Called when this thread begins a slice. Tracer::wait_until_closed() waits until close().
  void open() { add_open(1); }
  void close() { add_open(-1); }

 private:
  friend class Tracer;
  static constexpr size_t kBlock = 512;
  struct Block {
    std::array<TraceEvent, kBlock> events;
    std::atomic<size_t> used{0};
    std::atomic<Block*> next{nullptr};
  };

  bool grow();
  // A load and a store are enough, because only the lane's thread writes `open_`.
  void add_open(int change) {
    open_.store(open_.load(std::memory_order_relaxed) + change, std::memory_order_release);
  }

  Tracer& tracer_;
  const std::string name_;
  const size_t number_;
  std::atomic<Block*> first_{nullptr};
  Block* last_ = nullptr;
  std::atomic<uint64_t> dropped_{0};
  std::atomic<int> open_{0};
  std::unordered_map<std::string_view, const char*> texts_;  // cache of the tracer's texts
};

namespace detail {
inline constinit thread_local TraceLane* trace_lane = nullptr;
}

/// Binds this thread to `tracer`, which records the thread's further events on track `name`. Null
/// unbinds the thread. Restores the previous binding when destroyed.
class TraceBinding {
 public:
  TraceBinding(std::shared_ptr<Tracer> tracer, const char* name);
  ~TraceBinding();
  TraceBinding(TraceBinding&&) = delete;

 private:
  std::shared_ptr<Tracer> previous_;
  TraceLane* previous_lane_;
};

/// Records a slice in `lane` from construction to destruction, or nothing if `lane` is null.
class TraceSlice {
 public:
  TraceSlice(TraceSlice&&) = delete;

 protected:
  TraceSlice(TraceLane* lane, const TraceEvent& event) : lane_(lane), event_(event) {
    if (!lane_) return;
    lane_->open();
    event_.start = Tracer::now();
  }
  ~TraceSlice() {
    if (!lane_) return;
    event_.end = Tracer::now();
    lane_->record(event_);
    lane_->close();
  }

  TraceLane* lane_;
  TraceEvent event_;
};

/// Records a slice of this thread until the end of the block: `base::TraceScope s("forward");` or,
/// to show `m`, `base::TraceScope s("forward", "micro_batch", m);`. Names are literals.
class TraceScope : public TraceSlice {
 public:
  explicit TraceScope(const char* name, const char* key = nullptr, int64_t value = 0)
      : TraceSlice(
            detail::trace_lane && detail::trace_lane->tracer().on() ? detail::trace_lane : nullptr,
            {.name = name, .category = "compute", .key = key, .value = value}) {}
};

/// Returns `fn()`, run in a TraceScope: `at::Tensor loss = base::traced("loss", [&] { … });`
template <size_t N, class F>
auto traced(const char (&name)[N], F&& fn) {
  const TraceScope scope(name);
  return fn();
}

}  // namespace distrain::base
