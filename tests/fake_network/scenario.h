#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "rank.h"

namespace distrain::fake_network {

/// The kinds of faults that a scenario can inject. `a`, `b` and `group` are members of Fault.
enum class FaultKind {
  kDie,
  kStop,
  kAbort,
  kFailAtGo,
  kGarbage,       ///< sends an invalid message on a control connection
  kResetControl,  ///< breaks the connection between rank 0 and `a`
  kResetCalls,    ///< breaks a connection for calls
  kCut,           ///< blocks messages between `a` and `b` without an error
  kIsolate,       ///< blocks messages between `a` and all other ranks
  kPartition,     ///< blocks messages between `group` and all other ranks
  kJoinTwice,     ///< a second process claims to be `a`
  kStranger,      ///< a foreign process connects to `a` and sends nothing or an invalid message
  kComesLate,     ///< `a` starts late by `offset`
  kRunsOut,  ///< `a` aborts for lack of a resource such as memory, which is no other rank's fault
};
inline constexpr int kFaultKinds = 13;  // the kinds of one() and many(): all but the last

/// The direction in which a cut blocks messages, as seen from rank `a` or `group`.
enum class Way { kBoth, kFrom, kTo };

struct Fault {
  FaultKind kind = FaultKind::kDie;
  Phase phase = Phase::kRunning;  ///< the fault happens `offset` after this phase begins
  Duration offset{};
  int a = 0;
  int b = 0;
  std::set<int> group;
  Way way = Way::kBoth;
  std::optional<Duration> lasts;  ///< nullopt: forever
  /// The delay until a new process replaces the failed rank; nullopt: no process does.
  std::optional<Duration> replacement;
  int more_deaths = 0;  ///< how many replacements of the rank die soon after their start

  std::string text() const;
};

/// The planned events of a run. A recipe determines all of them. It has the name of one of the
/// static functions, a seed, the number of ranks (0: random) and the function's other parameters:
///
///   clean 17 100       no fault
///   one 17 100 3 2     a fault of that FaultKind in that Phase
///   many 17 100        up to four faults
///   tolerant 17 100    losses that the job survives, and returns
struct Scenario {
  std::string recipe;
  uint64_t seed = 0;
  Job job;
  Duration longest_start{};  ///< the longest random delay until a rank starts
  std::vector<Fault> faults;

  static Scenario clean(uint64_t seed, int ranks);
  static Scenario one(uint64_t seed, int ranks, FaultKind kind, Phase phase);
  static Scenario many(uint64_t seed, int ranks);
  static Scenario tolerant(uint64_t seed, int ranks);
  static Scenario parse(const std::string& recipe);
  std::string text() const;
  /// Returns the longest silence of a rank that no other rank may take for a loss: the peer timeout
  /// less the heartbeat interval and network delays.
  Duration harmless() const;
};

}  // namespace distrain::fake_network
