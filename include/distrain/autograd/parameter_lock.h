#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace distrain::autograd {

/// A reader-writer lock under which neither side starves: a reader that comes while a writer waits
/// enters after that writer and before the next one. A thread that waits for the lock counts as
/// blocked (base::BlockingScope); waiting throws `overloaded` if no other thread can be started.
///
/// A reader that blocks on something else, such as a nested call, may depend on a reader that has
/// not entered yet. So while such a reader is blocked, new readers do not wait for waiting writers.
class ParameterLock {
 public:
  void lock_shared();
  void unlock_shared();
  void lock();
  void unlock();

  /// Reports that `change` more readers are blocked on something else.
  void add_blocked_readers(int change);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool writing_ = false;
  int readers_ = 0;
  int blocked_readers_ = 0;
  int waiting_writers_ = 0;
  int waiting_readers_ = 0;
  int readers_due_ = 0;  // that have waited for a writer, and enter before the next one
  uint64_t writes_ = 0;
};

}  // namespace distrain::autograd
