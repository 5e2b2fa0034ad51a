#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "rank.h"

namespace distrain::fake_network {

enum class FaultKind {
  kDie,
  kStop,
  kAbort,
  kFailAtGo,
  kGarbage,       ///< on a control connection
  kResetControl,  ///< breaks the connection between rank 0 and `a`
  kResetCalls,    ///< breaks a connection for calls
  kCut,           ///< silently, between `a` and `b`
  kIsolate,       ///< separates `a` from all others
  kPartition,     ///< separates `group` from all others
  kJoinTwice,     ///< a second process claims to be `a`
  kStranger,      ///< connects to `a` and sends nothing or an invalid message
  kComesLate,     ///< `a` starts late by `offset`
  kRunsOut,  ///< `a` aborts for lack of resources, such as memory, which is not the others' fault
};
inline constexpr int kFaultKinds = 13;  // the kinds that may be drawn: all but the last

/// The direction in which messages are cut off.
enum class Way { kBoth, kFrom, kTo };

struct Fault {
  FaultKind kind = FaultKind::kDie;
  Phase phase = Phase::kRunning;  ///< it happens `offset` after this phase begins
  Duration offset{};
  int a = 0;
  int b = 0;
  std::set<int> group;
  Way way = Way::kBoth;
  std::optional<Duration> lasts;  ///< nullopt: forever
  /// The delay until a new process replaces a rank that died before go or that may be lost.
  std::optional<Duration> replacement;
  int more_deaths = 0;  ///< the number of replacements that die, too, soon after they have joined

  std::string text() const;
};

/// The planned events of a run. A recipe determines all of them: the name of a drawing function, a
/// seed, the number of ranks (0: drawn, too) and the function's other parameters, such as
///
///   clean 17 100       no fault
///   one 17 100 3 2     a fault of that FaultKind in that Phase
///   many 17 100        up to four faults
///   tolerant 17 100    losses that the job survives, and returns
struct Scenario {
  std::string recipe;
  uint64_t seed = 0;
  Job job;
  Duration longest_start{};  ///< the longest delay until a rank starts, except the first
  std::vector<Fault> faults;

  static Scenario clean(uint64_t seed, int ranks);
  static Scenario one(uint64_t seed, int ranks, FaultKind kind, Phase phase);
  static Scenario many(uint64_t seed, int ranks);
  static Scenario tolerant(uint64_t seed, int ranks);
  static Scenario parse(const std::string& recipe);
  std::string text() const;
  /// Returns the longest silence that may pass unnoticed: the timeout less a heartbeat interval.
  Duration harmless() const;
};

}  // namespace distrain::fake_network
