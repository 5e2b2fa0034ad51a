// Note [One clock]
//
// The monotonic clocks of machines begin at different moments and run at slightly different speeds.
// Ranks on one machine have one clock (a "domain" below): their times are right as they are.
//
// 1. Estimate. For each clock but rank 0's there are two readings of the offset, from the beginning
//    and the end of the job, which all ranks with that clock share. In between it is interpolated,
//    which takes care of a constant drift; outside, the nearer one holds. Each reading is off by
//    half its round trip at most, say 50 us, which is more than a call takes one way: arrows could
//    point backwards.
//
// 2. Repair. A flow that leaves domain a at t_a and arrives in b at t_b says that b's clock must be
//    ahead by c_b - c_a >= t_a - t_b, with c the correction of each domain. The largest of these
//    differences for each pair of domains is the weight of an edge from a to b, and the smallest
//    corrections that satisfy all are the longest paths from anywhere with c = 0: Bellman and
//    Ford's relaxation, done after as many rounds as there are domains unless a cycle has a sum
//    above zero. For clocks whose drift is constant there is none, since the true offsets satisfy
//    every flow.
//
// 3. If there is such a cycle (a clock was slewed meanwhile), no constant will do. Then the
//    corrections become functions of time that only grow, by steps (a "controlled logical clock",
//    Rabenseifner 1997, without its smoothing): the flows' ends are looked at in an order in which
//    everything comes after what caused it, and where one still arrives too early, its domain is
//    late from there on. That always succeeds, as effects never caused their causes.
//
// All maps of times are monotonic, so that slices of a thread stay within each other or apart.

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "distrain/rpc/trace.h"
#include "trace_export.h"

