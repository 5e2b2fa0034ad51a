#pragma once

#include <mutex>
#include <shared_mutex>

namespace distrain::rpc {

class AgentCore;

/// Gives replies access to their agent until it ends; a reply may outlive its agent. Thread-safe.
class ReplyGate {
 public:
  explicit ReplyGate(AgentCore& core) : core_(&core) {}
  /// Calls `use(core)` if the agent has not ended, and delays its end meanwhile.
  template <class F>
  void enter(const F& use) {
    std::shared_lock lock(mutex_);
    if (core_) use(*core_);
  }
  /// Ends the access; returns when no enter() is running.
  void close() {
    std::lock_guard lock(mutex_);
    core_ = nullptr;
  }

 private:
  std::shared_mutex mutex_;
  AgentCore* core_;
};

}  // namespace distrain::rpc
