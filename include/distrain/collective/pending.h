#pragma once

#include <memory>

#include "distrain/base/clock.h"
#include "distrain/base/future.h"

namespace distrain::collective {

class Operation;

/// A handle of an in-flight collective operation; copies share the operation. Thread-safe.
///
/// Call wait(): the waiting thread computes the result of a small operation, which saves waking
/// another thread. If no thread waits, that result is never written.
class Pending {
 public:
  Pending() = default;
  explicit Pending(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  bool valid() const { return operation_ != nullptr; }

  /// Returns true if wait() would return or throw at once. Runs the steps that are ready.
  bool done() const;

  /// Blocks until the result is in the tensors of the call. Throws `peer_lost` with the lost rank,
  /// `deadline` with the ranks that sent nothing, `invalid` if the ranks called different
  /// operations (naming both), or the error of a rank that refused to take part.
  void wait() const;

  /// Returns false if `limit` passes first; the operation goes on. Throws as wait() does.
  bool wait_until(base::TimePoint limit) const;

  /// Ends an incomplete operation as if its deadline had passed.
  void expire() const;

  /// Fails an incomplete operation with `error` on this rank.
  void fail(base::Error error) const;

  /// Returns a future for callers that cannot block; a thread of the backend's executor waits.
  base::Future<void> future() const;

 private:
  std::shared_ptr<Operation> operation_;
};

}  // namespace distrain::collective
