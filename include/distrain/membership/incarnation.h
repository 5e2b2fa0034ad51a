#pragma once

#include <cstdint>

namespace distrain::membership {

// Note [Incarnations]
//
// A job may continue without a rank that is lost, and a new process may then replace that rank: it
// is the rank's next incarnation, counted from 0. Threads of all ranks may still hold calls,
// references and contexts of the lost process. These are not mistaken for the new one's, because
//
//  - each id contains the process that made it: 12 bits of incarnation, 12 bits of rank (0 in call
//    ids, because the connection identifies the rank), 40 bits of a counter. So a reply to a call
//    of the lost process matches no call of the new one;
//  - the state that a rank keeps for another rank (connection, credit, queued calls) belongs to
//    one incarnation and is created anew for the next;
//  - a reference names its owner by rank and incarnation, so it does not refer to the new process;
//  - the hello on a connection between ranks contains both numbers: Note [Identity].

inline constexpr int kMaxRanks = 4095;
/// The number of processes that can have the same rank, one after the other.
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

}  // namespace distrain::membership
