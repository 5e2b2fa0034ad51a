// A class whose instances are counted, functions that use RRefs to it, and checks for leaks.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "distrain/rpc/agent.h"
#include "gate.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::testing {

using namespace std::chrono_literals;

// A value that counts its live instances over all agents of this process.
struct Tracked {
  using Constructor = Tracked(int64_t value);
  explicit Tracked(int64_t v) : value(v) { ++alive; }
  Tracked(const Tracked& other) : value(other.value) { ++alive; }
  ~Tracked() { --alive; }
  int64_t get() const { return value; }
  int64_t value;
  static inline std::atomic<int> alive{0};
};
using Ref = rpc::RRef<Tracked>;

// The RRefs that a rank keeps for a test.
struct Shelf {
  std::mutex mutex;
  std::vector<Ref> refs;
};

inline int64_t value_of(const Ref& ref) {
  return ref.is_owner() ? ref.local_value().get() : ref.rpc_sync<&Tracked::get>();
}
inline Ref echo(const Ref& ref) { return ref; }
inline Ref make(rpc::CallContext& context, int owner, int64_t value) {
  return context.agent.remote_new<Tracked>(owner, value);
}
inline Tracked make_by_value(int64_t value) { return Tracked(value); }
inline void shelve(rpc::CallContext& context, const Ref& ref) {
  Shelf& shelf = context.agent.local<Shelf>();
  std::lock_guard lock(shelf.mutex);
  shelf.refs.push_back(ref);
}

inline void expose_tracked(rpc::Agent& agent) {
  agent.expose_class<Tracked>("Tracked");
  agent.expose<&Tracked::get>("Tracked.get");
  agent.expose<&value_of>("value_of");
  agent.expose<&add>("add");
  agent.expose<&echo>("echo");
  agent.expose<&make>("make");
  agent.expose<&make_by_value>("make_by_value");
  agent.expose<&shelve>("shelve");
  agent.provide(std::make_shared<Shelf>());
}

template <class F>
bool eventually(F holds, std::chrono::milliseconds limit = 30s) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

// Waits until all RRefs and their values are released. The test fails if that takes too long.
inline void check_all_gone(Cluster& cluster) {
  const auto live = [&] {
    std::vector<size_t> counts;
    for (int rank = 0; rank < cluster.size(); ++rank) counts.push_back(cluster[rank].live_rrefs());
    return counts;
  };
  const std::vector<size_t> none(static_cast<size_t>(cluster.size()), 0);
  const bool gone = eventually([&] { return live() == none && Tracked::alive == 0; });
  CAPTURE(live(), Tracked::alive.load());  // these counts may be newer than those in `gone`
  CHECK(gone);
}

inline void check_all_gone_and_shutdown(Cluster& cluster) {
  check_all_gone(cluster);
  cluster.shutdown();
  check_all_gone(cluster);
}

}  // namespace distrain::testing
