#pragma once

#include <mutex>
#include <shared_mutex>

namespace distrain::rpc {

class AgentCore;

/// What leads a late answer to its agent, or nowhere once that has ended. Thread-safe.
class ReplyGate {
 public:
  explicit ReplyGate(AgentCore& core) : core_(&core) {}
  /// Calls `use(core)` unless the agent has ended, which it does not meanwhile.
  template <class F>
  void enter(const F& use) {
    std::shared_lock lock(mutex_);
    if (core_) use(*core_);
  }
  /// Returns when nobody is in it any more.
  void close() {
    std::lock_guard lock(mutex_);
    core_ = nullptr;
  }

 private:
  std::shared_mutex mutex_;
  AgentCore* core_;
};

}  // namespace distrain::rpc
