// The interface of the implementations that bench_echo measures: an echo between two processes.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <sys/socket.h>
#include <unistd.h>

namespace distrain::bench {

/// The parameters of a process, which are set before it is forked.
struct EchoSetup {
  int rank = 0;           ///< 0 calls, 1 echoes
  std::string transport;  ///< unix, tcp or shm, as far as the implementation supports it
  std::string folder;  ///< a new folder for files through which the two processes find each other
  int listen_fd = -1;  ///< a listening TCP socket on localhost
  uint16_t port = 0;   ///< the port of `listen_fd`
  int pair_fd = -1;    ///< this process's end of a unix socket pair
};

inline double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class EchoPeer {
 public:
  virtual ~EchoPeer() = default;

  /// Called on rank 0. Sends `tensor` to rank 1 and returns the tensor that rank 1 sends back.
  virtual at::Tensor echo(const at::Tensor& tensor) = 0;

  /// Called on rank 0. Returns `tensor` + 1, which rank 1 computes.
  virtual at::Tensor add_one(const at::Tensor&) { throw std::runtime_error("cannot add"); }
  /// Called on rank 0, by another thread than echo(). Returns when rank 1 has `tensor`.
  virtual void take(const at::Tensor&) { throw std::runtime_error("has no second call"); }

  /// Called on rank 0. Makes `calls` calls, `in_flight` of them concurrently, and returns their
  /// duration in µs, or 0 if the implementation has no concurrent calls.
  virtual double flood(const at::Tensor& tensor, int64_t calls, int64_t in_flight) = 0;

  /// Called on rank 1. Sends each received tensor back until the process is killed.
  virtual void serve() {
    for (;;) pause();
  }
};

/// Implements flood(). `send()` starts a call and returns it; `finish(call)` waits for its end.
template <class Send, class Finish>
double keep_in_flight(int64_t calls, int64_t in_flight, Send send, Finish finish) {
  std::deque<decltype(send())> pending;
  const double start = now_us();
  for (int64_t sent = 0; sent < calls; ++sent) {
    if (static_cast<int64_t>(pending.size()) == in_flight) {
      finish(pending.front());
      pending.pop_front();
    }
    pending.push_back(send());
  }
  for (auto& call : pending) finish(call);
  return now_us() - start;
}

inline void write_all(int fd, const void* data, size_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t done = ::write(fd, at, size);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw std::runtime_error("write failed");
    at += done;
    size -= static_cast<size_t>(done);
  }
}

/// Reads `size` bytes. Returns false at the end of the stream.
inline bool read_all(int fd, void* data, size_t size) {
  char* at = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t done = ::read(fd, at, size);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    at += done;
    size -= static_cast<size_t>(done);
  }
  return true;
}

}  // namespace distrain::bench
