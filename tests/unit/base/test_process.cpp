// ctest: labels=notsan
// Not run under thread sanitizer, which delays signal handlers and loses their mask changes.
#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include <signal.h>
#include <unistd.h>

#include "distrain/base/process.h"
#include "support/catch.h"

using namespace distrain;

TEST_CASE("signals are blocked in existing threads, too") {
  const sigset_t wanted = base::signal_set({SIGUSR2});
  std::array<int, 2> pipe_ends{};
  REQUIRE(pipe(pipe_ends.data()) == 0);
  CHECK(base::other_threads().empty());
  int blocked = -1;
  std::atomic<bool> runs{false};  // a new thread blocks all signals until it runs
  std::thread other([&] {
    runs = true;
    char byte = 0;
    while (read(pipe_ends[0], &byte, 1) < 0) continue;
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked = sigismember(&mask, SIGUSR2);
  });
  while (!runs) std::this_thread::yield();
  CHECK(base::other_threads().size() == 1);
  base::block_in_all_threads(wanted);
  REQUIRE(write(pipe_ends[1], "x", 1) == 1);
  other.join();
  CHECK(blocked == 1);
  sigset_t own;
  pthread_sigmask(SIG_UNBLOCK, &wanted, &own);
  CHECK(sigismember(&own, SIGUSR2) == 1);
  for (const int end : pipe_ends) close(end);
}

TEST_CASE("the peak resident set grows with touched memory") {
  const double before = base::peak_rss_mb();
  CHECK(before > 1);
  std::vector<char> block(size_t{64} << 20, 'x');
  CHECK(base::peak_rss_mb() > std::max(before, 64.0));
  CHECK_FALSE(base::host_name().empty());
}
