// Connects two streams to each other, or one stream to a raw socket.
#pragma once

#include <functional>
#include <thread>

#include "net_support.h"

namespace distrain::net {

// Two streams that are connected to each other, on one loop.
template <class Transport>
struct Pair {
  Pair() {
    auto [first, second] = Transport::connected();
    a = started(loop, std::move(first), record_a);
    b = started(loop, std::move(second), record_b);
  }
  Record record_a, record_b;
  Loop loop;  // after the records so that the loop is destroyed first
  StreamPtr a, b;
};

// A stream whose peer is a socket that the test reads and writes directly.
template <class Transport>
struct Half {
  explicit Half(const wire::Limits& limits = {}) {
    auto [first, second] = Transport::connected();
    raw = std::move(second);
    stream = started(loop, std::move(first), record, limits);
  }
  Record record;
  Fd raw;
  Loop loop;
  StreamPtr stream;
};

// Sends frames, usually more than the socket's buffer holds, so that the stream queues the rest.
// Returns weak references, which expire when the stream releases the frames.
inline std::vector<std::weak_ptr<const void>> fill(Stream& stream, size_t frames, size_t bytes) {
  std::vector<std::weak_ptr<const void>> alive;
  for (size_t i = 0; i < frames; ++i) {
    OutFrame frame = make_frame(i, 40, bytes);
    alive.push_back(frame.keep_alive);
    CHECK(stream.send(std::move(frame)).ok());
  }
  return alive;
}

inline size_t count_alive(const std::vector<std::weak_ptr<const void>>& watched) {
  size_t alive = 0;
  for (const auto& one : watched) alive += !one.expired();
  return alive;
}

inline bool eventually(const std::function<bool()>& condition) {
  const base::TimePoint end = base::deadline_after(kLongest);
  while (!condition()) {
    if (base::Clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace distrain::net
