// Remote functions that several tests use. wait_at_gate() blocks until the test sets g_gate, so
// that no test depends on the machine's speed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>

namespace distrain::testing {

inline int64_t add(int64_t a, int64_t b) { return a + b; }
inline void nap(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

inline std::atomic<bool> g_gate{false};  // true: open
inline std::atomic<int> g_at_gate{0};    // number of calls in wait_at_gate()

inline void wait_at_gate() {
  ++g_at_gate;
  while (!g_gate) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  --g_at_gate;
}

inline void wait_for_call_at_gate() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (g_at_gate == 0) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("no call came");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace distrain::testing
