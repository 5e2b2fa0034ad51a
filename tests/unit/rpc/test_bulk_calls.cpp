// Tests calls whose tensors travel over bulk connections: Note [Bulk connections] in
// src/net/bulk.h.
#include <atomic>
#include <thread>

#include "join_support.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

constexpr int64_t kLarge = int64_t{3} << 18;  // elements; 3 MiB

at::Tensor twice(const at::Tensor& tensor) { return tensor * 2; }

void set_up(rpc::Agent& agent) {
  agent.expose<&twice>("twice");
  agent.expose<&add>("add");
}

rpc::AgentOptions without_shared_memory() {
  rpc::AgentOptions options;
  options.transport = GENERATE("tcp", "unix");
  options.shared_memory = false;
  return options;
}

}  // namespace

TEST_CASE("large calls of both ranks beside small ones arrive whole") {
  Cluster cluster(2, set_up, without_shared_memory());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    for (int thread = 0; thread < 2; ++thread) {
      threads.emplace_back([&, rank, thread] {
        for (int i = 0; i < 6; ++i) {
          const at::Tensor tensor = at::full({kLarge + 1000 * i + thread}, 1.0 + i);
          wrong += !at::equal(cluster[rank].rpc_sync<&twice>(1 - rank, tensor), tensor * 2);
        }
      });
    }
    threads.emplace_back([&, rank] {
      for (int i = 0; i < 200; ++i) wrong += cluster[rank].rpc_sync<&add>(1 - rank, i, 1) != i + 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  cluster.shutdown();
}
