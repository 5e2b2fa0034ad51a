#include "process/rank_group.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <signal.h>

#include "process/process_setup.h"

namespace distrain::app {
namespace {

using std::chrono::nanoseconds;

constexpr auto kTermGrace = std::chrono::seconds(2);            // after SIGTERM of ours
constexpr auto kExtraGrace = std::chrono::seconds(2);           // beyond the peer timeout
constexpr auto kMeetingGrace = std::chrono::milliseconds(500);  // before all ranks are there
constexpr auto kBlamedGrace = std::chrono::milliseconds(300);   // of one that all others blame
constexpr auto kStoppedGrace = std::chrono::milliseconds(300);  // beyond the peer timeout

bool is_secondary(const Child& child) {
  if (child.exit_code() == base::exit_code(base::ErrorKind::kPeerLost)) return true;
  const std::string kind = child.error().value("kind", "");
  return kind == base::kind_name(base::ErrorKind::kPeerLost) ||
         kind == base::kind_name(base::ErrorKind::kCancelled);
}

/// Its words on why it failed: the `error` line, which may name a cause elsewhere, or else the last
/// line, which alone tells of a signal that it took.
const Json& reason(const Child& child) {
  return child.error().empty() ? child.rank_end() : child.error();
}

/// The other rank that it names as the cause.
std::optional<int> blamed_rank(const Child& child) {
  const Json rank = reason(child).value("cause_rank", Json());
  if (!rank.is_number() || rank == child.rank()) return std::nullopt;
  return rank.get<int>();
}

nanoseconds as_time(double seconds) { return nanoseconds(static_cast<int64_t>(seconds * 1e9)); }

}  // namespace

bool is_crash(int signal) {
  return signal == SIGABRT || signal == SIGSEGV || signal == SIGBUS || signal == SIGFPE ||
         signal == SIGILL;
}

RankGroup::RankGroup(const LaunchPlan& plan, const Child::Handlers& handlers,
                     std::function<void(int rank)> in_child)
    : plan_(plan), handlers_(handlers), in_child_(std::move(in_child)) {}

// ---- start ----

void RankGroup::start(const SpawnedRank& told) {
  try {
    for (const int rank : plan_.ranks) start_rank(told, rank);
  } catch (const base::Exception& e) {
    start_error_ = e.error();
    kill();
  }
}

bool RankGroup::start_again(const SpawnedRank& told, int rank) {
  const size_t others = children_.size();
  try {
    start_rank(told, rank);
  } catch (const base::Exception&) {
    return false;
  }
  children_.back().set_successor();
  const auto before = std::ranges::find(children_, rank, &Child::rank);
  if (before != children_.begin() + static_cast<std::ptrdiff_t>(others)) children_.erase(before);
  std::ranges::sort(children_, {}, &Child::rank);
  return true;
}

void RankGroup::start_rank(SpawnedRank spawned, int rank) {
  Child child(rank, plan_.role(rank), handlers_);
  spawned.rank = rank;
  spawned.out_fd = child.lines_fd();
  if (rank != 0) spawned.listen_fd = -1;
  const auto forked = [&] {
    children_.clear();  // with the pipes of the other ranks, which this one must not keep
    in_child_(rank);
    return plan_.rank_main(spawned);
  };
  child.start(base::other_threads().empty() ? forked : rank_image(spawned));
  children_.push_back(std::move(child));
}

// ---- the loop ----

bool RankGroup::any_alive() const { return std::ranges::any_of(children_, &Child::alive); }

bool RankGroup::has_met() const { return std::ranges::any_of(children_, &Child::ready); }

void RankGroup::add_to(std::vector<pollfd>& items, bool lines) const {
  for (const Child& child : children_) {
    items.push_back({lines ? child.out_fd() : -1, POLLIN, 0});
    items.push_back({child.err_fd(), POLLIN, 0});
  }
}

void RankGroup::read(bool lines) {
  for (Child& child : children_) {
    if (child.alive()) child.read_pipes(lines);
    // A save that goes on is waited for: the limit begins anew.
    const bool is_limited = phase_ != Phase::kKilled && deadline_ != base::kNever;
    if (child.take_saving() && is_limited) deadline_ = base::deadline_after(grace_);
  }
}

std::vector<int> RankGroup::reap() {
  std::vector<int> lost;
  for (Child& child : children_) {
    if (!child.reap()) continue;
    rss_mb_ = std::max(rss_mb_, child.rss_mb());
    if (is_spared(child)) {
      lost.push_back(child.rank());
    } else if (child.failed()) {
      on_failure(child);
    }
  }
  // Successors that were late look for a rank 0 that is no more.
  const auto is_there = [](const Child& child) {
    return child.alive() && (!child.is_successor() || child.ready());
  };
  if (is_over() && std::ranges::none_of(children_, is_there)) send_to_all(SIGKILL);
  return lost;
}

/// It is lost, and the job goes on: it blames nobody else, and we have not ended it. Where a job
/// saves, one that a signal has told to end is to end the job; otherwise that is a loss, too.
bool RankGroup::is_spared(const Child& child) const {
  if (!child.failed() || !child.may_be_lost()) return false;
  if (child.is_given_up()) return true;
  if (child.ended_by_us()) return never_met(child);
  if (child.stopped_by()) return plan_.save_grace.count() == 0;
  const int code = child.exit_code();
  const bool is_cut_off =
      code == base::exit_code(base::ErrorKind::kPeerLost) && !blamed_rank(child);
  return child.signal() != 0 || never_met(child) || is_cut_off ||
         code == base::exit_code(base::ErrorKind::kResources);
}

/// A successor that has found no place in the job any more.
bool RankGroup::never_met(const Child& child) const {
  return child.is_successor() && !child.ready() &&
         (child.exit_code() == base::exit_code(base::ErrorKind::kRendezvous) || child.killed());
}

bool RankGroup::is_over() const {
  return std::ranges::any_of(children_,
                             [](const Child& child) { return !child.alive() && !child.failed(); });
}

base::TimePoint RankGroup::next_deadline() const {
  base::TimePoint next = std::min(deadline_, kill_blamed_at_);
  for (const Child& child : children_) next = std::min(next, stopped_until(child));
  return next;
}

void RankGroup::on_time() {
  if (base::Clock::now() >= kill_blamed_at_) {
    kill_blamed_at_ = base::kNever;
    // It is stopped, or cut off, and there is nobody left to wait for a word of it.
    if (Child* const blamed = blamed_by_all()) blamed->send(SIGKILL);
  }
  for (Child& child : children_) {
    if (base::Clock::now() < stopped_until(child)) continue;
    if (child.may_be_lost()) {
      child.give_up();
    } else if (!stopped_rank_ && phase_ == Phase::kRunning) {
      stopped_rank_ = child.rank();
    }
    child.send(SIGKILL);
  }
  if (base::Clock::now() < deadline_) return;
  if (phase_ != Phase::kGrace) return kill();
  send_to_all(SIGTERM);
  enter(Phase::kTerminating, kTermGrace);
}

/// The rank that all others have ended for, if it has not.
Child* RankGroup::blamed_by_all() {
  std::optional<int> rank;
  for (const Child& child : children_) {
    if (child.failed() && is_secondary(child)) rank = blamed_rank(child);
  }
  const auto blamed = std::ranges::find(children_, rank, &Child::rank);
  if (!rank || blamed == children_.end() || !blamed->alive()) return nullptr;
  const bool by_all = std::ranges::all_of(children_, [&](const Child& child) {
    return &child == &*blamed || is_spared(child) ||
           (child.failed() && is_secondary(child) && blamed_rank(child) == rank);
  });
  return by_all ? &*blamed : nullptr;
}

/// Until when others may take a rank that is stopped for one that is there. While they meet they
/// wait for it, and at the end they have gone: it is for the launcher to see.
base::TimePoint RankGroup::stopped_until(const Child& child) const {
  const nanoseconds limit = as_time(plan_.peer_timeout_s);
  const bool counts =
      child.alive() && !child.killed() && child.stopped_since() && limit.count() > 0;
  return counts ? *child.stopped_since() + limit + kStoppedGrace : base::kNever;
}

void RankGroup::on_failure(const Child& child) {
  if (blamed_by_all()) kill_blamed_at_ = base::deadline_after(kBlamedGrace);
  if (!child.stopped_by()) {
    if (phase_ == Phase::kKilled) return;
    // Sooner than a save would take: there will be none now.
    phase_ = std::max(phase_, Phase::kGrace);
    const nanoseconds grace = failure_grace();
    if (base::deadline_after(grace) < deadline_) set_deadline(grace);
  } else if (phase_ == Phase::kRunning) {
    // Somebody sent a signal to a rank: the others stop, too, once rank 0 has saved.
    enter(Phase::kGrace, std::max<nanoseconds>(failure_grace(), plan_.save_grace));
  }
}

/// How long the others may take to notice that a rank failed.
nanoseconds RankGroup::failure_grace() const {
  // One that others blame is about to say what happened.
  const bool told = std::ranges::none_of(children_, [this](const Child& child) {
    const Child* const blamed = find(blamed_rank(child));
    return child.failed() && blamed && blamed->alive();
  });
  // Those that look for each other would do so until the join timeout.
  if (!has_met() && told) return kMeetingGrace;
  return kExtraGrace + as_time(plan_.peer_timeout_s);
}

// ---- how they end ----

/// It only ever gets more serious.
void RankGroup::enter(Phase phase, nanoseconds grace) {
  if (phase < phase_) return;
  phase_ = phase;
  set_deadline(grace);
}

void RankGroup::set_deadline(nanoseconds grace) {
  grace_ = grace;
  deadline_ = base::deadline_after(grace);
}

void RankGroup::end(int signal, nanoseconds grace) {
  send_to_all(signal);
  enter(Phase::kTerminating, grace);
}

void RankGroup::end_unheard() {
  const nanoseconds grace = std::max<nanoseconds>(kTermGrace, plan_.save_grace);
  if (phase_ < Phase::kTerminating) end(SIGTERM, grace);
}

void RankGroup::kill() {
  send_to_all(SIGKILL);
  phase_ = Phase::kKilled;
  deadline_ = base::kNever;
}

void RankGroup::send_to_all(int signal) {
  for (Child& child : children_) child.send(signal);
}

void RankGroup::tell_one(int signal) {
  const auto alive = std::ranges::find_if(children_, &Child::alive);
  if (alive != children_.end()) alive->tell(signal);
}

void RankGroup::tell_all(int signal) {
  for (Child& child : children_) child.tell(signal);
}

void RankGroup::stop() {
  for (Child& child : children_) child.stop(true);
}

void RankGroup::go_on(base::Duration stopped) {
  for (Child& child : children_) child.stop(false);
  if (deadline_ != base::kNever) deadline_ += stopped;
}

// ---- why they ended ----

/// Null for a rank that is not here.
const Child* RankGroup::find(std::optional<int> rank) const {
  const auto child = std::ranges::find(children_, rank, &Child::rank);
  return child == children_.end() ? nullptr : &*child;
}

/// For another reason than that we asked for it: a save that failed is one, or a crash, whatever
/// signal of ours came while it was at its core dump.
bool RankGroup::failed_itself(const Child& child) const {
  if (is_spared(child)) {  // unless somebody who has failed puts it down to this one
    return std::ranges::any_of(children_, [&](const Child& other) {
      return other.failed() && !is_spared(other) && blamed_rank(other) == child.rank();
    });
  }
  const bool failed_to_save =
      plan_.save_grace.count() > 0 && !child.error().empty() && !is_secondary(child);
  return child.failed() && (!child.ended_by_us() || failed_to_save || is_crash(child.signal()));
}

/// Null if none failed by itself.
const Child* RankGroup::root_cause() const {
  // A rank that blames another of ours with a reason of its own comes after that one.
  const auto blames_another = [this](const Child& child) {
    const Child* const other = find(blamed_rank(child));
    return other && failed_itself(*other) && !is_secondary(*other);
  };
  const auto order = [&](const Child& child) {
    return std::tuple(!failed_itself(child), is_secondary(child), blames_another(child),
                      child.ended_at());
  };
  const auto first = std::ranges::min_element(children_, {}, order);
  return first != children_.end() && failed_itself(*first) ? &*first : nullptr;
}

/// The end of a job by a signal to the launcher, or else to a rank that made the others stop, too.
std::optional<Verdict> RankGroup::verdict_by_signal(int number) const {
  const bool is_ours = number != 0;
  const Child* first = nullptr;
  for (const Child& child : children_) {
    const int taken = child.stopped_by();
    if (!taken) continue;
    if (!first) first = &child;
    // Ranks that another one told to stop call that SIGTERM.
    if (!is_ours && (number == 0 || number == SIGTERM)) number = taken;
  }
  if (!number) return std::nullopt;
  Verdict verdict{cause_by_signal(number), true, {}};
  // Rank 0 tells where it saved.
  if (first) verdict.cause.message = first->rank_end().value("message", verdict.cause.message);
  return verdict;
}

Cause RankGroup::cause_from(const Child& child) const {
  Cause cause{.rank = child.rank(),
              .role = child.role(),
              .host = host_name(),
              .kind = std::string(base::kind_name(base::ErrorKind::kInternal)),
              .exit_code = child.exit_code()};
  const std::string name = rank_name(child.rank(), child.role());
  const Json& told = reason(child);
  if (child.is_given_up() || child.rank() == stopped_rank_) {
    cause.kind = base::kind_name(base::ErrorKind::kPeerLost);
    cause.exit_code = base::exit_code(base::ErrorKind::kPeerLost);
    cause.message =
        fmt::format("{} is lost: it was stopped, for longer than {} s", name, plan_.peer_timeout_s);
  } else if (const int number = child.signal(); number && child.error().empty()) {
    cause.signal = signal_name(number);
    if (!is_crash(number)) cause.kind = base::kind_name(base::ErrorKind::kPeerLost);
    cause.message = fmt::format("{} was killed by {}{}", name, cause.signal,
                                number == SIGKILL ? " (kill -9, or out of memory)" : "");
  } else if (told.contains("kind") && told.contains("message")) {
    cause.kind = told.value("kind", "");
    cause.message = told.value("message", "");
    // It may have said what went wrong before a signal came.
    if (child.signal()) cause.exit_code = told.value("exit_code", cause.exit_code);
    if (const auto other = blamed_rank(child)) {
      cause.rank = other;
      cause.role = plan_.role(*other);
      if (!find(other)) cause.host.clear();
    }
  } else {
    cause.message = fmt::format("{} left without its last line", name);
  }
  if (const Child* const named = find(cause.rank)) cause.stderr_tail = named->stderr_tail();
  return cause;
}

std::optional<Verdict> RankGroup::verdict(int ended_by) const {
  if (start_error_) return Verdict{cause_of(*start_error_), false, {}};
  const Child* const child = root_cause();
  if (!child && stopped_rank_) return Verdict{cause_from(*find(stopped_rank_)), false, {}};
  const bool all_stopped = std::ranges::all_of(children_, &Child::stopped_by);
  if (!child && !all_stopped && !is_over() && ended_by == 0) {  // none is left to go on
    const auto last = std::ranges::max_element(children_, {}, [this](const Child& each) {
      return std::pair(is_spared(each), each.ended_at());
    });
    if (last != children_.end() && is_spared(*last)) return Verdict{cause_from(*last), false, {}};
  }
  if (!child || all_stopped) return verdict_by_signal(ended_by);
  Verdict verdict{cause_from(*child), false, {}};
  // A rank that threw has said so in its own line, best the one that is the cause itself.
  const Child* const named = find(verdict.cause.rank);
  const Child* teller = named && !named->error().empty() ? named : child;
  // Of one that the job could have gone on without the others tell why it does not.
  if (is_spared(*child)) {
    const auto other = std::ranges::find_if(children_, [&](const Child& each) {
      return !each.error().empty() && !is_spared(each) && blamed_rank(each) == child->rank();
    });
    if (other != children_.end()) teller = &*other;
  }
  if (!teller->error().empty()) verdict.error = teller->error();
  return verdict;
}

}  // namespace distrain::app
