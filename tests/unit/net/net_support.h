// Creates connected sockets of each transport, and frames whose content depends on a seed.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "distrain/base/future.h"
#include "distrain/net/socket.h"
#include "distrain/net/stream.h"
#include "support/catch.h"

namespace distrain::net {

using namespace std::chrono_literals;

// The timeout of each wait. It is below CTest's 60 s so that the failure names the wait.
inline constexpr auto kLongest = 45s;

inline double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Returns true if this process uses almost no CPU time while idle. Tries three times because a
// virtual machine may charge a process for time in which it did not run.
inline bool uses_no_cpu() {
  for (int i = 0; i < 3; ++i) {
    const double before = cpu_seconds();
    std::this_thread::sleep_for(200ms);
    if (cpu_seconds() - before < 0.05) return true;
  }
  return false;
}

class TempDir {
 public:
  TempDir() {
    char name[] = "/tmp/distrain-test-XXXXXX";
    path_ = ::mkdtemp(name);
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void wait_for(int fd, short events) {
  pollfd item{fd, events, 0};
  int ready = 0;
  do {
    ready = ::poll(&item, 1, static_cast<int>(std::chrono::milliseconds(kLongest).count()));
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) throw std::runtime_error("a socket was not ready for too long");
}

inline Fd accept_one(const Fd& listener) {
  wait_for(listener.get(), POLLIN);
  Fd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  REQUIRE(fd.valid());
  return fd;
}

/// Calls `connect` on the loop with a callback and returns the result that the callback receives.
template <class Connect>
base::Result<Fd> connected_on_loop(Loop& loop, const Connect& connect) {
  base::Promise<Fd> promise;
  const base::Future<Fd> future = promise.future();
  auto done = std::make_shared<base::Promise<Fd>>(std::move(promise));
  loop.post([&connect, done] {
    connect([done](base::Result<Fd> socket) { done->complete(std::move(socket)); });
  });
  future.wait_result();
  return std::move(future.state()->result());
}

inline base::Result<Fd> connect_unix(const std::string& path) {
  Loop loop;
  return connected_on_loop(loop, [&](OnConnected done) {
    connect_unix_on_loop(loop, path, base::deadline_after(kLongest), std::move(done));
  });
}

struct Tcp {
  static constexpr bool kIsTcp = true;
  static std::pair<Fd, Fd> connected() {
    const Fd listener = std::move(listen_tcp("127.0.0.1", 0).value());
    Fd client = std::move(
        connect_tcp("127.0.0.1", local_name(listener.get()).port, base::deadline_after(kLongest))
            .value());
    return {std::move(client), accept_one(listener)};
  }
};

struct Unix {
  static constexpr bool kIsTcp = false;
  static std::pair<Fd, Fd> connected() {
    const TempDir folder;
    const Fd listener = std::move(listen_unix(folder / "s").value());
    Fd client = std::move(connect_unix(folder / "s").value());
    return {std::move(client), accept_one(listener)};
  }
};

// ---- frames ----

// Returns `size` pseudo-random bytes, so that a comparison detects a shifted or repeated piece.
inline std::vector<uint8_t> pattern(size_t size, uint64_t seed) {
  std::vector<uint8_t> bytes(size);
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  for (size_t i = 0; i < size; i += 8) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t word = state ^ (state >> 29);
    std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, size - i));
  }
  return bytes;
}

inline OutFrame make_frame(uint64_t id, size_t meta_bytes, size_t payload_bytes,
                           size_t pieces = 1) {
  OutFrame frame;
  frame.header.kind = wire::FrameKind::kCall;
  frame.header.call_id = id;
  frame.meta = pattern(meta_bytes, id);
  const auto payload =
      std::make_shared<const std::vector<uint8_t>>(pattern(payload_bytes, id + 1'000'000));
  const std::span<const uint8_t> all(*payload);
  for (size_t i = 0; i < pieces; ++i) {
    const size_t begin = payload_bytes * i / pieces, end = payload_bytes * (i + 1) / pieces;
    frame.payload.push_back(all.subspan(begin, end - begin));
  }
  frame.keep_alive = payload;
  return frame;
}

