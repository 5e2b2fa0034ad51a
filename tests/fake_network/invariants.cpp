// Checks the invariants of a run: see Note [Simulation].
#include <algorithm>
#include <cstdio>

#include "simulation.h"

namespace distrain::fake_network {

namespace {

// The longest time that a job may take, including the join timeout if ranks never join.
constexpr auto kLongestJob = std::chrono::seconds(120);

bool is_one_of_many(const Fault& fault) {
  return fault.kind != FaultKind::kJoinTwice && fault.kind != FaultKind::kStranger;
}

}  // namespace

void Simulation::on_violation(const Rank& rank, const std::string& what) {
  violation("rank " + std::to_string(rank.rank()) + " " + what);
}

void Simulation::violation(const std::string& what) {
  char time[32];
  std::snprintf(time, sizeof time, "after %.6f s: ", time_.seconds_since_start());
  result_.violations.push_back(time + what);
}

void Simulation::check() {
  for (const auto& rank : ranks_) {
    if (!rank->is_started()) continue;
    is_tolerant() ? check_tolerant_end(*rank) : check_end(*rank);
  }
  check_counts();
}

void Simulation::check_end(const Rank& rank) {
  switch (rank.outcome()) {
    case Outcome::kNone:
      if (!rank.is_stopped()) on_violation(rank, "does not end");
      return;
    case Outcome::kDied:
      return;
    case Outcome::kEndedWell:
      ++result_.ended_well;
      if (rank.live() != 0 && events_.empty()) {
        on_violation(rank, "ends well with " + std::to_string(rank.live()) + " live values");
      }
      break;
    case Outcome::kFailed:
      ++result_.failed;
      ++result_.blamed[rank.error()->rank];
      check_blame(rank);
      break;
  }
  result_.seconds = std::max(result_.seconds, time_.seconds_at(rank.ended()));
  if (const TimePoint latest = latest_end(rank); rank.ended() > latest) {
    const double late = std::chrono::duration<double>(rank.ended() - latest).count();
    on_violation(rank, "ends " + std::to_string(late) + " s late");
  }
}

void Simulation::check_counts() {
  if (time_.pending() > 0) {
    violation(std::to_string(time_.pending()) + " things are still to be done");
  }
  for (const End end : network_.open_ends()) {
    if (network_.host_of(end).is_stopped() || network_.host_of(end.other()).is_stopped()) continue;
    violation("connection " + std::to_string(end.connection) + " of place " +
              std::to_string(network_.host_of(end).place()) + " is still open");
  }
}

// Returns the latest time at which the rank may end: one second after it must notice the last
// fault. With several faults, one may hide another, and a rank that was stopped cannot tell which
// ranks were silent while it was stopped. In both cases, the limit is one timeout later.
TimePoint Simulation::latest_end(const Rank& rank) const {
  const Event* last = nullptr;
  for (const Event& event : events_) {
    if (event.is_certain && event.began <= rank.ended()) last = &event;
  }
  if (last == nullptr || !rank.has_joined()) return rank.started() + kLongestJob;
  const bool is_only_one = events_.size() == 1;
  const Duration timeout = scenario_.job.peer_timeout;
  const Duration noticed = is_only_one && last->is_seen_at_once ? Duration::zero() : timeout;
  const Duration awake = is_only_one ? Duration::zero() : timeout;
  return std::max(last->began + noticed, rank.resumed() + awake) + std::chrono::seconds(1);
}

// ---- blame ----

void Simulation::check_blame(const Rank& rank) {
  const Error& error = *rank.error();
  const std::string said =
      "fails with '" + error.message + "' of rank " + std::to_string(error.rank);
  std::vector<Event> before;
  for (const Event& event : events_) {
    if (event.began <= rank.ended()) before.push_back(event);
  }
  // After any fault rank 0 may refuse a rank, whose place may be taken or whose job may be over.
  if (!rank.has_joined() && error.rank == 0) {
    if (before.empty()) on_violation(rank, said);
    return;
  }
  // Several faults together may break a job, even if each of them alone is harmless.
  const auto many = std::count_if(before.begin(), before.end(),
                                  [](const Event& event) { return is_one_of_many(event.fault); });
  const auto is_cause = [&](const Event& event) { return !event.is_harmless || many > 1; };
  const bool is_too_late = rank.has_given_up() && is_missing(error.rank, rank.ended());
  const bool is_right = std::any_of(before.begin(), before.end(), [&](const Event& event) {
    return is_cause(event) && (is_too_late || may_be_blamed(event, rank, error.rank));
  });
  if (!is_right) return on_violation(rank, said);
  if (before.size() == 1 && before[0].is_certain && before[0].fault.kind == FaultKind::kAbort &&
      error.message != error_of_program(before[0].fault.a).message) {
    on_violation(rank, said + ", not with the error of who aborted");
  }
}

// Returns true if `rank` is -1 (no rank), never started, or ended by `when` without joining.
bool Simulation::is_missing(int rank, TimePoint when) const {
  if (rank < 0) return true;
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& each) {
    return each->rank() == rank && !each->has_joined() &&
           (!each->is_started() || (each->outcome() != Outcome::kNone && each->ended() <= when));
  });
}

bool Simulation::may_be_blamed(const Event& event, const Rank& by, int rank) const {
  const Fault& fault = event.fault;
  switch (fault.kind) {
    case FaultKind::kDie:
    case FaultKind::kStop:
    case FaultKind::kAbort:
    case FaultKind::kFailAtGo:
    case FaultKind::kComesLate:
    case FaultKind::kRunsOut:
      return rank == fault.a;
    case FaultKind::kGarbage:
      return rank == fault.a;
    case FaultKind::kResetControl:
      return rank == 0 || rank == fault.a;
    case FaultKind::kResetCalls:
    case FaultKind::kCut:
      return rank == fault.a || rank == fault.b;
    case FaultKind::kIsolate:
    case FaultKind::kPartition: {
      // Connected ranks blame a rank that is cut off from rank 0. A cut-off rank that is still
      // heard (only messages to it are lost) may report any rank that it cannot hear.
      const bool has_coordinator = fault.group.contains(0);
      const auto is_cut_off = [&](int each) {
        return fault.group.contains(each) != has_coordinator;
      };
      const bool is_unheard =
          fault.way == (has_coordinator ? Way::kTo : Way::kFrom) && !fault.lasts;
      return is_cut_off(rank) ||
             (!is_unheard && (is_cut_off(by.rank()) || fault.way != Way::kBoth || fault.lasts));
    }
    case FaultKind::kJoinTwice:
    case FaultKind::kStranger:
      return false;
  }
  return false;
}

}  // namespace distrain::fake_network
