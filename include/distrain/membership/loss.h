#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/wire/handshake.h"

namespace distrain::membership {

// Note [Incarnations]
//
// A job may continue without a rank that is lost, and a new process may then replace that rank: it
// is the rank's next incarnation, counted from 0. Threads of all ranks may still hold calls,
// references and contexts of the lost process. They are not mistaken for the new process's, because
//
//  - each id contains the process that made it: 12 bits of incarnation, 12 bits of rank (0 in call
//    ids, because the connection identifies the rank), 40 bits of a counter. So a reply to a call
//    of the lost process matches no call of the new one;
//  - the state that a rank keeps for another rank (connection, credit, queued calls) belongs to
//    one incarnation and is created anew for the next;
//  - a reference names its owner by rank and incarnation, so it does not refer to the new process;
//  - the hello on a connection between ranks contains both numbers: Note [Identity].

inline constexpr int kMaxRanks = 4095;
/// The maximum number of processes that can have the same rank, one after the other.
inline constexpr uint32_t kMaxIncarnations = 4096;

/// Identifies one process of a job: its incarnation and its rank in one number.
using ProcessNumber = uint32_t;

constexpr ProcessNumber process_number(int rank, uint32_t incarnation) {
  return incarnation << 12 | static_cast<uint32_t>(rank);
}
constexpr int rank_of(ProcessNumber process) { return static_cast<int>(process & 0xFFF); }
constexpr uint32_t incarnation_of(ProcessNumber process) { return process >> 12; }

constexpr uint64_t make_id(ProcessNumber maker, uint64_t number) {
  return uint64_t{maker} << 40 | (number & ((uint64_t{1} << 40) - 1));
}
constexpr ProcessNumber maker_of(uint64_t id) { return static_cast<ProcessNumber>(id >> 40); }

/// Describes which process of which rank is lost, and why.
struct Loss {
  int rank = -1;
  base::Error error;  ///< peer_lost, or the reason that the rank sent when it left
  /// True if the job continues and a new process may replace the rank; false if all ranks end.
  bool job_goes_on = false;
  uint32_t incarnation = 0;  ///< incarnation of the lost process

  ProcessNumber process() const { return process_number(rank, incarnation); }
};

/// The losses after which a job continues.
struct Tolerance {
  std::set<int> ranks;      ///< the job may continue after the loss of one of these
  size_t least = 1;         ///< number of `ranks` that must remain
  std::string if_too_few;   ///< appended to the job's error if fewer of `ranks` remain
  bool may_return = false;  ///< new processes may replace lost ranks
};

/// An operation that waits for other ranks, described for people: see rpc::Agent::waits().
struct Wait {
  std::string what;  ///< names the awaited ranks: for example "rank 2 to join"
  base::TimePoint since;
};

/// Returns "rank 3", or "a new rank" if `rank` is wire::kUnassignedRank.
inline std::string rank_text(int rank) {
  return rank == wire::kUnassignedRank ? "a new rank" : "rank " + std::to_string(rank);
}

/// Returns "rank 3 (trainer 2)".
inline std::string rank_text(int rank, const std::string& name) {
  return "rank " + std::to_string(rank) + " (" + name + ")";
}

/// Returns a list such as "1, 2".
inline std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace distrain::membership
