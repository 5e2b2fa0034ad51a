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

    bool has(int rank) const { return rank >= first && rank < first + count; }
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

/// The ranks of one role as they work together: on each of them, one that was made there.
struct Group {
  /// On the CPU: allreduce, broadcast, barrier and the others of c10d::Backend.
  c10::intrusive_ptr<collective::Backend> backend;
  /// What averages gradients, wherever they are: for DistributedDataParallel.
  std::shared_ptr<collective::ReduceGroup> reduce;
  operator std::shared_ptr<collective::ReduceGroup>() const { return reduce; }  // NOLINT
};

/// One process of a running job, as its functions see it.
class Process {
 public:
  Process(const Job& job, EventSink& sink) : job_(job), sink_(sink) {}
  Process(const Process&) = delete;

  /// On a rank other ranks' calls have it as call.agent.local<job::Job>().
  const Job& job() const { return job_; }
  EventSink& sink() const { return sink_; }
  c10::Device device() const { return job_.device(); }

  /// Fields of this process's last line. The job's last line has those of the first rank with each.
  Json& fields() { return fields_; }
  /// The job ends in good order, but without what it was for: exit code 11, with this message. To
  /// be said by rank 0; nothing if the job is stopped by a signal.
  void miss_goal(std::string message) { missed_goal_ = std::move(message); }
  const std::string& missed_goal() const { return missed_goal_; }

 private:
  const Job& job_;
  EventSink& sink_;
  Json fields_ = Json::object();
  std::string missed_goal_;
};

/// One rank of a running job: what its role's function works with.
class Rank : public Process {
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

  /// The ranks of this rank's own role, or of another that it is one of. Collective the first time:
  /// all of them ask for it before any of them does anything else with the others, and before
  /// Training::run(). It lives as long as the role's function runs.
  const Group& group(const std::string& role);
  bool has_group() const { return !groups_.empty(); }

  // ---- for the kit ----
  /// The training begins: whether its trainers go at one pace is settled.
  void close_groups() { groups_closed_ = true; }
  /// Of all groups: ReduceGroup::check().
  void check_groups() const {
    for (const auto& [role, group] : groups_) group.reduce->check(device());
  }
  void release_groups() { groups_.clear(); }

 private:
  rpc::Agent& agent_;
  const Roles roles_;
  const Roles::Role role_;
  std::map<std::string, Group> groups_;
  bool groups_closed_ = false;
};

}  // namespace distrain::job
