#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "distrain/base/thread_pool.h"
#include "distrain/base/trace.h"
#include "support/catch.h"

using namespace distrain::base;
using namespace std::chrono_literals;

namespace {

std::shared_ptr<Tracer> started(size_t limit = Tracer::kLimit) {
  auto tracer = std::make_shared<Tracer>();
  tracer->start(limit);
  return tracer;
}

size_t events_of(const Tracer& tracer) {
  size_t count = 0;
  for (const TraceTrack& track : tracer.tracks()) count += track.events.size();
  return count;
}

}  // namespace

TEST_CASE("A scope without a tracer records nothing", "[trace]") {
  { TraceScope scope("alone"); }
  const auto tracer = std::make_shared<Tracer>();
  const TraceBinding binding(tracer, "main");
  { TraceScope scope("before start()"); }
  tracer->start();
  tracer->stop();
  { TraceScope scope("after stop()"); }
  CHECK(tracer->tracks().empty());
  CHECK(tracer->dropped() == 0);
}

TEST_CASE("Reading the events waits for open slices", "[trace]") {
  const auto tracer = started();
  CHECK(tracer->wait_until_closed(0s));
  std::atomic<bool> end{false};
  std::atomic<bool> begun{false};
  std::thread thread([&] {
    const TraceBinding binding(tracer, "worker");
    const TraceScope outer("outer");
    {
      const TraceScope inner("inner");
      begun = true;
      while (!end) std::this_thread::yield();
    }
  });
  while (!begun) std::this_thread::yield();
  tracer->stop();
  CHECK_FALSE(tracer->wait_until_closed(10ms));
  CHECK(events_of(*tracer) == 0);
  std::thread ends([&] {
    std::this_thread::sleep_for(20ms);
    end = true;
  });
  CHECK(tracer->wait_until_closed(30s));
  CHECK(events_of(*tracer) == 2);
  thread.join();
  ends.join();
}

TEST_CASE("Scopes of a thread are nested", "[trace]") {
  const auto tracer = started();
  {
    const TraceBinding binding(tracer, "main");
    const TraceScope outer("outer", "step", 7);
    const int given = traced("inner", [] { return 3; });
    CHECK(given == 3);
    traced("second", [] {});
  }
  { TraceScope scope("not bound any more"); }
  const auto tracks = tracer->tracks();
  REQUIRE(tracks.size() == 1);
  CHECK(tracks[0].name == "main");
  REQUIRE(tracks[0].events.size() == 3);
  const auto& [inner, second, outer] =
      std::tie(tracks[0].events[0], tracks[0].events[1], tracks[0].events[2]);
  CHECK(std::string(inner.name) == "inner");
  CHECK(std::string(second.name) == "second");
  CHECK(std::string(outer.name) == "outer");
  CHECK(std::string(outer.key) == "step");
  CHECK(outer.value == 7);
  CHECK(outer.start <= inner.start);
  CHECK(inner.start <= inner.end);
  CHECK(inner.end <= second.start);
  CHECK(second.end <= outer.end);
}

TEST_CASE("Bindings are nested, and each tracer has its own events", "[trace]") {
  const auto one = started();
  const auto other = started();
  {
    const TraceBinding binding(one, "one");
    traced("a", [] {});
    {
      const TraceBinding inner(other, "other");
      traced("b", [] {});
      const TraceBinding none(nullptr, "");
      traced("nobody's", [] {});
    }
    traced("c", [] {});
    // Events of a thread that is bound to another tracer, or to none, go to the track "thread".
    TraceEvent event;
    event.name = other->intern("call ", "f");
    other->record(event);
    std::thread([&] { other->record(event); }).join();
  }
  CHECK(events_of(*one) == 2);
  std::map<std::string, size_t> names;
  for (const TraceTrack& track : other->tracks()) names[track.name] += track.events.size();
  CHECK(names == std::map<std::string, size_t>{{"other", 1}, {"thread", 2}});
}

TEST_CASE("Interned texts stay valid and are stored once", "[trace]") {
  const auto tracer = started();
  const TraceBinding binding(tracer, "main");
  const char* const text = tracer->intern("call ", "f");
  CHECK(std::string(text) == "call f");
  CHECK(tracer->intern({}, "call f") == text);
  const char* elsewhere = nullptr;
  std::thread([&] { elsewhere = tracer->intern("call ", "f"); }).join();
  CHECK(elsewhere == text);
  const std::string large(1000, 'x');
  CHECK(tracer->intern("call ", large) == "call " + large);
}

TEST_CASE("Events beyond the limit are counted", "[trace]") {
  const auto tracer = started(2000);
  const TraceBinding binding(tracer, "main");
  for (int i = 0; i < 5000; ++i) TraceScope scope("event");
  const size_t kept = events_of(*tracer);
  CHECK(kept <= 2000);
  CHECK(kept > 1000);
  CHECK(kept + tracer->dropped() == 5000);
}

TEST_CASE("The threads of a pool share a few tracks", "[trace]") {
  const auto tracer = started();
  constexpr int kRounds = 20;
  {
    for (int i = 0; i < kRounds; ++i) {
      ThreadPool pool({.name = "pool", .size = 3, .on_thread_start = [&tracer] {
                         thread_local const TraceBinding binding(tracer, "worker");
                       }});
      for (int j = 0; j < 30; ++j) {
        pool.post([] { traced("task", [] { std::this_thread::sleep_for(100us); }); });
      }
      pool.stop();
    }
  }
  CHECK(tracer.use_count() == 1);  // ended threads hold no reference
  const auto tracks = tracer->tracks();
  CHECK(tracks.size() <= 3);
  CHECK(events_of(*tracer) == kRounds * 30);
  for (const TraceTrack& track : tracks) {
    for (size_t i = 1; i < track.events.size(); ++i) {
      CHECK(track.events[i - 1].end <= track.events[i].start);
    }
  }
}

TEST_CASE("Events can be read while threads record", "[trace]") {
  const auto tracer = started();
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&tracer, &end] {
      const TraceBinding binding(tracer, "worker");
      for (int i = 0; i < 3000 || !end; ++i) {
        const TraceScope scope("outer", "i", i);
        traced("inner", [] {});
        if (i % 100 == 0) tracer->intern("text ", std::to_string(i % 1000));
        if (i > 3000) std::this_thread::yield();
      }
    });
  }
  size_t seen = 0;
  bool ordered = true;
  for (int round = 0; round < 20; ++round) {
    size_t now = 0;
    for (const TraceTrack& track : tracer->tracks()) {
      now += track.events.size();
      for (const TraceEvent& event : track.events) ordered = ordered && event.start <= event.end;
    }
    CHECK(now >= seen);
    seen = now;
  }
  CHECK(ordered);
  end = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(events_of(*tracer) >= 3 * 2 * 3000);
}

TEST_CASE("A simulated clock error changes reported times, not recorded times", "[trace]") {
  Tracer right;
  CHECK(right.shown(1000) == 1000);
  CHECK(right.clock_domain() == Tracer().clock_domain());
  CHECK(right.clock_domain().size() > 10);
  const Tracer ahead(Tracer::FalseClock{"there", 5'000'000, 0.5});
  CHECK(ahead.clock_domain() == "there");
  const int64_t now = Tracer::now();
  const int64_t first = ahead.shown(now);
  CHECK(first >= now + 5'000'000);
  CHECK(std::llabs(ahead.shown(now + 1000) - first - 1500) <= 1);
}
