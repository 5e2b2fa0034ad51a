#include "scenario.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace distrain::fake_network {

namespace {

double in_seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

template <typename T>
T one_of(base::Random& random, std::initializer_list<T> values) {
  return *(values.begin() + random.below(values.size()));
}

Duration up_to(base::Random& random, Duration longest) {
  return std::chrono::duration_cast<Duration>(longest * random.unit());
}

int draw_size(base::Random& random) {
  switch (random.below(4)) {
    case 0:
      return static_cast<int>(random.between(2, 4));
    case 1:
      return static_cast<int>(random.between(2, 100));
    default:
      return static_cast<int>(random.between(2, 16));
  }
}

// Returns a fault of this kind and phase. All its other properties are random.
Fault draw_fault(base::Random& random, const Scenario& scenario, FaultKind kind, Phase phase) {
  const Job& job = scenario.job;
  Fault fault;
  fault.kind = kind;
  fault.phase = phase;
  const Duration phases[] = {scenario.longest_start, job.longest_prepare, job.longest_work,
                             seconds(2)};
  fault.offset = up_to(random, phases[static_cast<size_t>(fault.phase)]);
  const auto size = static_cast<uint64_t>(job.size);
  const auto any = [&] { return static_cast<int>(random.below(size)); };
  const auto member = [&] { return 1 + static_cast<int>(random.below(size - 1)); };
  fault.a = random.below(6) == 0 ? 0 : any();
  switch (fault.kind) {
    case FaultKind::kResetControl:
    case FaultKind::kJoinTwice:
      fault.a = member();
      break;
    case FaultKind::kCut:
      fault.a = random.below(2) == 0 ? 0 : any();
      do {
        fault.b = any();
      } while (fault.b == fault.a);
      break;
    case FaultKind::kIsolate:
      fault.group = {fault.a};
      break;
    case FaultKind::kPartition:
      for (int i = 0, count = member(); i < count; ++i) fault.group.insert(member());
      break;
    default:
      break;
  }
  fault.way = one_of(random, {Way::kBoth, Way::kFrom, Way::kTo});
  if (fault.kind == FaultKind::kComesLate) {
    if (random.below(2) == 0) fault.lasts = up_to(random, job.join_timeout / 2);
  } else if (random.below(2) == 0) {
    fault.lasts = up_to(random, scenario.harmless());
  } else if (random.below(3) != 0) {
    fault.lasts = seconds(in_seconds(job.peer_timeout) * (1 + 3 * random.unit()));
  }
  if (random.below(3) != 0) fault.replacement = up_to(random, seconds(5));
  return fault;
}

const char* name_of(FaultKind kind) {
  constexpr const char* kNames[] = {"dies",
                                    "is stopped",
                                    "aborts",
                                    "fails at go",
                                    "says garbage",
                                    "loses its control connection",
                                    "loses a connection for calls",
                                    "is cut off from",
                                    "is isolated",
                                    "partition",
                                    "joins twice",
                                    "has a stranger",
                                    "comes late",
                                    "runs out of something"};
  return kNames[static_cast<size_t>(kind)];
}

Scenario draw_job(base::Random& random, const std::string& way, uint64_t seed, int ranks) {
  Scenario scenario;
  scenario.recipe = way + ' ' + std::to_string(seed) + ' ' + std::to_string(ranks);
  scenario.seed = seed;
  Job& job = scenario.job;
  job.size = draw_size(random);
  if (ranks > 0) job.size = ranks;
  job.peer_timeout = seconds(one_of(random, {1.0, 2.0, 5.0, 10.0}));
  job.join_timeout = seconds(60);
  job.longest_delay = std::min(seconds(one_of(random, {0.001, 0.02, 0.1})), job.peer_timeout / 20);
  job.longest_prepare = seconds(one_of(random, {0.05, 1.0}));
  job.longest_work = seconds(one_of(random, {0.5, 5.0, 20.0}));
  job.longest_reaction = seconds(one_of(random, {0.001, 0.2}));
  job.calls_per_rank = one_of(random, {0.0, 0.5, 2.0});
  scenario.longest_start = seconds(one_of(random, {0.05, 3.0}));
  return scenario;
}

// Returns a random fault of a rank that may be lost. A stop or a cut is either too short to be
// noticed or so long that all ranks notice it.
Fault draw_tolerated_fault(base::Random& random, const Scenario& scenario) {
  const Job& job = scenario.job;
  const std::vector<int> tolerated(job.tolerated.begin(), job.tolerated.end());
  const auto any = [&] { return tolerated[random.below(tolerated.size())]; };
  Fault fault;
  fault.kind =
      one_of(random, {FaultKind::kDie, FaultKind::kDie, FaultKind::kDie, FaultKind::kDie,
                      FaultKind::kStop, FaultKind::kStop, FaultKind::kResetControl, FaultKind::kCut,
                      FaultKind::kRunsOut, FaultKind::kRunsOut, FaultKind::kResetCalls});
  fault.phase = random.below(4) == 0 ? Phase::kEnding : Phase::kRunning;
  fault.offset = up_to(random, fault.phase == Phase::kEnding ? seconds(2) : job.longest_work / 2);
  fault.a = any();
  fault.b = random.below(2) == 0 ? 0 : any();
  if (fault.b == fault.a) fault.b = 0;
  fault.way = one_of(random, {Way::kBoth, Way::kFrom, Way::kTo});
  const Duration noticed = job.peer_timeout + (job.peer_timeout - scenario.harmless());
  if (random.below(3) == 0) {
    fault.lasts = up_to(random, scenario.harmless());
  } else if (random.below(3) != 0) {
    fault.lasts = noticed + up_to(random, 2 * job.peer_timeout);
  }
  const bool is_silence = fault.kind == FaultKind::kStop || fault.kind == FaultKind::kCut;
  fault.replacement = up_to(random, seconds(one_of(random, {0.02, 0.5, 3.0})));
  if (is_silence && random.below(8) != 0) *fault.replacement += noticed;
  if (random.below(4) == 0) fault.replacement.reset();
  if (random.below(3) == 0) fault.more_deaths = 1 + static_cast<int>(random.below(3));
  return fault;
}

}  // namespace

