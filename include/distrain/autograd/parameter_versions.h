#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/base/thread_state.h"
#include "distrain/rpc/agent.h"

namespace distrain::autograd {

class Runtime;

// Note [Parameter versions]
//
// A backward pass fails if a parameter that its graph has saved has changed since. So a forward
// pass over shared parameters works on versions of them: tensors that share the parameter's storage
// and gradient edge, with a version counter of their own. If the parameter is the only tensor in
// its storage, an update writes in place. Otherwise an in-flight pass has saved a version: the
// parameter moves to a copy, and the pass keeps the old storage until it ends. So a parameter must
// own its storage alone: a view of it, or a tied weight elsewhere, would keep the old values.
//
// On an accelerator, reads and updates wait for each other's streams: from the constructors on for
// parameters on the agent's device, from version() and unshare() on for parameters elsewhere.
//
// A module that is reused for many passes renews its versions when no graph has saved them. Idle
// versions would make updates copy parameters, so updates first ask VersionKeepers to release them.
// A lookup with sparse gradients causes no copy, unless its pass has saved the table (trained
// per-sample weights, a tied decoder).

/// A reader-writer lock. A reader that arrives while a writer waits enters after that writer, so
/// overlapping reads do not starve updates. A thread that waits for the lock counts as blocked
/// (base::BlockingScope). While a reader is blocked elsewhere, such as in a nested call, new
/// readers do not queue behind writers, because the blocked reader may depend on a new reader.
class ParameterLock {
 public:
  void lock_shared() {
    {
      std::lock_guard lock(mutex_);
      if (may_read_locked()) return static_cast<void>(++readers_);
    }
    const base::BlockingScope waits;  // outside `lock`: an outer ParameterRead locks `mutex_`
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return may_read_locked(); });
    ++readers_;
  }
  void unlock_shared() {
    std::lock_guard lock(mutex_);
    if (--readers_ == 0) changed_.notify_all();
  }
  void lock() {
    {
      std::lock_guard lock(mutex_);
      if (may_write_locked()) return static_cast<void>(writing_ = true);
    }
    const base::BlockingScope waits;
    std::unique_lock lock(mutex_);
    ++waiting_writers_;
    changed_.wait(lock, [this] { return may_write_locked(); });
    --waiting_writers_;
    writing_ = true;
  }
  void unlock() {
    std::lock_guard lock(mutex_);
    writing_ = false;
    changed_.notify_all();
  }
  void add_blocked_readers(int change) {
    std::lock_guard lock(mutex_);
    blocked_readers_ += change;
    changed_.notify_all();
  }

 private:
  bool may_read_locked() const {
    return !writing_ && (waiting_writers_ == 0 || blocked_readers_ > 0);
  }
  bool may_write_locked() const { return !writing_ && readers_ == 0; }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool writing_ = false;
  int readers_ = 0, blocked_readers_ = 0, waiting_writers_ = 0;
};

/// A scoped lock that prevents updates of the agent's parameters. Keep its scope short. A thread
/// must destroy the locks that it created, in reverse order.
class ParameterRead final : base::BlockObserver {
 public:
  explicit ParameterRead(rpc::Agent& agent);
  ~ParameterRead() override { base::thread_state().observer = outer_; }
  ParameterRead(const ParameterRead&) = delete;
  ParameterRead& operator=(const ParameterRead&) = delete;

  /// Returns a version of the leaf `parameter` for one forward pass; see Note [Parameter versions].
  /// The version requires a gradient if `parameter` does and gradients are enabled.
  at::Tensor version(const at::Tensor& parameter) const;

  /// Makes `version` share the storage of `parameter`. The gradient edge of `version` stays the
  /// same. The caller ensures that no graph has saved `version`.
  void renew(const at::Tensor& version, const at::Tensor& parameter) const;

 private:
  void on_block() override {
    if (outer_) outer_->on_block();
    lock_.mutex()->add_blocked_readers(+1);
  }
  void on_unblock() override {
    lock_.mutex()->add_blocked_readers(-1);
    if (outer_) outer_->on_unblock();
  }

  Runtime& runtime_;
  std::shared_lock<ParameterLock> lock_;
  base::BlockObserver* const outer_;  // the thread's observer before this object
};

/// Returns versions of `parameters` as a consistent snapshot, with no update in between.
std::vector<at::Tensor> current_versions(rpc::Agent& agent,
                                         const std::vector<at::Tensor>& parameters);

/// An owner of versions that several passes use; see Note [Parameter versions].
class VersionKeeper {
 public:
  virtual ~VersionKeeper() = default;
  /// Releases the storage of versions that no pass uses. The caller holds the ParameterLock.
  virtual void release_versions() = 0;
};

/// Registers `keeper`. While the keeper lives, each update calls its release_versions() first.
void add_version_keeper(rpc::Agent& agent, std::weak_ptr<VersionKeeper> keeper);

/// A scoped lock of the agent's parameters for writing.
class ParameterUpdate {
 public:
  explicit ParameterUpdate(rpc::Agent& agent);
  ParameterUpdate(const ParameterUpdate&) = delete;
  ParameterUpdate& operator=(const ParameterUpdate&) = delete;

  /// Makes it safe to write `parameter` in place: if an in-flight pass has saved a version of the
  /// parameter, moves the parameter to new memory and returns true.
  bool unshare(const at::Tensor& parameter) const;

 private:
  Runtime& runtime_;
  std::unique_lock<ParameterLock> lock_;
};

}  // namespace distrain::autograd
