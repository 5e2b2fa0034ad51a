// ctest: labels=soak,noasan timeout=300 serial
// Tests a server to which four trainers push 64 MiB tensors while one trainer is stopped for some
// time. Calls that wait on the server stay within its memory budget, and other trainers continue.
#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "distrain/rpc/agent.h"
#include "support/catch.h"

using namespace distrain;
using namespace std::chrono_literals;

namespace {

constexpr int kTrainers = 4;
constexpr int kStopped = 2;   // the trainer that is stopped
constexpr int kInFlight = 8;  // concurrent pushes of a trainer if the budget allows
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kBudget = 1024 * kMiB;

// Variables in memory that all processes share.
struct Shared {
  std::atomic<int> port{0};
  std::atomic<int> pushes[kTrainers + 1] = {};
  std::atomic<bool> enough{false};
  std::atomic<int64_t> before{0};  // memory of the server when all ranks have joined
  std::atomic<int64_t> most{0};    // maximum of the server's memory
};
Shared* g_shared = nullptr;

// State of the server.
std::mutex g_mutex;
at::Tensor g_sum;

int64_t push(at::Tensor gradient) {
  std::lock_guard lock(g_mutex);
  g_sum.add_(gradient);
  std::this_thread::sleep_for(60ms);  // longer than the trainers need to send the next push
  return gradient.numel();
}

int64_t memory(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kib = 0;
    if (word == name + ":" && status >> kib) return kib * 1024;
  }
  return std::numeric_limits<int64_t>::max();
}

void run_rank(int rank) {
  at::set_num_threads(1);
  rpc::AgentOptions options;
  options.rank = rank;
  options.worker_threads = 1;
  options.peer_budget = kBudget / kTrainers;
  options.total_budget = kBudget;
  options.peer_timeout = 120s;
  if (rank == 0) {
    for (int r = 0; r <= kTrainers; ++r) options.names.push_back("w" + std::to_string(r));
  } else {
    while (g_shared->port == 0) std::this_thread::sleep_for(5ms);
    options.master_port = static_cast<uint16_t>(g_shared->port);
  }
  rpc::Agent agent(options);
  agent.expose<&push>("push");
  if (rank == 0) {
    g_sum = at::zeros({64 * kMiB / 4});
    g_shared->port = agent.port();
  }
  agent.join();
  if (rank == 0) {
    g_shared->before = memory("VmRSS");
  } else {
    const at::Tensor gradient = at::ones({64 * kMiB / 4});
    while (!g_shared->enough) {
      std::vector<base::Future<int64_t>> sizes;
      for (int i = 0; i < kInFlight; ++i) {
        sizes.push_back(agent.rpc_async<&push>(rpc::To(0).without_deadline(), gradient));
      }
      for (const auto& size : sizes) {
        if (size.wait() != gradient.numel()) throw std::runtime_error("another tensor");
        ++g_shared->pushes[rank];
      }
    }
  }
  agent.shutdown();
  if (rank == 0) g_shared->most = memory("VmHWM");
}

bool wait_until(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + 100s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

// Returns a predicate that is true after `count` more pushes of each trainer (of kStopped only if
// `of_all`).
std::function<bool()> more_pushes(int count, bool of_all) {
  std::vector<int> goals;
  for (const auto& each : g_shared->pushes) goals.push_back(each + count);
  return [goals, of_all] {
    for (int rank = 1; rank <= kTrainers; ++rank) {
      const bool counts = of_all || rank != kStopped;
      if (counts && g_shared->pushes[rank] < goals[static_cast<size_t>(rank)]) return false;
    }
    return true;
  };
}

}  // namespace

TEST_CASE("a stopped trainer costs its server no more memory than the budget") {
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  g_shared = new (memory) Shared;
  std::vector<pid_t> ranks;
  for (int rank = 0; rank <= kTrainers; ++rank) {
    const pid_t pid = fork();  // this process has one thread and has not used torch
    REQUIRE(pid >= 0);
    if (pid == 0) {
      try {
        run_rank(rank);
        _exit(0);
      } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
        _exit(1);
      }
    }
    ranks.push_back(pid);
  }
  CHECK(wait_until(more_pushes(6, true)));
  kill(ranks[kStopped], SIGSTOP);
  const auto stopped = std::chrono::steady_clock::now();
  CHECK(wait_until(more_pushes(12, false)));  // the other trainers continue
  std::this_thread::sleep_until(stopped + 3s);
  kill(ranks[kStopped], SIGCONT);
  CHECK(wait_until(more_pushes(2, true)));
  g_shared->enough = true;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    CAPTURE(rank);
    int status = -1;
    CHECK(wait_until([&] { return waitpid(ranks[rank], &status, WNOHANG) == ranks[rank]; }));
    CHECK(status == 0);
    if (status == -1) kill(ranks[rank], SIGKILL);
  }
  const int64_t grown = g_shared->most - g_shared->before;
  WARN("the server has grown by " << grown / kMiB << " MiB, of a budget of " << kBudget / kMiB);
  CHECK(grown <= kBudget * 12 / 10);
  munmap(memory, sizeof(Shared));
}
