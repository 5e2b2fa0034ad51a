#include "distrain/base/trace.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <new>
#include <random>
#include <utility>

#include <fmt/format.h>
#include <limits.h>
#include <unistd.h>

namespace distrain::base {
namespace {

thread_local std::shared_ptr<Tracer> t_tracer;

}  // namespace

TraceLane::TraceLane(Tracer& tracer, std::string name, size_t number)
    : tracer_(tracer), name_(std::move(name)), number_(number) {}

TraceLane::~TraceLane() {
  for (Block* block = first_; block;) delete std::exchange(block, block->next.load());
}

void TraceLane::record(const TraceEvent& event) {
  size_t used = last_ ? last_->used.load(std::memory_order_relaxed) : kBlock;
  if (used == kBlock) {
    if (!grow()) {
      dropped_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    used = 0;
  }
  last_->events[used] = event;
  last_->used.store(used + 1, std::memory_order_release);
}

bool TraceLane::grow() {
  if (!tracer_.reserve(kBlock)) return false;
  auto* const block = new (std::nothrow) Block;
  if (!block) return false;
  (last_ ? last_->next : first_).store(block, std::memory_order_release);
  last_ = block;
  return true;
}

const char* TraceLane::intern(std::string_view text) {
  const auto it = texts_.find(text);
  if (it != texts_.end()) return it->second;
  std::lock_guard lock(tracer_.mutex_);
  const std::string& stays = *tracer_.texts_.emplace(text).first;
  texts_.emplace(stays, stays.c_str());
  return stays.c_str();
}

Tracer::Tracer() : Tracer(FalseClock{}) {}
Tracer::Tracer(FalseClock clock) : clock_(std::move(clock)) {}
Tracer::~Tracer() = default;

void Tracer::start(size_t limit) {
  left_ = std::min(limit, kLimit);
  on_ = true;
}

int64_t Tracer::shown(int64_t ns) const {
  if (clock_.domain.empty()) return ns;
  return ns + clock_.ahead + std::llround(static_cast<double>(ns - born_) * clock_.drift);
}

// Polls, because an open slice ends within microseconds unless its thread is preempted.
bool Tracer::wait_until_closed(Duration limit) const {
  const TimePoint deadline = deadline_after(limit);
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      const auto is_open = [](const auto& lane) { return lane->open_.load() > 0; };
      if (std::ranges::none_of(lanes_, is_open)) return true;
    }
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// The boot and the time namespace identify the monotonic clock, because they determine its zero.
std::string Tracer::clock_domain() const {
  if (!clock_.domain.empty()) return clock_.domain;
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  char name[PATH_MAX] = "";
  if (boot.empty()) {  // unknown, so different from all other ranks'
    std::random_device random;
    return "alone:" + std::to_string(random()) + std::to_string(random());
  }
  const ssize_t length = readlink("/proc/self/ns/time", name, sizeof name);
  return boot + ' ' + std::string(name, static_cast<size_t>(std::max<ssize_t>(length, 0)));
}

bool Tracer::reserve(size_t events) {
  size_t left = left_.load(std::memory_order_relaxed);
  do {
    if (left < events) return false;
  } while (!left_.compare_exchange_weak(left, left - events, std::memory_order_relaxed));
  return true;
}

TraceLane& Tracer::lane() {
  TraceLane* const own = detail::trace_lane;
  if (own && &own->tracer() == this) return *own;
  std::lock_guard lock(mutex_);
  TraceLane*& stranger = strangers_[std::this_thread::get_id()];
  if (!stranger) stranger = &new_lane_locked("thread");
  return *stranger;
}

TraceLane& Tracer::take_lane(const char* name) {
  std::lock_guard lock(mutex_);
  const auto it = std::ranges::find(free_, name, &TraceLane::name_);
  if (it == free_.end()) return new_lane_locked(name);
  TraceLane& lane = **it;
  free_.erase(it);
  return lane;
}

TraceLane& Tracer::new_lane_locked(const char* name) {
  return *lanes_.emplace_back(std::make_unique<TraceLane>(*this, name, lanes_.size()));
}

void Tracer::give_back(TraceLane& lane) {
  std::lock_guard lock(mutex_);
  free_.push_back(&lane);
  // Reuse the lowest lane first, so that few tracks hold the events.
  std::ranges::sort(free_, {}, &TraceLane::number_);
}

void Tracer::record(const TraceEvent& event) { lane().record(event); }

const char* Tracer::intern(std::string_view prefix, std::string_view text) {
  fmt::memory_buffer whole;  // allocates memory only for a long text
  whole.append(prefix);
  whole.append(text);
  return lane().intern({whole.data(), whole.size()});
}

std::vector<TraceTrack> Tracer::tracks() const {
  std::vector<TraceTrack> tracks;
  std::lock_guard lock(mutex_);
  for (const auto& lane : lanes_) {
    TraceTrack track{lane->name_, {}};
    size_t count = 0;
    for (const auto* block = lane->first_.load(); block; block = block->next.load()) {
      count += block->used.load();
    }
    track.events.reserve(count);
    for (const auto* block = lane->first_.load(); block; block = block->next.load()) {
      const size_t used = block->used.load(std::memory_order_acquire);
      for (size_t i = 0; i < used; ++i) {
        TraceEvent& event = track.events.emplace_back(block->events[i]);
        event.start = shown(event.start);
        event.end = shown(event.end);
        if (event.kind == TraceEvent::Kind::kFlowOut) event.value = shown(event.value);
      }
    }
    if (!track.events.empty()) tracks.push_back(std::move(track));
  }
  return tracks;
}

uint64_t Tracer::dropped() const {
  std::lock_guard lock(mutex_);
  uint64_t sum = 0;
  for (const auto& lane : lanes_) sum += lane->dropped_.load(std::memory_order_relaxed);
  return sum;
}

std::shared_ptr<Tracer> Tracer::of_thread() { return t_tracer; }

TraceBinding::TraceBinding(std::shared_ptr<Tracer> tracer, const char* name)
    : previous_(std::exchange(t_tracer, std::move(tracer))), previous_lane_(detail::trace_lane) {
  detail::trace_lane = t_tracer ? &t_tracer->take_lane(name) : nullptr;
}

TraceBinding::~TraceBinding() {
  if (t_tracer) t_tracer->give_back(*detail::trace_lane);
  t_tracer = std::move(previous_);
  detail::trace_lane = previous_lane_;
}

}  // namespace distrain::base
