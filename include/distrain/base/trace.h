#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
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

/// One thing that took time. Texts are literals, or of Tracer::intern().
struct TraceEvent {
  enum class Kind : uint8_t {
    kSlice,    ///< what a thread did; those of one thread lie within each other or apart
    kFlowOut,  ///< a slice that caused another one: `id` left it at the time `value`
    kFlowIn,   ///< the slice that was caused by it, from its first moment on
    kAsync,    ///< something under way beside what threads do, such as a call; `id` is its own
  };
  Kind kind = Kind::kSlice;
  const char* name = "";
  const char* category = "";
  const char* key = nullptr;  ///< of `value`, to be shown with the event
  int64_t value = 0;
  int64_t start = 0;  ///< ns of base::Clock
  int64_t end = 0;
  uint64_t id = 0;  ///< the same on both sides of a flow, unique in the job
};

/// The events of one thread, or of several that lived one after the other.
struct TraceTrack {
  std::string name;
  std::vector<TraceEvent> events;  ///< by the time of their end
};

/// One rank's part of a trace.
struct RankTrace {
  int rank = 0;
  std::string role;
  std::vector<TraceTrack> tracks;
  uint64_t dropped = 0;  ///< events beyond the limit
};

class TraceLane;

/// Records what one rank does, for `--trace`.
///
/// An object, not a singleton: each agent has its own. It records nothing before start() and after
/// stop(), and then costs next to nothing. Threads write to lanes of their own without a lock,
/// about 100 ns an event; a thread that is bound has its own lane at hand. Lanes of threads that
/// have ended are used again by the next of that name. Thread-safe. Texts live as long as it does.
class Tracer {
 public:
  static constexpr size_t kLimit = 1'000'000;  ///< that no rank goes beyond

  /// For tests: the clock of another machine.
  struct FalseClock {
    std::string domain;  ///< empty: this machine's clock
    int64_t ahead = 0;   ///< ns
    double drift = 0;    ///< ns gained each ns, from the tracer's birth on
  };

  Tracer();
  explicit Tracer(FalseClock clock);
  ~Tracer();
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  /// From here on at most `limit` events are recorded; more are counted only.
  void start(size_t limit = kLimit);
  void stop() { on_.store(false, std::memory_order_relaxed); }
  /// After stop(): waits until the slices that are under way have ended and are recorded. False if
  /// some are not after `limit`. Not from within a slice.
  bool settle(Duration limit) const;
  bool on() const { return on_.load(std::memory_order_relaxed); }

  /// Of base::Clock, in ns: what events carry.
  static int64_t now() { return Clock::now().time_since_epoch().count(); }
  /// The same moment as told to other ranks and as tracks() has it: differs with a FalseClock.
  int64_t shown(int64_t ns) const;
  /// Ranks with the same one have the same base::Clock.
  std::string clock_domain() const;

  /// Records in the lane of this thread.
  void record(const TraceEvent& event);
  /// Where this thread writes.
  TraceLane& lane();
  /// `prefix` and `text` as one text that stays.
  const char* intern(std::string_view prefix, std::string_view text);
  /// For kAsync: another one each time, below 2^40.
  uint64_t next_id() { return next_id_.fetch_add(1, std::memory_order_relaxed); }

  /// What was recorded so far, with texts that live as long as this; threads may go on meanwhile.
  std::vector<TraceTrack> tracks() const;
  uint64_t dropped() const;

  /// Records this thread's events from now on in `tracer` (null: nowhere), on the track `name`.
  static void bind_thread(std::shared_ptr<Tracer> tracer, const char* name);
  /// What this thread is bound to; null: to none.
  static std::shared_ptr<Tracer> of_thread();

 private:
  friend class TraceLane;
  friend class TraceBinding;
  TraceLane& take_lane(const char* name);
  void give_back(TraceLane& lane);
  bool reserve(size_t events);

  const FalseClock clock_;
  const int64_t born_ = now();
  std::atomic<bool> on_{false};
  std::atomic<size_t> left_{0};  // events that may still be recorded
  std::atomic<uint64_t> next_id_{1};
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<TraceLane>> lanes_;              // by mutex_
  std::vector<TraceLane*> free_;                               // by mutex_
  std::unordered_map<std::thread::id, TraceLane*> strangers_;  // by mutex_: threads not bound here
  std::unordered_set<std::string> texts_;                      // by mutex_
};

/// Where one thread writes. Others read it meanwhile: what `used` of a block counts is written.
class TraceLane {
 public:
  TraceLane(Tracer& tracer, std::string name, size_t number);
  ~TraceLane();

  Tracer& tracer() { return tracer_; }
  void record(const TraceEvent& event);
  const char* intern(std::string_view text);

  /// A slice of this thread is under way, from open() to close(): settle() waits for it.
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
  // Only the lane's thread writes.
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
  std::unordered_map<std::string_view, const char*> texts_;  // those this thread has asked for
};

namespace detail {
inline constinit thread_local TraceLane* trace_lane = nullptr;
}

/// bind_thread() while this object lives; then as it was before.
class TraceBinding {
 public:
  TraceBinding(std::shared_ptr<Tracer> tracer, const char* name);
  ~TraceBinding();
  TraceBinding(const TraceBinding&) = delete;
  TraceBinding& operator=(const TraceBinding&) = delete;

 private:
  std::shared_ptr<Tracer> previous_;
  TraceLane* previous_lane_;
};

/// A slice of this thread, from here to the end of the block: `base::TraceScope scope("forward");`
/// or with a number to show: `base::TraceScope scope("forward", "micro_batch", m);`. Names are
/// literals. Costs one look at a thread-local variable where nothing is traced.
class TraceScope {
 public:
  template <size_t N>
  explicit TraceScope(const char (&name)[N]) : TraceScope(Label{name, nullptr, 0}) {}
  template <size_t N, size_t K>
  TraceScope(const char (&name)[N], const char (&key)[K], int64_t value)
      : TraceScope(Label{name, key, value}) {}
  ~TraceScope() {
    if (lane_) end();
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  struct Label {
    const char* name;
    const char* key;
    int64_t value;
  };
  explicit TraceScope(const Label& label) : lane_(detail::trace_lane), label_(label) {
    if (!lane_) return;
    if (lane_->tracer().on()) {
      lane_->open();
      start_ = Tracer::now();
    } else {
      lane_ = nullptr;
    }
  }
  void end();

  TraceLane* lane_;
  const Label label_;
  int64_t start_ = 0;
};

/// `fn()` in a TraceScope: `const at::Tensor loss = base::traced("loss", [&] { … });`
template <size_t N, class F>
auto traced(const char (&name)[N], F&& fn) {
  const TraceScope scope(name);
  return fn();
}

}  // namespace distrain::base
