#pragma once

#include <memory>
#include <vector>

#include "distrain/membership/loss.h"
#include "distrain/membership/options.h"

namespace distrain::membership {

/// A process with this rank in its options asks rank 0 to assign a free rank.
inline constexpr int kUnassignedRank = wire::kUnassignedRank;

class ControlPlane;

/// Reserves a free rank for a process without a rank: for example the rank of a lost process, in a
/// job that continues without it. Rank 0 gives the rank to no other process until this process has
/// joined as that rank or this object is destroyed.
class Slot {
 public:
  /// `options` are the options of the agent that is going to join; their `rank` is ignored.
  explicit Slot(Options options);
  ~Slot();
  /// Returns the free rank that rank 0 has reserved. Blocks; retries until the join timeout. Must
  /// be called once only. Throws as rpc::Agent::join() does, and `rendezvous` if no rank is free.
  int reserve();
  /// Returns one Wait, for reserve(), while reserve() runs; otherwise nothing. Thread-safe.
  std::vector<Wait> waits() const;

 private:
  Options options_;
  // Declared after the members that the loop's handlers use, so that the loop's thread ends first.
  net::Loop loop_;
  std::shared_ptr<ControlPlane> control_;
};

}  // namespace distrain::membership
