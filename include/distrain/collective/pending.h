#pragma once

#include <memory>

#include "distrain/base/clock.h"
#include "distrain/base/future.h"

namespace distrain::collective {

class Operation;

/// A collective operation under way. A handle: copies share it. Thread-safe.
///
/// Keep it and wait for it: the result of a small operation is computed by the thread that waits,
/// so that it needs no other thread; if nobody waits, the result is never written.
class Pending {
 public:
  Pending() = default;
  explicit Pending(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  bool valid() const { return operation_ != nullptr; }

  /// Whether wait() would return or throw at once. Computes what can be computed.
  bool done() const;

  /// Blocks until the result is in the tensors of the call. Throws `Exception`: peer_lost naming
  /// the rank, deadline naming the ranks that did not send, invalid when the ranks called different
  /// operations (naming both), or the error with which a rank refused to take part.
  void wait() const;

  /// False when `limit` passed first; the operation stays under way. Throws as wait().
  bool wait_until(base::TimePoint limit) const;

  /// Ends an operation that is not complete yet as if its own deadline had passed.
  void expire() const;

  /// Ends an operation that is not complete yet with `error` on this rank.
  void fail(base::Error error) const;

  /// For those who cannot wait: a thread of the backend's executor waits in their place.
  base::Future<void> future() const;

 private:
  std::shared_ptr<Operation> operation_;
};

}  // namespace distrain::collective
