// Starts agents that join a job, each on its own thread.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "gate.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/raw_rank.h"

namespace distrain::testing {

using namespace std::chrono_literals;

inline void setup(rpc::Agent& agent) {
  agent.expose<&add>("add");
  agent.expose<&nap>("nap");
}

inline rpc::AgentOptions options_for(int rank, int world_size, uint16_t port = 0) {
  rpc::AgentOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.master_port = port;
  // These timeouts must not expire on a slow machine. Tests of the timeouts set shorter ones.
  options.join_timeout = 60s;
  options.peer_timeout = 0s;
  if (rank == 0) {
    for (int r = 0; r < world_size; ++r) options.names.push_back("w" + std::to_string(r));
  }
  return options;
}

// Runs join() of a rank on its own thread and keeps the result.
class Joining {
 public:
  explicit Joining(rpc::AgentOptions options, std::function<void()> prepare = {}) {
    agent_ = std::make_unique<rpc::Agent>(std::move(options));
    setup(*agent_);
    done_ = std::async(std::launch::async, [this, prepare = std::move(prepare)] {
      return error_of([&] { agent_->join(prepare); });
    });
  }
  /// Waits for join() and returns its error, or kind `internal` and "(no error)" if it succeeded.
  base::Error result() {
    if (!result_) result_ = done_.get();
    return *result_;
  }
  bool joined() { return result().message == "(no error)"; }
  bool ended() const { return result_ || done_.wait_for(0s) == std::future_status::ready; }
  rpc::Agent& agent() { return *agent_; }
  void kill() { agent_.reset(); }

 private:
  std::unique_ptr<rpc::Agent> agent_;
  std::future<base::Error> done_;
  std::optional<base::Error> result_;
};

// Checks that rank 1 can join rank 0 after a test's faults, and that the job of two ranks works.
inline void check_comes_up(Joining& zero) {
  Joining one(options_for(1, 2, zero.agent().port()));
  CHECK(one.joined());
  CHECK(zero.joined());
  if (!one.joined() || !zero.joined()) return;
  CHECK(zero.agent().rpc_sync<&add>(1, 2, 3) == 5);
  std::thread other([&] { one.agent().shutdown(); });
  zero.agent().shutdown();
  other.join();
}

}  // namespace distrain::testing
