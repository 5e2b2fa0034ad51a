#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "distrain/base/executor.h"
#include "distrain/base/future.h"
#include "distrain/rpc/error.h"

namespace distrain::rpc {

/// Answers requests from many threads in passes over all that wait.
///
/// Nobody waits for company: who asks while no pass runs makes one at once, on the own thread, and
/// what comes meanwhile goes into the next, all of it in one. So the batches are as large as the
/// passes are slow, and a single asker never waits.
///
///   kIdle     nothing waits. ask() → kRunning, and the asker makes a pass over its own request.
///   kRunning  one thread makes passes, always the only one; ask() puts its request on the list.
///             When a pass is over and nothing waits: → kIdle. Else the next pass is the
///             executor's, because the asker has its answer and wants to go.
///
/// A pass that throws fails the requests it was for, and no others; a pass that the executor drops
/// cancels them, and → kIdle. `executor` must outlive the batcher, and the batcher its futures:
/// with the last of them it may go, so that their completion is the last thing a pass does.
template <class Request, class Answer>
class Batcher {
 public:
  /// One answer for each request, in their order. Never runs twice at the same time.
  using Pass = std::function<std::vector<Answer>(const std::vector<Request>&)>;

  Batcher(base::Executor& executor, Pass pass) : executor_(executor), pass_(std::move(pass)) {}

  base::Future<Answer> ask(Request request) {
    base::Promise<Answer> promise;
    base::Future<Answer> answer = promise.future();
    {
      std::lock_guard lock(mutex_);
      requests_.push_back(std::move(request));
      promises_.push_back(std::move(promise));
      if (state_ == State::kRunning) return answer;
      state_ = State::kRunning;
    }
    make_pass();
    return answer;
  }

 private:
  enum class State { kIdle, kRunning };

  /// The right to make the next pass, which a task carries. Destroyed unused, it gives up.
  struct GiveUp {
    void operator()(Batcher* batcher) const { batcher->cancel_waiting(); }
  };
  using Turn = std::unique_ptr<Batcher, GiveUp>;

  void make_pass() {
    std::vector<Request> requests;
    std::vector<base::Promise<Answer>> promises;
    {
      std::lock_guard lock(mutex_);
      requests.swap(requests_);
      promises.swap(promises_);
    }
    std::vector<Answer> answers;
    std::optional<base::Error> error;
    try {
      answers = pass_(requests);
    } catch (...) {
      error = error_in_flight(base::ErrorKind::kInternal);
    }
    bool more = false;
    {
      std::lock_guard lock(mutex_);
      more = !requests_.empty();
      if (!more) state_ = State::kIdle;
    }
    // Outside the lock: an executor that has stopped destroys the task at once.
    if (more) executor_.post([turn = Turn(this)]() mutable { turn.release()->make_pass(); });
    if (error) {
      for (auto& promise : promises) promise.fail(*error);
    } else {
      for (size_t i = 0; i < answers.size(); ++i) promises[i].set(std::move(answers[i]));
    }
  }

  void cancel_waiting() {
    std::vector<base::Promise<Answer>> promises;  // destroyed unfulfilled, outside the lock
    std::lock_guard lock(mutex_);
    requests_.clear();
    promises.swap(promises_);
    state_ = State::kIdle;
  }

  base::Executor& executor_;
  const Pass pass_;
  std::mutex mutex_;
  State state_ = State::kIdle;
  std::vector<Request> requests_;
  std::vector<base::Promise<Answer>> promises_;  // of the requests, in their order
};

}  // namespace distrain::rpc