Duration Scenario::harmless() const {
  const Duration interval = std::min(seconds(1), job.peer_timeout / 4);
  return job.peer_timeout - interval - 6 * job.longest_delay - seconds(0.01);
}

Scenario Scenario::clean(uint64_t seed, int ranks) {
  base::Random random({seed, 0x636c65616e});
  return draw_job(random, "clean", seed, ranks);
}

Scenario Scenario::one(uint64_t seed, int ranks, FaultKind kind, Phase phase) {
  base::Random random({seed, 0x6f6e65});
  Scenario scenario = draw_job(random, "one", seed, ranks);
  scenario.recipe += ' ' + std::to_string(static_cast<int>(kind));
  scenario.recipe += ' ' + std::to_string(static_cast<int>(phase));
  scenario.faults.push_back(draw_fault(random, scenario, kind, phase));
  return scenario;
}

Scenario Scenario::many(uint64_t seed, int ranks) {
  base::Random random({seed, 0x7363656e});
  Scenario scenario = draw_job(random, "many", seed, ranks);
  for (uint64_t count = random.below(5); count > 0; --count) {
    const auto kind = static_cast<FaultKind>(random.below(kFaultKinds));
    const auto phase = static_cast<Phase>(random.below(4));
    scenario.faults.push_back(draw_fault(random, scenario, kind, phase));
  }
  return scenario;
}

