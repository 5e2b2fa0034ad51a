#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "distrain/base/buffer.h"
#include "distrain/base/thread_state.h"
#include "support/catch.h"

using namespace distrain::base;

TEST_CASE("buffers are aligned to 64 bytes and have the requested size") {
  BufferPool pool;
  for (const size_t size : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{511}, size_t{512},
                            size_t{513}, size_t{640}, size_t{641}, size_t{4095}, size_t{65536},
                            size_t{65537}, size_t{1} << 20, (size_t{1} << 20) + 1}) {
    const BufferPtr buffer = pool.allocate(size);
    REQUIRE(buffer);
    CHECK(buffer->size == size);
    CHECK(reinterpret_cast<uintptr_t>(buffer->data) % 64 == 0);
    std::memset(buffer->data, 0xAB, size);  // address sanitizer checks the bounds
  }
}

TEST_CASE("a buffer is reused for sizes of its class") {
  BufferPool pool;
  const uint8_t* first = nullptr;
  {
    const BufferPtr buffer = pool.allocate(1000);
    first = buffer->data;
  }
  const BufferPtr second = pool.allocate(1024);
  CHECK(second->data == first);
  CHECK(second->size == 1024);
  const BufferPtr third = pool.allocate(1024);
  CHECK(third->data != first);
}

TEST_CASE("at most max_idle_bytes are kept") {
  BufferPool none(0);
  { const BufferPtr buffer = none.allocate(1 << 16); }
  BufferPool some(1 << 16);
  std::set<const uint8_t*> seen;
  {
    std::vector<BufferPtr> buffers;
    for (int i = 0; i < 8; ++i) buffers.push_back(some.allocate(1 << 14));
    for (const BufferPtr& buffer : buffers) seen.insert(buffer->data);
    CHECK(seen.size() == 8);
  }
  CHECK(some.allocate(1 << 16));
}

TEST_CASE("the most recently used blocks are kept") {
  constexpr size_t kMiB = size_t{1} << 20;
  BufferPool pool(3 * kMiB);
  { const BufferPtr of_another_time = pool.allocate(2 * kMiB); }
  const auto is_kept = [&pool] {
    std::vector<uint8_t> pattern(2 * kMiB + kMiB / 2, 0x5A);
    {
      const BufferPtr buffer = pool.allocate(pattern.size());
      std::copy(pattern.begin(), pattern.end(), buffer->data);
    }
    const BufferPtr again = pool.allocate(pattern.size());  // a new block would contain zeros
    return std::equal(pattern.begin(), pattern.end(), again->data);
  };
  CHECK(is_kept());
}

TEST_CASE("one block above the bound is kept in addition, up to four times the bound") {
  constexpr size_t kMiB = size_t{1} << 20;
  BufferPool pool(kMiB);
  const auto is_kept = [&pool](size_t size) {
    {
      const BufferPtr buffer = pool.allocate(size);
      std::memset(buffer->data, 0x5A, size);
    }
    { const BufferPtr small = pool.allocate(1000); }
    const BufferPtr again = pool.allocate(size);  // a new block would contain zeros
    return std::all_of(again->data, again->data + size, [](uint8_t byte) { return byte == 0x5A; });
  };
  CHECK(is_kept(4 * kMiB));
  CHECK_FALSE(is_kept(64 * kMiB));
}

TEST_CASE("buffers may outlive their pool") {
  std::optional<BufferPool> pool(std::in_place);
  const BufferPtr kept = pool->allocate(5000);
  { const BufferPtr idle = pool->allocate(300); }
  pool.reset();
  std::memset(kept->data, 1, kept->size);
}

TEST_CASE("an impossible size gives nullptr, not a small block") {
  BufferPool pool;
  CHECK(pool.allocate(SIZE_MAX) == nullptr);
  CHECK(pool.allocate(SIZE_MAX - 64) == nullptr);
  CHECK(pool.allocate(SIZE_MAX / 2 + 1) == nullptr);
}

TEST_CASE("threads share a pool without sharing a buffer") {
  BufferPool pool;
  std::atomic<bool> torn{false};
  std::vector<std::thread> threads;
  for (uint8_t t = 1; t <= 4; ++t) {
    threads.emplace_back([&pool, &torn, t] {
      std::mt19937 random(t);
      std::vector<BufferPtr> held;
      for (int i = 0; i < 500; ++i) {
        BufferPtr buffer = pool.allocate(random() % 4096 + 1);
        std::memset(buffer->data, t, buffer->size);
        held.push_back(std::move(buffer));
        if (held.size() > 8) {
          for (size_t b = 0; b < held[0]->size; ++b) torn = torn || held[0]->data[b] != t;
          held.erase(held.begin());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_FALSE(torn);
}

TEST_CASE("AdaptivePoll sees an event that is ready or arrives, and gives up after its window") {
  AdaptivePoll poll;
  CHECK(poll.allowed(Clock::now()));
  CHECK(poll.poll([] { return true; }));
  int looks = 0;
  CHECK_FALSE(poll.poll([&looks] {
    ++looks;
    return false;
  }));
  CHECK(looks >= 1);
  // On a busy machine, poll() above may have paused polling. The next poll() then returns false at
  // once.
  looks = 0;
  const TimePoint still_off = Clock::now() + AdaptivePoll::kFirstPause / 2;
  if (!poll.allowed(still_off)) {
    const bool seen = poll.poll([&looks] { return ++looks > 1; });
    if (Clock::now() < still_off) CHECK_FALSE(seen);
  }
}

TEST_CASE("a slow yield disables polling, each time for twice as long, at most for a second") {
  AdaptivePoll poll;
  poll.note_yield(std::chrono::milliseconds(1), true, Clock::now());
  CHECK(poll.allowed(Clock::now()));  // a yield that brings progress may be slow
  Duration pause{};
  for (int i = 0; i < 12; ++i) {
    const TimePoint after = Clock::now();
    poll.note_yield(std::chrono::milliseconds(1), false, after);
    CHECK_FALSE(poll.allowed(after));
    const Duration expected = std::min<Duration>(AdaptivePoll::kFirstPause * (1 << std::min(i, 10)),
                                                 AdaptivePoll::kLongestPause);
    CHECK_FALSE(poll.allowed(after + expected - std::chrono::nanoseconds(1)));
    CHECK(poll.allowed(after + expected));
    CHECK(expected >= pause);
    pause = expected;
  }
  // A paused poll() checks only once. Repeats if the pause ended too early on a slow machine.
  int looks = 0;
  bool seen = false;
  TimePoint until;
  do {
    const TimePoint after = Clock::now();
    poll.note_yield(std::chrono::milliseconds(1), false, after);
    until = after + pause;
    looks = 0;
    seen = poll.poll([&looks] { return ++looks > 1; });
  } while (Clock::now() >= until);
  CHECK_FALSE(seen);
  CHECK(looks == 1);
}
