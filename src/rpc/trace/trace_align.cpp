// Note [One clock]
//
// The monotonic clocks of machines start at different times and drift. Ranks on one machine share a
// clock (a "domain" below), so their times need no alignment.
//
// 1. Estimate. For each clock but rank 0's, the offset is read at the beginning and at the end of
// the job. Interpolation corrects a constant drift. The error of a reading is at most half its
// round trip, more than a call may take one way: some flows could point backwards.
//
// 2. Repair. A flow that leaves domain a at t_a and arrives in b at t_b requires c_b - c_a >= t_a -
// t_b, where c is the correction of a domain. For each pair of domains, the largest such difference
// is the weight of an edge from a to b. The smallest corrections that satisfy all flows are the
// longest paths from any domain with c = 0. Bellman-Ford relaxation finds them, unless a cycle has
// a positive sum. Clocks with constant drift have none: the true offsets satisfy all flows.
//
// 3. If there is such a cycle (a clock was slewed), a correction is a growing step function of time
// (a "controlled logical clock", Rabenseifner 1997, without its smoothing): in the causal order of
// the ends of flows, the correction of a domain grows where a flow arrives too early.
//
// All these maps of times are monotonic, so slices of a thread stay nested or disjoint.

#include <algorithm>
#include <cmath>
#include <limits>

#include "distrain/rpc/trace.h"
#include "trace/trace_export.h"

namespace distrain::rpc {

namespace {

using base::RankTrace;
using base::TraceEvent;
using Kind = TraceEvent::Kind;

// Limits aligned times, so that sums do not overflow. Another rank may send any times within
// kMostTime; times that exceed this limit after alignment are meaningless anyway.
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
  if (span <= 0 || std::abs(gained) > span / 2) {  // too short to measure drift
    const ClockReading& best = last.round_trip < first.round_trip ? last : first;
    return map_times(rank, [&](int64_t t) { return clamped(t + best.offset); });
  }
  map_times(rank, [&](int64_t t) {
    const auto since = static_cast<double>(std::clamp(t, first.at, last.at) - first.at);
    return clamped(t + first.offset + std::llround(gained / span * since));
  });
}

struct Flow {
  size_t from = 0;  // `from` and `to` are domains
  size_t to = 0;
  int64_t left = 0;
  int64_t arrived = 0;
};

/// Returns the flows whose ends are both known and on different clocks.
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
    flows.push_back({it->second.from, domain, it->second.left, event.start});
  });
  return flows;
}

/// Does step 2 of Note [One clock]. Returns false if corrections up to kMostAligned do not suffice.
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

/// A correction that applies from the time `from` on.
struct Step {
  int64_t from = 0;
  int64_t correction = 0;
};

int64_t correction_at(const std::vector<Step>& steps, int64_t time) {
  const auto after = std::ranges::upper_bound(steps, time, {}, &Step::from);
  return after == steps.begin() ? 0 : std::prev(after)->correction;
}

/// Does step 3 of Note [One clock]. Returns each domain's correction as a step function.
std::vector<std::vector<Step>> follow(const std::vector<Flow>& flows, size_t domains) {
  struct End {
    int64_t time;
    bool leaves;  // if times are equal, arrivals come first, because their step already applies
    size_t flow;
  };
  std::vector<std::vector<End>> ends(domains);
  for (size_t i = 0; i < flows.size(); ++i) {
    ends[flows[i].from].push_back({flows[i].left, true, i});
    ends[flows[i].to].push_back({flows[i].arrived, false, i});
  }
  for (auto& own : ends) {
    std::ranges::sort(own, {}, [](const End& end) { return std::pair(end.time, end.leaves); });
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
          break;  // the flow's start has not been processed yet
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
  // Ranks that share a clock use the same readings, so their times stay consistent.
  for (size_t r = 0; r < ranks.size(); ++r) {
    estimate(ranks[r], *std::ranges::find(clocks, clocks[r].domain, &RankClock::domain));
  }
  if (known.size() == 1) return;

  const std::vector<Flow> flows = flows_between(ranks, domains);
  std::vector<int64_t> corrections(known.size(), 0);
  const bool is_solved = relax(flows, corrections);
  const auto steps = is_solved ? std::vector<std::vector<Step>>() : follow(flows, known.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    const size_t domain = domains[r];
    map_times(ranks[r], [&](int64_t t) {
      return clamped(t + (is_solved ? corrections[domain] : correction_at(steps[domain], t)));
    });
  }
}

}  // namespace distrain::rpc
