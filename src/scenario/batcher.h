#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "distrain/base/executor.h"
#include "distrain/base/future.h"
#include "distrain/rpc/error.h"

namespace distrain::scenario {

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
/// A pass that throws fails the requests it was for, and no others. `executor` must outlive the
/// batcher, and the batcher its futures.
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

  void make_pass() {
    std::vector<Request> requests;
    std::vector<base::Promise<Answer>> promises;
    {
      std::lock_guard lock(mutex_);
      requests.swap(requests_);
      promises.swap(promises_);
    }
    std::vector<Answer> answers;
    try {
      answers = pass_(requests);
    } catch (...) {
      const base::Error error = rpc::error_in_flight(base::ErrorKind::kInternal);
      for (auto& promise : promises) promise.fail(error);
    }
    {
      std::lock_guard lock(mutex_);
      if (requests_.empty()) {
        state_ = State::kIdle;
      } else {
        executor_.post([this] { make_pass(); });
      }
    }
    for (size_t i = 0; i < answers.size(); ++i) promises[i].set(std::move(answers[i]));
  }

  base::Executor& executor_;
  const Pass pass_;
  std::mutex mutex_;
  State state_ = State::kIdle;
  std::vector<Request> requests_;
  std::vector<base::Promise<Answer>> promises_;  // of the requests, in their order
};

}  // namespace distrain::scenario
