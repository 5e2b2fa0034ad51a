// Checks the invariants of jobs that continue without lost ranks: see Note [Simulation].
#include <algorithm>

#include "simulation.h"

namespace distrain::fake_network {

using base::ErrorKind;

namespace {

// The longest time that a job may take, including its replacement processes.
constexpr auto kLongestTolerantJob = std::chrono::seconds(120);

}  // namespace

// Records that a fault hits `rank` and, if it is a cut, rank `b`, because rank 0 may drop either.
void Simulation::note_hit(const Event& event, Rank& rank) {
  if (event.is_harmless) return;
  const Fault& fault = event.fault;
  const auto& tolerated = scenario_.job.tolerated;
  hit_.insert(&rank);
  is_spoiled_ = is_spoiled_ || !tolerated.contains(rank.rank()) ||
                fault.kind == FaultKind::kGarbage || fault.kind == FaultKind::kAbort;
  if (fault.kind != FaultKind::kCut || fault.b == 0) return;
  if (const Rank* const other = current(fault.b)) hit_.insert(other);
  is_spoiled_ = is_spoiled_ || !tolerated.contains(fault.b);
}

const Rank* Simulation::process(int rank, uint32_t incarnation) const {
  for (const auto& each : ranks_) {
    if (each->rank() == rank && each->has_joined() && each->incarnation() == incarnation) {
      return each.get();
    }
  }
  return nullptr;
}

bool Simulation::is_here(const Rank& rank) const {
  const auto found = here_.find(rank.rank());
  return found != here_.end() && found->second == &rank;
}

// ---- notifications of losses and returns ----

void Simulation::note_welcome(int rank, const wire::Directory& directory) {
  const auto process =
      membership::process_number(rank, directory.ranks[static_cast<size_t>(rank)].incarnation);
  if (!welcomed_.emplace(process, history_.size()).second) {
    violation("rank 0 welcomes a process of rank " + std::to_string(rank) + " twice");
  }
  for (int each = 0; each < scenario_.job.size; ++each) {
    const bool is_said_to_be = directory.ranks[static_cast<size_t>(each)].is_here;
    if (each != rank && is_said_to_be != here_.contains(each)) {
      violation("rank " + std::to_string(rank) + " is told wrongly whether " +
                std::to_string(each) + " is there");
    }
  }
}

void Simulation::on_directory(const Rank& rank, const wire::Directory& directory) {
  Hearing& hearing = hearings_[&rank];
  const auto welcomed = welcomed_.find(rank.process());
  if (welcomed == welcomed_.end()) {
    here_[rank.rank()] = &rank;  // the rank's first process
    return;
  }
  hearing.next = welcomed->second;
  for (int each = 0; each < static_cast<int>(directory.ranks.size()); ++each) {
    if (!directory.ranks[static_cast<size_t>(each)].is_here) hearing.earlier.insert(each);
  }
}

const Change* Simulation::next_for(const Rank& rank, Hearing& hearing) const {
  while (hearing.next < history_.size() && history_[hearing.next].rank == rank.rank()) {
    ++hearing.next;
  }
  return hearing.next < history_.size() ? &history_[hearing.next] : nullptr;
}

void Simulation::on_change(const Rank& rank, const Change& change, const Error& why) {
  if (rank.rank() == 0) {
    if (!change.is_return) check_loss(change, why);
    if (change.job_goes_on) ++(change.is_return ? result_.returned : result_.lost);
    if (change.is_return) here_[change.rank] = process(change.rank, change.incarnation);
    history_.push_back(change);
    return;
  }
  Hearing& hearing = hearings_[&rank];
  if (!hearing.earlier.empty()) {
    if (change.is_return || !change.job_goes_on || hearing.earlier.erase(change.rank) == 0) {
      on_violation(rank, change.text() + ", before all losses that there were when it came");
    }
    return;
  }
  const Change* const next = next_for(rank, hearing);
  if (next == nullptr || *next != change) {
    return on_violation(rank, change.text() + ", but rank 0 has told " +
                                  (next != nullptr ? "first: it " + next->text() : "nothing"));
  }
  ++hearing.next;
}

// Checks rank 0's decision whether the job continues, using the simulation's list of live ranks.
void Simulation::check_loss(const Change& change, const Error& why) {
  const Job& job = scenario_.job;
  const Rank* const lost = process(change.rank, change.incarnation);
  const std::string who = change.text() + " (" + why.message + ")";
  if (lost == nullptr || !is_here(*lost))
    return violation("rank 0 " + who + ", which is not there");
  here_.erase(change.rank);
  lost_at_[lost] = time_.now();
  if (is_tolerant() && !end_ && !is_spoiled_ && !hit_.contains(lost)) {
    violation("rank 0 " + who + ", to which nothing has happened");
  }
  const auto left = std::count_if(job.tolerated.begin(), job.tolerated.end(),
                                  [&](int each) { return here_.contains(each); });
  const bool is_its_own = why.kind == ErrorKind::kPeerLost ||
                          (why.kind == ErrorKind::kResources && why.rank == change.rank);
  const bool goes_on = !end_ && job.tolerated.contains(change.rank) && is_its_own &&
                       static_cast<size_t>(left) >= job.least;
  if (goes_on != change.job_goes_on) {
    violation("rank 0 " + who + ", with " + std::to_string(left) + " left of " +
              std::to_string(job.tolerated.size()) + ": the job " + (goes_on ? "can" : "cannot") +
              " go on");
  }
  if (!change.job_goes_on && !end_) end_ = {why, time_.now()};
}

void Simulation::on_refused(const Rank& by, int rank, uint32_t incarnation, const Error& why) {
  const Rank* const caller = process(rank, incarnation);
  const bool are_here = caller != nullptr && is_here(*caller) && is_here(by);
  if (!is_tolerant() || !are_here || by.is_leaving() || by.is_cut_off()) return;
  if (caller->is_leaving() || !caller->has_met()) return;
  on_violation(*caller, "is refused by " + std::to_string(by.rank()) + ": " + why.message);
}

// Checks that the sum of a round includes all ranks that are members when rank 0 ends the round.
void Simulation::check_tolerant_round(const Rank& rank, uint64_t round, uint64_t sum) {
  Round& over = rounds_[round];
  if (rank.rank() == 0) {
    over.sum = over.numbers[0];
    over.changes = history_.size();
    for (const int member : rank.members()) {
      const auto number = over.numbers.find(member);
      if (number == over.numbers.end()) {
        on_violation(rank, "ends a round that " + std::to_string(member) + " has not come to");
      } else {
        over.sum += number->second;
      }
    }
  }
  if (sum != over.sum) {
    on_violation(rank, "is told that the sum of a round is " + std::to_string(sum) + ": it is " +
                           std::to_string(over.sum));
  }
  if (rank.rank() == 0) return;
  Hearing& hearing = hearings_[&rank];
  static_cast<void>(next_for(rank, hearing));
  if (!hearing.earlier.empty() || hearing.next < over.changes) {
    on_violation(rank, "is told that a round is over before it knows who has been lost");
  }
}

// ---- the end of the ranks ----

void Simulation::check_tolerant_end(const Rank& rank) {
  if (rank.outcome() == Outcome::kNone) {
    if (!rank.is_stopped()) on_violation(rank, "does not end");
    return;
  }
  if (rank.outcome() == Outcome::kDied) return;
  if (rank.outcome() == Outcome::kFailed) {
    ++result_.failed;
    ++result_.blamed[rank.error()->rank];
  } else {
    ++result_.ended_well;
  }
  result_.seconds = std::max(result_.seconds, time_.seconds_at(rank.ended()));
  check_tolerant_outcome(rank);

  const Duration timeout = scenario_.job.peer_timeout;
  TimePoint latest = rank.started() + kLongestTolerantJob;
  const auto heard_at = [&](TimePoint when) {
    const TimePoint awake = std::max({when, rank.resumed(), rank.started()});
    latest = std::min(latest, awake + timeout + std::chrono::seconds(1));
  };
  if (const auto lost = lost_at_.find(&rank); lost != lost_at_.end()) heard_at(lost->second);
  if (end_ && rank.has_joined()) heard_at(end_->when);
  if (rank.ended() > latest) {
    const double late = std::chrono::duration<double>(rank.ended() - latest).count();
    on_violation(rank, "ends " + std::to_string(late) + " s late");
  }
}

// Checks how the rank ended. Rank 0 may refuse a replacement that starts too early or too late.
void Simulation::check_tolerant_outcome(const Rank& rank) {
  if (rank.outcome() == Outcome::kEndedWell || hit_.contains(&rank) || is_spoiled_) return;
  const Error& error = *rank.error();
  const std::string said = "fails with '" + error.message + "'";
  const bool is_late_one = rank.place() != rank.rank();
  if (is_late_one && !rank.is_admitted()) {
    if (error.rank != 0) on_violation(rank, said + ", though it was not even let in");
  } else if (!end_) {
    on_violation(rank, said + ", though the job goes on");
  } else if (!error.message.ends_with(end_->error.message)) {  // rank 0 may add a prefix
    on_violation(rank, said + ", not with '" + end_->error.message + "'");
  }
}

}  // namespace distrain::fake_network
