#pragma once

#include <functional>
#include <mutex>
#include <optional>

#include "distrain/base/executor.h"
#include "distrain/base/future.h"
#include "distrain/rpc/error.h"

namespace distrain::rpc {

/// Answers requests from many threads in batches. One call of a Pass function answers one batch.
///
/// If no pass is running, ask() runs one on the calling thread for its own request. Requests that
/// arrive during a pass are answered together by the next pass, on the executor. So batches grow
/// with the duration of a pass, and a single thread never waits for others.
///
/// If a pass throws, only the requests of its batch fail. If the executor drops a pass, the waiting
/// requests are cancelled. `executor` must outlive the batcher. The batcher must live until all its
/// futures are done, but no longer, because a pass completes them as its last step.
template <class Request, class Answer>
class Batcher {
 public:
  /// Returns one answer for each request, in the same order. Calls never overlap.
  using Pass = std::function<std::vector<Answer>(const std::vector<Request>&)>;

  Batcher(base::Executor& executor, Pass pass) : executor_(executor), pass_(std::move(pass)) {}

  base::Future<Answer> ask(Request request) {
    base::Promise<Answer> promise;
    base::Future<Answer> answer = promise.future();
    {
      std::lock_guard lock(mutex_);
      requests_.push_back(std::move(request));
      promises_.push_back(std::move(promise));
      if (std::exchange(is_running_, true)) return answer;
    }
    make_pass();
    return answer;
  }

 private:
  /// Deleter in a queued task: cancels the waiting requests if the executor drops the task.
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
      is_running_ = more;
    }
    // Posts without the lock, because a stopped executor destroys the task, which locks mutex_.
    if (more) executor_.post([turn = Turn(this)]() mutable { turn.release()->make_pass(); });
    if (error) {
      for (auto& promise : promises) promise.fail(*error);
    } else {
      for (size_t i = 0; i < answers.size(); ++i) promises[i].set(std::move(answers[i]));
    }
  }

  void cancel_waiting() {
    std::vector<base::Promise<Answer>> promises;  // cancelled by destructors, without the lock
    std::lock_guard lock(mutex_);
    requests_.clear();
    promises.swap(promises_);
    is_running_ = false;
  }

  base::Executor& executor_;
  const Pass pass_;
  std::mutex mutex_;
  bool is_running_ = false;  // a pass is running or queued
  std::vector<Request> requests_;
  std::vector<base::Promise<Answer>> promises_;  // one for each request
};

}  // namespace distrain::rpc
