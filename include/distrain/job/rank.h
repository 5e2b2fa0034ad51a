#pragma once

#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/job/job.h"
#include "distrain/rpc/agent.h"

namespace distrain::job {

/// The roles of a job's ranks. The ranks of a role are consecutive.
class Roles {
 public:
  struct Role {
    std::string name;
    int first = 0;  ///< the number of the role's first rank
    int count = 1;
    bool numbered = false;  ///< the names of the ranks end in the rank's number: trainer3

    bool has(int rank) const { return rank >= first && rank < first + count; }
  };

  void add(const std::string& name, int count, bool numbered) {
    roles_.push_back({name, world_size(), count, numbered});
  }
  int world_size() const { return roles_.empty() ? 0 : roles_.back().first + roles_.back().count; }
  /// Returns the role of this name. Throws `internal` if there is none.
  const Role& named(const std::string& name) const {
    const auto it = std::ranges::find(roles_, name, &Role::name);
    if (it != roles_.end()) return *it;
    throw base::Exception(base::ErrorKind::kInternal, "the job has no role " + name);
  }
  const Role& of(int rank) const {
    const auto it = std::ranges::find_if(roles_, [&](const Role& role) { return role.has(rank); });
    if (it != roles_.end()) return *it;
    throw base::Exception(base::ErrorKind::kInternal,
                          "the job has no rank " + std::to_string(rank));
  }
  /// Returns the rank's name, as in rpc::Agent::name().
  std::string name_of(int rank) const {
    const Role& role = of(rank);
    return role.numbered ? role.name + std::to_string(rank) : role.name;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (int rank = 0; rank < world_size(); ++rank) names.push_back(name_of(rank));
    return names;
  }

 private:
  std::vector<Role> roles_;
};

/// Collective operations between the ranks of one role.
struct Group {
  /// The operations of c10d::Backend (allreduce, broadcast, barrier, …) for CPU tensors.
  c10::intrusive_ptr<collective::Backend> backend;
  /// Averages gradients on any device, for DistributedDataParallel.
  std::shared_ptr<collective::ReduceGroup> reduce;
  operator std::shared_ptr<collective::ReduceGroup>() const { return reduce; }  // NOLINT
};

/// The base of Rank and SingleProcess: the job, the event sink, and fields of the last JSON line.
class Process {
 public:
  Process(const Job& job, EventSink& sink) : job_(job), sink_(sink) {}
  Process(const Process&) = delete;

  /// Returns the job. Functions that other ranks call get it by call.agent.local<job::Job>().
  const Job& job() const { return job_; }
  EventSink& sink() const { return sink_; }
  c10::Device device() const { return job_.device(); }

  /// Returns the fields that this process adds to its `end` or `rank_end` line. In the job's `end`,
  /// `steps` is the sum over the ranks, `train_s` is the maximum, and a metric has the value of the
  /// lowest rank that sets it.
  Json& fields() { return fields_; }
  /// Notes that the job misses its goal. Must be called on rank 0. The job then ends normally, but
  /// prints `message` and exits with code 11. Has no effect if a signal stops the job.
  void miss_goal(std::string message) { missed_goal_ = std::move(message); }
  const std::string& missed_goal() const { return missed_goal_; }

 private:
  const Job& job_;
  EventSink& sink_;
  Json fields_ = Json::object();
  std::string missed_goal_;
};

/// One rank of a running job: the argument of its role's function.
class Rank : public Process {
 public:
  Rank(rpc::Agent& agent, const Job& job, const Roles& roles, EventSink& sink)
      : Process(job, sink), agent_(agent), roles_(roles), role_(roles.of(agent.rank())) {}

  rpc::Agent& agent() const { return agent_; }
  int number() const { return agent_.rank(); }
  const std::string& name() const { return agent_.name(); }
  const Roles& roles() const { return roles_; }
  const std::string& role() const { return role_.name; }
  int index() const { return number() - role_.first; }  ///< index in its role, from 0
  int count() const { return role_.count; }             ///< number of ranks of its role

  /// Returns the group of `role`, which must be this rank's role. The first call is collective: all
  /// ranks of the role make it before they communicate in any other way and before Training::run().
  /// The group exists until the role's function returns.
  const Group& group(const std::string& role);
  bool has_group() const { return !groups_.empty(); }

  // ---- for Training and run_rank() only ----
  void close_groups() { groups_closed_ = true; }  ///< makes group() refuse to create groups
  /// Waits for all work on device() and throws if a reduction of any group has failed.
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