namespace distrain::rpc {

namespace {

using base::RankTrace;
using base::TraceEvent;
using Kind = TraceEvent::Kind;

// Ranks may say of their clocks what they like (within kMostTime). What comes of that beyond this
// is as good as any other time, and stays where further sums fit.
constexpr int64_t kMostAligned = 2 * kMostTime;
int64_t clamped(int64_t time) { return std::clamp(time, -kMostAligned, kMostAligned); }

template <class F>
void map_times(RankTrace& rank, F map) {
  for (base::TraceTrack& track : rank.tracks) {
    for (TraceEvent& event : track.events) {
      event.start = map(event.start);
      event.end = map(event.end);
      if (event.kind == Kind::kFlowOut) event.value = map(event.value);
    }
  }
}

void estimate(RankTrace& rank, const RankClock& clock) {
  if (clock.readings.empty()) return;
  const ClockReading& first = clock.readings.front();
  const ClockReading& last = clock.readings.back();
  const auto span = static_cast<double>(last.at - first.at);
  const auto gained = static_cast<double>(last.offset - first.offset);
  if (span <= 0 || std::abs(gained) > span / 2) {  // too short a time to tell a drift
    const ClockReading& best = last.round_trip < first.round_trip ? last : first;
    return map_times(rank, [&](int64_t t) { return clamped(t + best.offset); });
  }
  map_times(rank, [&](int64_t t) {
    const auto since = static_cast<double>(std::clamp(t, first.at, last.at) - first.at);
    return clamped(t + first.offset + std::llround(gained / span * since));
  });
}

struct Flow {
  size_t from = 0;  // domains
  size_t to = 0;
  int64_t left = 0;
  int64_t arrived = 0;
};

/// The flows from one clock to another that have both ends.
std::vector<Flow> flows_between(const std::vector<RankTrace>& ranks,
                                const std::vector<size_t>& domains) {
  std::unordered_map<uint64_t, Flow> begun;
  const auto for_all = [&](Kind kind, auto fn) {
    for (size_t r = 0; r < ranks.size(); ++r) {
      for (const base::TraceTrack& track : ranks[r].tracks) {
        for (const TraceEvent& event : track.events) {
          if (event.kind == kind) fn(event, domains[r]);
        }
      }
    }
  };
  for_all(Kind::kFlowOut, [&](const TraceEvent& event, size_t domain) {
    begun[event.id] = {domain, domain, event.value, 0};
  });
  std::vector<Flow> flows;
  for_all(Kind::kFlowIn, [&](const TraceEvent& event, size_t domain) {
    const auto it = begun.find(event.id);
    if (it == begun.end() || it->second.from == domain) return;
    flows.push_back(it->second);
    flows.back().to = domain;
    flows.back().arrived = event.start;
  });
  return flows;
}

/// Step 2. False if there is no solution, or none of clocks that there are.
bool relax(const std::vector<Flow>& flows, std::vector<int64_t>& corrections) {
  const size_t domains = corrections.size();
  constexpr int64_t kNone = std::numeric_limits<int64_t>::min();
  std::vector<int64_t> weights(domains * domains, kNone);
  for (const Flow& flow : flows) {
    int64_t& weight = weights[flow.from * domains + flow.to];
    weight = std::max(weight, flow.left - flow.arrived);
  }
  for (size_t round = 0; round <= domains; ++round) {
    bool changed = false;
    for (size_t a = 0; a < domains; ++a) {
      for (size_t b = 0; b < domains; ++b) {
        const int64_t weight = weights[a * domains + b];
        if (weight == kNone || corrections[b] >= corrections[a] + weight) continue;
        corrections[b] = corrections[a] + weight;
        if (corrections[b] > kMostAligned) return false;
        changed = true;
      }
    }
    if (!changed) return true;
  }
  return false;
}

/// A correction that holds from `from` on.
struct Step {
  int64_t from = 0;
  int64_t correction = 0;
};

int64_t correction_at(const std::vector<Step>& steps, int64_t time) {
  const auto after = std::upper_bound(steps.begin(), steps.end(), time,
                                      [](int64_t t, const Step& step) { return t < step.from; });
  return after == steps.begin() ? 0 : std::prev(after)->correction;
}

/// Step 3: the steps of each domain.
std::vector<std::vector<Step>> follow(const std::vector<Flow>& flows, size_t domains) {
  struct End {
    int64_t time;
    bool leaves;  // at the same time: what arrives comes first, as its step holds there already
    size_t flow;
  };
  std::vector<std::vector<End>> ends(domains);
  for (size_t i = 0; i < flows.size(); ++i) {
    ends[flows[i].from].push_back({flows[i].left, true, i});
    ends[flows[i].to].push_back({flows[i].arrived, false, i});
  }
  for (auto& own : ends) {
    std::sort(own.begin(), own.end(), [](const End& a, const End& b) {
      return std::pair(a.time, a.leaves) < std::pair(b.time, b.leaves);
    });
  }
  std::vector<std::vector<Step>> steps(domains);
  std::vector<size_t> next(domains, 0);
  std::vector<int64_t> left(flows.size(), std::numeric_limits<int64_t>::max());
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t d = 0; d < domains; ++d) {
      for (; next[d] < ends[d].size(); ++next[d], moved = true) {
        const End& end = ends[d][next[d]];
        const int64_t correction = steps[d].empty() ? 0 : steps[d].back().correction;
        if (end.leaves) {
          left[end.flow] = clamped(end.time + correction);
        } else if (left[end.flow] == std::numeric_limits<int64_t>::max()) {
          break;  // it has not been looked at where it left
        } else if (left[end.flow] > end.time + correction) {
          steps[d].push_back({end.time, left[end.flow] - end.time});
        }
      }
    }
  }
  return steps;
}

}  // namespace

void align_traces(std::vector<RankTrace>& ranks, const std::vector<RankClock>& clocks) {
  std::unordered_map<std::string, size_t> known;
  std::vector<size_t> domains;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto [it, is_new] = known.try_emplace(clocks[r].domain, known.size());
    domains.push_back(it->second);
  }
  // Ranks with one clock are aligned to rank 0's by the same readings, so they stay together.
  std::vector<const RankClock*> first_of(known.size(), nullptr);
  for (size_t r = 0; r < ranks.size(); ++r) {
    const RankClock*& first = first_of[domains[r]];
    if (!first) first = &clocks[r];
    estimate(ranks[r], *first);
  }
  if (known.size() == 1) return;

  const std::vector<Flow> flows = flows_between(ranks, domains);
  std::vector<int64_t> corrections(known.size(), 0);
  if (relax(flows, corrections)) {
    for (size_t r = 0; r < ranks.size(); ++r) {
      map_times(ranks[r], [c = corrections[domains[r]]](int64_t t) { return clamped(t + c); });
    }
    return;
  }
  const std::vector<std::vector<Step>> steps = follow(flows, known.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    map_times(ranks[r],
              [&](int64_t t) { return clamped(t + correction_at(steps[domains[r]], t)); });
  }
}

}  // namespace distrain::rpc
