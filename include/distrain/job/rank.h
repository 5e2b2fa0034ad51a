#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/job/job.h"
#include "distrain/rpc/agent.h"

namespace distrain::job {

/// The ranks of a job by what they do: some of one role, then some of the next.
class Roles {
 public:
  struct Role {
    std::string name;
    int first = 0;  ///< rank
    int count = 1;
    bool numbered = false;  ///< its ranks are called by its name and their number: trainer3
  };

  void add(const std::string& name, int count, bool numbered);
  int world_size() const;
  /// `internal` if there is no such role.
  const Role& named(const std::string& name) const;
  const Role& of(int rank) const;
  /// What a rank is called, and its RPC worker.
  std::string name_of(int rank) const;
  std::vector<std::string> names() const;

 private:
  std::vector<Role> roles_;
};

/// Before what was averaged is saved or judged: waits until `device` has done what it was given,
/// and throws what went wrong after the group's waits were over. Does nothing on CPUs.
void check_averages(const collective::ReduceGroup& group, c10::Device device);

/// The ranks of one role as they work together: on each of them, one that was made there.
class Group {
 public:
  Group(rpc::Agent& agent, const Roles::Role& role, uint16_t channel,
        std::chrono::milliseconds timeout);

  /// On the CPU: allreduce, broadcast, barrier and the others of c10d::Backend.
  const c10::intrusive_ptr<collective::Backend>& backend() const { return backend_; }
  /// What averages gradients, wherever they are: for DistributedDataParallel.
  operator std::shared_ptr<collective::ReduceGroup>() const { return reduce_; }  // NOLINT
  /// How it does so, where it is not on CPUs: nccl or staged.
  const std::string& how() const { return how_; }
  /// check_averages() of its ReduceGroup.
  void check(c10::Device device) const { check_averages(*reduce_, device); }

 private:
  c10::intrusive_ptr<collective::Backend> backend_;
  std::shared_ptr<collective::ReduceGroup> reduce_;
  std::string how_;
};

class TrainingHost;

/// One rank of a running job: what its role's function works with.
class Rank {
 public:
  Rank(rpc::Agent& agent, const Job& job, const Roles& roles, EventSink& sink);

  rpc::Agent& agent() const { return agent_; }
  int number() const { return agent_.rank(); }
  const std::string& name() const { return agent_.name(); }
  const Roles& roles() const { return roles_; }
  const std::string& role() const { return role_.name; }
  /// Its place among the ranks of its role, from 0, and how many these are.
  int index() const { return number() - role_.first; }
  int count() const { return role_.count; }
  c10::Device device() const { return agent_.device(); }
  /// What other ranks call has it as call.agent.local<job::Job>().
  const Job& job() const { return job_; }
  EventSink& sink() const { return sink_; }

  /// The ranks of this rank's own role, or of another that it is one of. Collective the first time:
  /// all of them ask for it before any of them does anything else with the others, and before
  /// Training::run(). It lives as long as the role's function runs.
  const Group& group(const std::string& role);
  bool has_group() const { return !groups_.empty(); }
  /// The training begins: whether its trainers go at one pace is settled.
  void close_groups() { groups_closed_ = true; }
  /// Group::check() of all groups that this rank has made.
  void check_groups() const;

  /// Fields of this rank's last line.
  Json& fields() { return fields_; }
  /// The job ends in good order, but without what it was for: exit code 11, with this message. To
  /// be said by rank 0; nothing if the job is stopped by a signal.
  void miss_goal(std::string message) { missed_goal_ = std::move(message); }

  // ---- for the kit ----
  void release_groups() { groups_.clear(); }
  const std::string& missed_goal() const { return missed_goal_; }

 private:
  rpc::Agent& agent_;
  const Job& job_;
  const Roles roles_;
  const Roles::Role role_;
  EventSink& sink_;
  std::map<std::string, Group> groups_;
  bool groups_closed_ = false;
  Json fields_ = Json::object();
  std::string missed_goal_;
};

}  // namespace distrain::job
