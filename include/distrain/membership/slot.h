#pragma once

#include <memory>
#include <vector>

#include "distrain/membership/loss.h"
#include "distrain/membership/options.h"

namespace distrain::membership {

/// The rank in the options of a process to which rank 0 assigns a free rank.
inline constexpr int kUnassignedRank = wire::kUnassignedRank;

class ControlPlane;

/// A slot of a job, reserved for a process that was not assigned a rank: for example the rank of a
/// lost process, in a job that continues without it. Rank 0 gives the rank to no other process
/// until this process has joined as that rank or this object is destroyed.
class Slot {
 public:
  /// `options` are the options of the agent that is going to join; their `rank` is ignored.
  explicit Slot(Options options);
  ~Slot();
  /// Returns a free rank, given by rank 0. Retries until the join timeout. Blocks; call it once.
  /// Throws the errors of rpc::Agent::join(), and `rendezvous` if no rank was free.
  int reserve();
  /// Returns the wait of reserve(), if reserve() is running. Thread-safe.
  std::vector<Wait> waits() const;

 private:
  Options options_;
  // Declared after the members that the loop's handlers use, so that the loop's thread ends first.
  net::Loop loop_;
  std::shared_ptr<ControlPlane> control_;
};

}  // namespace distrain::membership
