#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/net/loop.h"
#include "distrain/rpc/agent.h"

namespace distrain::rpc {

/// The calls of this rank that wait for their reply. Each ends once: by its reply, its deadline or
/// the loss of its peer, whichever is first. Thread-safe.
class PendingCalls {
 public:
  struct Call {
    base::Promise<RawReply> promise;
    int to = -1;
    std::string function;
    base::TimePoint started;
    base::TimePoint deadline = base::kNever;
    uint64_t context = 0;
    uint64_t autograd_id = 0;         // of its arguments, in the context
    bool is_remote = false;           // its reply has no value
    const char* traced_as = nullptr;  // the function's name if the call is traced, else null
    std::vector<std::shared_ptr<const void>> holds;  // keeps alive what the arguments refer to
  };

  /// Called for each call that fails, before its future fails. May be called on the loop.
  /// `given_up`: this rank no longer waits, but the peer may still run the call.
  using OnFailure = std::function<void(uint64_t id, const Call& call, bool given_up)>;

  PendingCalls(net::Loop& loop, base::Executor& executor, int rank,
               std::shared_ptr<base::Tracer> tracer, OnFailure on_failure)
      : loop_(loop),
        executor_(executor),
        rank_(rank),
        tracer_(std::move(tracer)),
        on_failure_(std::move(on_failure)) {}

  /// Returns false, and fails the call, after fail_all().
  bool add(uint64_t id, Call call);
  /// Take out, or fail, the call `id` if it went to `from` and still waits.
  std::optional<Call> take(uint64_t id, int from);
  void fail(uint64_t id, int from, base::Error error);

  /// Sets the deadline of the call `id`, which had none, if it still waits.
  void set_deadline(uint64_t id, base::TimePoint deadline);
  bool is_waiting(uint64_t id) const;

  /// Ends the call `id`, whose future nobody waits for any more.
  void give_up(uint64_t id, int to);

  std::vector<Wait> waits();

  void fail_all_to(int rank, const base::Error& error);
  /// Also makes later calls fail at once.
  void fail_all(const base::Error& error);

  /// Returns a future that is complete when no call waits. One at a time.
  base::Future<void> drained();

 private:
  using Calls = std::unordered_map<uint64_t, Call>;

  void expire_on_loop(base::TimePoint when);
  void arm_locked();
  /// Takes a call out of `calls_` and ends it in the trace.
  std::pair<uint64_t, Call> take_locked(Calls::iterator it);
  /// Takes out the calls to `rank`; if it is -1, all calls.
  std::vector<std::pair<uint64_t, Call>> take_all(int rank);
  /// Called with `mutex_` locked. Unlocks it before it completes the promise.
  void complete_if_drained(std::unique_lock<std::mutex> lock);
  void fail_taken(uint64_t id, Call& call, base::Error error, bool given_up = false);

  net::Loop& loop_;
  base::Executor& executor_;
  const int rank_;
  const std::shared_ptr<base::Tracer> tracer_;
  const OnFailure on_failure_;
  mutable std::mutex mutex_;
  Calls calls_;
  std::set<std::pair<base::TimePoint, uint64_t>> deadlines_;
  base::TimePoint armed_for_ = base::kNever;
  std::optional<base::Error> closed_;
  std::optional<base::Promise<void>> drained_;
};

}  // namespace distrain::rpc
