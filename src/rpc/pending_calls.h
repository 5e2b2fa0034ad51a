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

/// The calls of this rank that wait for their reply. Each ends once: by the reply, its deadline or
/// its peer's loss, whichever takes it out first. Thread-safe.
class PendingCalls {
 public:
  struct Call {
    base::Promise<RawReply> promise;
    int to = -1;
    std::string function;
    base::TimePoint started;
    base::TimePoint deadline = base::kNever;
    uint64_t context = 0;
    uint64_t autograd_id = 0;                        // of its arguments, in the context
    bool is_remote = false;                          // nobody reads its reply
    const char* traced_as = nullptr;                 // not null: the call is to be in the trace
    std::vector<std::shared_ptr<const void>> holds;  // what the arguments refer to
  };

  /// Is told of each call that fails before those who wait for it are. On the loop, too.
  /// `given_up`: nobody waits any more, but its peer may still be at it.
  using OnFailure = std::function<void(uint64_t id, const Call& call, bool given_up)>;

  PendingCalls(net::Loop& loop, base::Executor& executor, int rank,
               std::shared_ptr<base::Tracer> tracer, OnFailure on_failure)
      : loop_(loop),
        executor_(executor),
        rank_(rank),
        tracer_(std::move(tracer)),
        on_failure_(std::move(on_failure)) {}

  /// False, with the call failed, after fail_all().
  bool add(uint64_t id, Call call);
  /// The call `id`, if it went to `from` and is still waiting.
  std::optional<Call> take(uint64_t id, int from);
  /// Fails the call `id`, if it went to `from` and is still waiting.
  void fail(uint64_t id, int from, base::Error error);

  /// Of the call `id`, if it is still waiting; it had none before.
  void set_deadline(uint64_t id, base::TimePoint deadline);
  bool is_waiting(uint64_t id) const;

  /// Whoever waited for the call `id` does so no more.
  void give_up(uint64_t id, int to);

  std::vector<Wait> waits();

  void fail_all_to(int rank, const base::Error& error);
  /// Those that come later fail at once.
  void fail_all(const base::Error& error);

  /// Done when no call waits (any more). One at a time.
  base::Future<void> drained();

 private:
  using Calls = std::unordered_map<uint64_t, Call>;

  void expire_on_loop(base::TimePoint when);
  void arm_locked();
  /// Takes a call out of the calls that wait, and ends it in the trace.
  std::pair<uint64_t, Call> take_locked(Calls::iterator it);
  /// Takes out the calls to `rank`, or all calls if it is -1.
  std::vector<std::pair<uint64_t, Call>> take_all(int rank);
  void tell_if_drained();
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
