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
// Torch's graph keeps the parameters that its backward will need, and refuses to use one that was
// changed since. So an update that comes between another trainer's forward and backward pass breaks
// that pass. Here a forward pass over shared parameters works on versions of them: tensors that lie
// in the same storage, with a version counter of their own, whose gradient is the parameter's.
// Nothing is copied for that. An update looks at how many tensors lie in the parameter's storage:
// if it is alone it writes in place; otherwise some pass in flight has saved a version, and the
// parameter moves to a copy, while that pass keeps what it was built on until it ends.
//
// So a parameter must lie in its storage alone: a view of it that somebody keeps, or a tied weight
// in another tensor, would be left behind with the old values.
//
// On an accelerator reads and updates wait for each other's streams: for those of the parameters on
// the agent's device from the start, for those of others from version() and unshare() on.
//
// What is to be a version again and again, such as a parameter of a module that is kept for many
// passes, is renewed: it may be as soon as no graph has saved it. One that is idle lies in the
// parameter's storage, too, and would have every update copy; so whoever keeps such versions is
// asked to let go of them before an update looks.
//
// The same holds for row-wise updates of embedding tables. A lookup with sparse gradients saves
// nothing of its table, so the table is not copied although such passes are in flight. A pass that
// has saved the table (trained weights per sample, a tied decoder) costs a copy.

/// A reader-writer lock. A reader that comes while a writer waits enters after that writer, so that
/// overlapping reads do not starve updates. A thread that waits for the lock counts as blocked
/// (base::BlockingScope). A reader that is blocked on something else, such as a nested call, may
/// depend on a later reader: as long as it is, new readers do not wait for waiting writers.
class ParameterLock {
 public:
  void lock_shared();
  void unlock_shared();
  void lock();
  void unlock();
  void add_blocked_readers(int change);

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

/// While it lives no parameter of the agent changes. Short: take versions, or look something up.
/// It ends on the thread that made it; of several on one thread the last one made ends first.
class ParameterRead final : base::BlockObserver {
 public:
  explicit ParameterRead(rpc::Agent& agent);
  ~ParameterRead() override;
  ParameterRead(const ParameterRead&) = delete;
  ParameterRead& operator=(const ParameterRead&) = delete;

  /// `parameter` (a leaf) as it is now, for one forward pass; see the note. A leaf that requires no
  /// gradient gives one that requires none either.
  at::Tensor version(const at::Tensor& parameter) const;

  /// Makes `version`, a tensor that no graph has saved any more, one of `parameter` as it is now.
  /// Where its gradient goes is not changed.
  void renew(const at::Tensor& version, const at::Tensor& parameter) const;

 private:
  void on_block() override;
  void on_unblock() override;

  Runtime& runtime_;
  std::shared_lock<ParameterLock> lock_;
  base::BlockObserver* const outer_;  // of this thread
};

/// Versions of several parameters, all of the same moment: no update lies between them.
std::vector<at::Tensor> current_versions(rpc::Agent& agent,
                                         const std::vector<at::Tensor>& parameters);

/// Keeps versions from pass to pass.
class VersionKeeper {
 public:
  virtual ~VersionKeeper() = default;
  /// Takes the storage from versions that no pass uses, while none is taken or renewed.
  virtual void let_go() = 0;
};

/// Has it asked before every update from now on, as long as it lives.
void add_version_keeper(rpc::Agent& agent, std::weak_ptr<VersionKeeper> keeper);

/// To be held by whoever changes parameters of the agent.
class ParameterUpdate {
 public:
  explicit ParameterUpdate(rpc::Agent& agent);
  ParameterUpdate(const ParameterUpdate&) = delete;
  ParameterUpdate& operator=(const ParameterUpdate&) = delete;

  /// Makes it safe to write to all of `parameter` in place: it moves to a copy if a pass in flight
  /// has saved a version of it. Gives back whether it moved.
  bool unshare(const at::Tensor& parameter) const;

 private:
  Runtime& runtime_;
  std::unique_lock<ParameterLock> lock_;
};

}  // namespace distrain::autograd