inline bool intact(const InFrame& frame) {
  const auto equal = [](std::span<const uint8_t> a, const std::vector<uint8_t>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
  };
  return frame.meta.size() == frame.header.meta_bytes &&
         frame.payload.size() == frame.header.payload_bytes &&
         equal(frame.meta, pattern(frame.meta.size(), frame.header.call_id)) &&
         equal(frame.payload, pattern(frame.payload.size(), frame.header.call_id + 1'000'000)) &&
         (frame.payload.empty() ||
          reinterpret_cast<uintptr_t>(frame.payload.data()) % wire::kPayloadAlignment == 0);
}

// Returns the bytes that a stream sends for `frame`.
inline std::vector<uint8_t> wire_bytes(const OutFrame& frame) {
  wire::FrameHeader header = frame.header;
  header.meta_bytes = static_cast<uint32_t>(frame.meta.size());
  header.payload_bytes = 0;
  for (const auto& piece : frame.payload) header.payload_bytes += piece.size();
  std::vector<uint8_t> bytes(wire::kHeaderBytes + header.body_bytes());
  wire::encode_header(header, std::span<uint8_t, wire::kHeaderBytes>(bytes.data(), 48));
  std::copy(frame.meta.begin(), frame.meta.end(), bytes.begin() + wire::kHeaderBytes);
  size_t at = wire::kHeaderBytes + header.payload_offset();
  for (const auto& piece : frame.payload) {
    std::copy(piece.begin(), piece.end(), bytes.begin() + static_cast<long>(at));
    at += piece.size();
  }
  return bytes;
}

// ---- ends of a connection ----

// Records a stream's calls of its handler. Must outlive the loop, which calls the handler.
class Record {
 public:
  Stream::Handler handler() {
    return {[this](InFrame frame) { add(std::move(frame)); },
            [this](const base::Error& error) { closed(error); }};
  }
  void add(InFrame frame) {
    std::lock_guard lock(mutex_);
    if (closes_ > 0) frames_after_close_ = true;
    frames_.push_back(std::move(frame));
    changed_.notify_all();
  }
  void closed(const base::Error& error) {
    std::lock_guard lock(mutex_);
    ++closes_;
    error_ = error;
    changed_.notify_all();
  }

  bool wait_frames(size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kLongest, [&] { return frames_.size() >= count; });
  }
  bool wait_closed() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kLongest, [&] { return closes_ > 0; });
  }
  InFrame take() {
    std::lock_guard lock(mutex_);
    InFrame frame = std::move(frames_.front());
    frames_.erase(frames_.begin());
    return frame;
  }
  std::vector<InFrame> frames() {
    std::lock_guard lock(mutex_);
    return frames_;
  }
  size_t count() {
    std::lock_guard lock(mutex_);
    return frames_.size();
  }
  int closes() {
    std::lock_guard lock(mutex_);
    return closes_;
  }
  base::Error error() {
    std::lock_guard lock(mutex_);
    return error_;
  }
  bool frames_after_close() {
    std::lock_guard lock(mutex_);
    return frames_after_close_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<InFrame> frames_;
  int closes_ = 0;
  bool frames_after_close_ = false;
  base::Error error_;
};

inline StreamPtr started(Loop& loop, Fd fd, Record& record, const wire::Limits& limits = {}) {
  StreamPtr stream = adopt_socket(loop, fd.release());
  stream->start(record.handler(), limits);
  return stream;
}

// Runs `fn` on the loop and waits until `fn` has returned.
template <class F>
void on_loop(Loop& loop, F fn) {
  base::Promise<void> promise;
  const base::Future<void> done = promise.future();
  loop.post([promise = std::move(promise), fn = std::move(fn)]() mutable {
    fn();
    promise.set();
  });
  done.wait();
}

// ---- raw sockets ----

// Writes all bytes, at most `step` at a time. Returns false if the peer has disconnected.
inline bool raw_write(int fd, std::span<const uint8_t> bytes, size_t step = SIZE_MAX) {
  while (!bytes.empty()) {
    const ssize_t n =
        ::send(fd, bytes.data(), std::min(step, bytes.size()), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) return false;
      wait_for(fd, POLLOUT);
      continue;
    }
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return true;
}

// Reads `count` bytes, or fewer if the connection ends first.
inline std::vector<uint8_t> raw_read(int fd, size_t count) {
  std::vector<uint8_t> bytes(count);
  size_t have = 0;
  while (have < count) {
    wait_for(fd, POLLIN);
    const ssize_t n = ::recv(fd, bytes.data() + have, count - have, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) break;
    have += static_cast<size_t>(n);
  }
  bytes.resize(have);
  return bytes;
}

}  // namespace distrain::net