// Draws losses and replacements. Sometimes many ranks die at once; sometimes a fault ends the job.
Scenario Scenario::tolerant(uint64_t seed, int ranks) {
  base::Random random({seed, 0x746f6c});
  Scenario scenario = draw_job(random, "tolerant", seed, ranks);
  Job& job = scenario.job;
  for (int rank = 1; rank < job.size; ++rank) {
    if (random.below(4) != 0) job.tolerated.insert(rank);
  }
  if (job.tolerated.empty()) job.tolerated.insert(1);
  if (random.below(4) == 0) job.least = 1 + random.below(job.tolerated.size());
  job.door = one_of(random, {Door::kClosesInTheMidst, Door::kClosesAtEnd, Door::kStaysOpen});
  const uint64_t most = 2 + static_cast<uint64_t>(job.size) / 6;
  for (uint64_t count = 1 + random.below(most); count > 0; --count) {
    scenario.faults.push_back(draw_tolerated_fault(random, scenario));
  }
  if (random.below(10) == 0) {
    Fault& fault = scenario.faults.front();
    fault.kind = one_of(random, {FaultKind::kGarbage, FaultKind::kAbort, FaultKind::kDie});
    if (fault.kind == FaultKind::kDie) {
      fault.a = static_cast<int>(random.below(static_cast<uint64_t>(job.size)));
    }
  }
  if (random.below(3) == 0) {
    Fault fault = draw_tolerated_fault(random, scenario);
    fault.kind = FaultKind::kDie;
    fault.phase = Phase::kRunning;
    for (const int rank : job.tolerated) {
      if (random.below(4) != 0) continue;
      fault.a = rank;
      scenario.faults.push_back(fault);
    }
  }
  return scenario;
}

Scenario Scenario::parse(const std::string& recipe) {
  std::istringstream words(recipe);
  std::string way;
  uint64_t seed = 0;
  int ranks = 0;
  int kind = 0;
  int phase = 0;
  words >> way >> seed >> ranks;
  if (!words) throw std::invalid_argument("not the recipe of a scenario: '" + recipe + "'");
  if (way == "clean") return clean(seed, ranks);
  if (way == "many") return many(seed, ranks);
  if (way == "tolerant") return tolerant(seed, ranks);
  words >> kind >> phase;
  if (!words || way != "one" || kind < 0 || kind >= kFaultKinds || phase < 0 || phase >= 4) {
    throw std::invalid_argument("not the recipe of a scenario: '" + recipe + "'");
  }
  return one(seed, ranks, static_cast<FaultKind>(kind), static_cast<Phase>(phase));
}

std::string Fault::text() const {
  std::ostringstream text;
  constexpr const char* kPhases[] = {"meeting", "preparing", "running", "ending"};
  text << in_seconds(offset) << " s into " << kPhases[static_cast<size_t>(phase)] << ": ";
  if (kind == FaultKind::kPartition) {
    text << "partition of";
    for (const int rank : group) text << ' ' << rank;
  } else {
    text << a << ' ' << name_of(kind);
  }
  if (kind == FaultKind::kCut) text << ' ' << b;
  if (kind == FaultKind::kCut || kind == FaultKind::kIsolate || kind == FaultKind::kPartition) {
    text << (way == Way::kBoth ? ", both ways" : way == Way::kFrom ? ", from it" : ", to it");
  }
  if (lasts) {
    text << ", for " << in_seconds(*lasts) << " s";
  } else {
    text << ", for ever";
  }
  return text.str();
}

std::string Scenario::text() const {
  std::ostringstream text;
  text << recipe << ": " << job.size << " ranks, timeout " << in_seconds(job.peer_timeout)
       << " s, delays up to " << in_seconds(job.longest_delay) * 1000 << " ms";
  if (!job.tolerated.empty()) {
    text << ", goes on without " << job.tolerated.size() - job.least << " of";
    for (const int rank : job.tolerated) text << ' ' << rank;
  }
  for (const Fault& fault : faults) text << "\n  " << fault.text();
  return text.str();
}

}  // namespace distrain::fake_network
