#pragma once

#include <cstdint>

#include "distrain/base/error.h"

namespace distrain::rpc {

// Note [Incarnations]
//
// A job may go on without a rank that is lost, and a new process may take its place: the next
// incarnation of that rank, counted from 0. Threads of all ranks may still have calls, references
// and contexts of the one before. So that these are not taken for the new one's,
//
//  - each id begins with the process that made it: 12 bits of incarnation, 12 of rank (0 in those
//    of calls, whose rank is known by the connection), 40 of a number of its own. A reply to a call
//    of the dead one finds no call of that id;
//  - what a rank keeps for another one (connection, credit, queued calls) is of one incarnation,
//    and is made anew for the next;
//  - a reference names its owner by rank and incarnation: its value has gone with the process;
//  - the hello of a connection between ranks says both: Note [Identity].

inline constexpr int kMaxRanks = 4095;
/// Processes that a rank's place can have one after the other.
inline constexpr uint32_t kMaxIncarnations = 4096;

/// One process of a job: its incarnation and its rank in one number.
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

/// A rank that is gone.
struct Loss {
  int rank = -1;
  base::Error error;  ///< peer_lost, or the reason that it gave
  /// The rest of the job goes on: a new process may take its place. Otherwise all ranks end.
  bool job_goes_on = false;
  uint32_t incarnation = 0;  ///< of the process that is gone

  ProcessNumber process() const { return process_number(rank, incarnation); }
};

}  // namespace distrain::rpc
