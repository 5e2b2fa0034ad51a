#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "rank.h"

namespace distrain::simulation {

enum class FaultKind {
  kDie,
  kStop,
  kAbort,
  kFailAtGo,
  kGarbage,       ///< on a control connection
  kResetControl,  ///< the connection between rank 0 and `a`
  kResetCalls,    ///< one of those for calls
  kCut,           ///< between `a` and `b`, in silence
  kIsolate,       ///< `a` from all others
  kPartition,     ///< `group` from all others
  kJoinTwice,     ///< a second process says that it is `a`
  kStranger,      ///< connects to `a` and says nothing, or something wrong
  kComesLate,     ///< `a` starts so much later than it should
  kRunsOut,       ///< of memory, say: it aborts, which is no fault of the others
};
inline constexpr int kFaultKinds = 13;  // that are drawn from; not the last

/// Which way what is cut does not get through.
enum class Way { kBoth, kFrom, kTo };

struct Fault {
  FaultKind kind = FaultKind::kDie;
  Phase phase = Phase::kRunning;  ///< in which it happens, so long after its beginning
  Duration offset{};
  int a = 0;
  int b = 0;
  std::set<int> group;
  Way way = Way::kBoth;
  std::optional<Duration> lasts;  ///< for ever otherwise
  /// A new process, so much later: of who is gone before the ranks have met, or who may be lost.
  std::optional<Duration> replacement;
  int more_deaths = 0;  ///< so many replacements die, too, soon after they have come

  std::string text() const;
};

/// What happens in a run, but for what follows from it. A recipe settles all of it: the way in
/// which it is drawn, a seed, the number of ranks (0: drawn, too) and what else that way takes, as
/// in
///
///   clean 17 100       no fault
///   one 17 100 3 2     a fault of that FaultKind in that Phase
///   many 17 100        up to four faults
///   tolerant 17 100    ranks that the job goes on without are lost, and come back
struct Scenario {
  std::string recipe;
  uint64_t seed = 0;
  Job job;
  Duration longest_start{};  ///< of a rank, after the first
  std::vector<Fault> faults;

  static Scenario clean(uint64_t seed, int ranks);
  static Scenario one(uint64_t seed, int ranks, FaultKind kind, Phase phase);
  static Scenario many(uint64_t seed, int ranks);
  static Scenario tolerant(uint64_t seed, int ranks);
  static Scenario parse(const std::string& recipe);
  std::string text() const;
  /// Silence that is no loss for certain: less than the timeout by the time between two heartbeats.
  Duration harmless() const;
};

}  // namespace distrain::simulation
