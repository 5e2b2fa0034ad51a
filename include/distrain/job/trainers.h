#pragma once

#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/job/job.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/agent.h"

namespace distrain::job {

// What all jobs with trainers set up alike.

/// How trainer `participant` of `trainers` shares parameters with the others; `mode` as on the
/// command line.
optim::Sharing sharing_by_mode(const std::string& mode, int trainers, int participant,
                               int64_t staleness = 0);

/// The collectives of the trainers, which are the ranks [first, first + trainers). Made by each.
c10::intrusive_ptr<collective::Backend> trainers_backend(rpc::Agent& agent, int first, int trainers,
                                                         const Job& job);

/// What averages the gradients of a model that the trainers have on their devices.
struct TrainersGroup {
  std::shared_ptr<collective::ReduceGroup> group;
  std::string how;  ///< for `ddp` in the log; empty on CPUs
};
TrainersGroup trainers_group(rpc::Agent& agent,
                             const c10::intrusive_ptr<collective::Backend>& backend);

/// Before what was averaged is saved or judged: waits until `device` has done what it was given,
/// and throws what went wrong after the group's waits were over, if anything did. Does nothing on
/// CPUs.
void check_averages(const TrainersGroup& group, c10::Device device);

/// Says how, where it is not on CPUs.
void tell(const TrainersGroup& group, EventSink& sink);

/// `bad_data` for a trainer that has not read what the first one has read.
[[noreturn]] void refuse_other_data(int rank, const std::string& what_must_agree);

}  // namespace distrain::job
