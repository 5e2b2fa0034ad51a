#pragma once

#include <memory>
#include <vector>

#include "distrain/rpc/agent.h"
#include "distrain/wire/handshake.h"

namespace distrain::rpc {

/// Of a process that is to be whichever rank nobody else is.
inline constexpr int kAnyRank = wire::kAnyRank;

/// A rank of a job that nobody else is, for a process that was not told which one it is to be: the
/// place of one that was lost, say, in a job that goes on without it. Rank 0 keeps it from others
/// who ask until this process has joined as that rank, or this object is gone.
class Place {
 public:
  /// `options` as of the agent that is to join; their rank does not count.
  explicit Place(AgentOptions options);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  /// Asks rank 0, and while that is not there or has no place, again and again until the join
  /// timeout. Blocks; once. Throws as Agent::join() does, `rendezvous` too if there was no place.
  int take();
  /// What take() waits for. Thread-safe.
  std::vector<Wait> waits() const;

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace distrain::rpc
