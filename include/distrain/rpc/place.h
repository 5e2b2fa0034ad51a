#pragma once

#include <memory>
#include <vector>

#include "distrain/rpc/agent.h"
#include "distrain/wire/handshake.h"

namespace distrain::rpc {

/// The rank in the options of a process that takes any free rank.
inline constexpr int kAnyRank = wire::kAnyRank;

/// Reserves a free rank of a job, for a process that was not assigned one: for example the rank of
/// a lost process, in a job that continues without it. Rank 0 gives the rank to no other process
/// until this process has joined as that rank or this object is destroyed.
class Place {
 public:
  /// `options` are the options of the agent that is going to join; their `rank` is ignored.
  explicit Place(AgentOptions options);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  /// Returns a free rank, given by rank 0. Retries until the join timeout. Blocks; call it once.
  /// Throws the errors of Agent::join(), and `rendezvous` if no rank was free.
  int take();
  /// Returns the wait of take(), if take() is running. Thread-safe.
  std::vector<Wait> waits() const;

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace distrain::rpc
