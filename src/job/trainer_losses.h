#pragma once

#include <cstdint>
#include <optional>

#include "distrain/job/job.h"
#include "distrain/rpc/agent.h"

namespace distrain::job {

/// What rank 0 does with other ranks when a job goes on without a lost trainer. Thread-safe.
class TrainerLosses {
 public:
  /// Trainers are ranks from `first_rank` on; `least` of them are to be left.
  TrainerLosses(rpc::Agent& agent, int first_rank, int trainers, int least);

  /// On every rank, before it joins. `sink` is told that its rank may be lost.
  static void expose(rpc::Agent& agent, EventSink& sink);

  /// The training begins: from here on a loss does not end the job. Waits for all ranks.
  void begin();
  /// It is over: nobody comes any more in the place of one that is lost.
  void end();
  /// The trainer that a rank is; none.
  std::optional<int> trainer_of(int rank) const;
  /// No rank waits for that trainer's steps until it makes one.
  void rest(int trainer) const;

 private:
  void go_on_without_any(bool may_return) const;

  rpc::Agent& agent_;
  const int first_rank_;
  const int trainers_;
  const int least_;
};

/// Calls `ask` with each rank and waits for the answers; a rank that the job does without has none.
void ask_all(rpc::Agent& agent, const std::function<base::Future<void>(int rank)>& ask);

}  // namespace distrain::job
