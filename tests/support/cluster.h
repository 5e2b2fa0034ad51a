#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "distrain/rpc/agent.h"
#include "support/error_of.h"

namespace distrain::testing {

/// Several joined agents of one job in this process. Each may be used from any thread.
class Cluster {
 public:
  using Setup = std::function<void(rpc::Agent&)>;

  /// Creates and joins agents. `each` may change the options of each rank. Disables the default
  /// peer_timeout, because a rank that gets no CPU time for seconds must not count as lost.
  explicit Cluster(int size, const Setup& setup = {}, rpc::AgentOptions options = {},
                   const std::function<void(rpc::AgentOptions&)>& each = {}) {
    if (options.peer_timeout == rpc::AgentOptions{}.peer_timeout) {
      options.peer_timeout = std::chrono::nanoseconds(0);
    }
    for (int rank = 0; rank < size; ++rank) {
      options.names.push_back("w" + std::to_string(rank));
    }
    for (int rank = 0; rank < size; ++rank) {
      options.rank = rank;
      if (each) each(options);
      agents_.push_back(std::make_unique<rpc::Agent>(options));
      if (rank == 0) options.master_port = agents_[0]->port();
      if (setup) setup(*agents_.back());
    }
    options_ = options;
    setup_ = setup;
    each_ = each;
    on_all([](rpc::Agent& agent) { agent.join(); });
  }

  rpc::Agent& operator[](int rank) { return *agents_[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(agents_.size()); }
  bool is_there(int rank) const { return agents_[static_cast<size_t>(rank)] != nullptr; }

  /// Runs `fn` for each existing agent on its own thread; throws the first error by rank.
  void on_all(const std::function<void(rpc::Agent&)>& fn) {
    std::vector<std::exception_ptr> errors(agents_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < agents_.size(); ++i) {
      if (!agents_[i]) continue;
      threads.emplace_back([this, &fn, &errors, i] {
        try {
          fn(*agents_[i]);
        } catch (...) {
          errors[i] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }

  void shutdown() {
    on_all([](rpc::Agent& agent) { agent.shutdown(); });
  }

  /// Ends the rank as if its process had died.
  void kill(int rank) { agents_[static_cast<size_t>(rank)].reset(); }
  /// Removes the agent of `rank` from the cluster and returns it; the test destroys it.
  std::unique_ptr<rpc::Agent> take_out(int rank) {
    return std::move(agents_[static_cast<size_t>(rank)]);
  }
  /// Replaces a lost rank by a new agent, which joins the job; see Agent::go_on_without().
  void bring_back(int rank, const std::function<void()>& prepare = {}) {
    rpc::AgentOptions options = options_;
    options.rank = rank;
    if (each_) each_(options);
    auto& agent = agents_[static_cast<size_t>(rank)];
    agent = std::make_unique<rpc::Agent>(options);
    if (setup_) setup_(*agent);
    agent->join(prepare);
  }

 private:
  Setup setup_;
  rpc::AgentOptions options_;
  std::function<void(rpc::AgentOptions&)> each_;
  std::vector<std::unique_ptr<rpc::Agent>> agents_;
};

/// Throws if `condition` is false. For threads of ranks, where Catch2's assertions are not allowed.
inline void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

}  // namespace distrain::testing
