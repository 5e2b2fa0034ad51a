#include "process/rank_group.h"

#include <fmt/format.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

namespace distrain::app {
namespace {

using base::ErrorKind;
using std::chrono::nanoseconds;

constexpr size_t kManyRanks = 128;
constexpr auto kTermGrace = std::chrono::seconds(2);            // from SIGTERM to SIGKILL
constexpr auto kExtraGrace = std::chrono::seconds(2);           // after a failure + peer timeout
constexpr auto kMeetingGrace = std::chrono::milliseconds(500);  // if not all ranks have joined yet
constexpr auto kBlamedGrace = std::chrono::milliseconds(300);   // for a rank that all others blame
constexpr auto kStoppedGrace = std::chrono::milliseconds(300);  // after SIGSTOP + peer timeout

bool is_secondary(const Child& child) {
  if (child.exit_code() == exit_code(ErrorKind::kPeerLost)) return true;
  const std::string kind = child.error.value("kind", "");
  return kind == kind_name(ErrorKind::kPeerLost) || kind == kind_name(ErrorKind::kCancelled);
}

/// Returns the line that says why the rank failed: its `error` line, or else its last line.
const Json& reason(const Child& child) {
  return child.error.empty() ? child.rank_end : child.error;
}

/// Returns the other rank that `child` names as the cause of its failure, if any.
std::optional<int> blamed_rank(const Child& child) {
  const Json rank = reason(child).value("cause_rank", Json());
  if (!rank.is_number() || rank == child.rank) return std::nullopt;
  return rank.get<int>();
}

/// Moves the heap to large pages, because fork() copies an entry for each page, and LibTorch's
/// operators alone take 13,000 small pages. The move takes as long as 10 to 100 forks.
void move_heap_to_large_pages() {
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto end = reinterpret_cast<uintptr_t>(sbrk(0));
  // mallinfo2() counts only this heap, because set_up_process() allows no other.
  const uintptr_t begin = (end - mallinfo2().arena + kPage - 1) / kPage * kPage;
  // 25 is MADV_COLLAPSE of Linux 6.1. If it fails, forks are only slower.
  madvise(reinterpret_cast<void*>(begin), end / kPage * kPage - begin, 25);
}

nanoseconds as_time(double seconds) { return nanoseconds(static_cast<int64_t>(seconds * 1e9)); }

}  // namespace

bool is_crash(int signal) {
  constexpr int kCrashes[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  return std::ranges::count(kCrashes, signal) > 0;
}

// ---- start ----

void RankGroup::start(const SpawnedRank& told) {
  try {
    if (plan_.ranks.size() >= kManyRanks) move_heap_to_large_pages();
    for (const int rank : plan_.ranks) start_rank(told, rank);
  } catch (const base::Exception& e) {
    start_error_ = e.error();
    kill();
  }
}

bool RankGroup::start_again(const SpawnedRank& told, int rank) {
  try {
    start_rank(told, rank);
  } catch (const base::Exception&) {
    return false;
  }
  children_.back().is_successor = true;
  *std::ranges::find(children_, rank, &Child::rank) = std::move(children_.back());
  children_.pop_back();
  return true;
}

void RankGroup::start_rank(SpawnedRank spawned, int rank) {
  Child child(rank, plan_.role(rank), handlers_);
  spawned.rank = rank;
  spawned.out_fd = child.lines_fd();
  if (rank != 0) spawned.listen_fd = -1;
  const auto forked = [&] {
    children_.clear();  // closes the inherited pipes of the other ranks
    in_child_(rank);
    return plan_.rank_main(spawned);
  };
  child.start(base::other_threads().empty() ? forked : rank_image(spawned));
  children_.push_back(std::move(child));
}

// ---- event loop ----

void RankGroup::read(bool lines) {
  for (Child& child : children_) {
    if (child.alive()) child.read_pipes(lines);
    // Progress of a save restarts the grace period.
    const bool is_limited = phase_ != Phase::kKilled && deadline_ != base::kNever;
    if (child.take_saving() && is_limited) deadline_ = base::deadline_after(grace_);
  }
}

std::vector<int> RankGroup::reap() {
  std::vector<int> lost;
  for (Child& child : children_) {
    if (!child.reap()) continue;
    rss_mb_ = std::max(rss_mb_, child.rss_mb);
    if (is_spared(child)) {
      lost.push_back(child.rank);
    } else if (child.failed()) {
      on_failure(child);
    }
  }
  // When the job is over, kill replacement processes that have not joined, because rank 0 is gone.
  const auto is_there = [](const Child& child) {
    return child.alive() && (!child.is_successor || child.ready);
  };
  if (is_over() && std::ranges::none_of(children_, is_there)) send_to_all(SIGKILL);
  return lost;
}

/// Returns true if the job continues without this failed rank: it was killed, disconnected, stopped
/// too long, out of resources, never joined as a replacement, or ended by a signal without a save.
bool RankGroup::is_spared(const Child& child) const {
  if (!child.failed() || !child.may_be_lost()) return false;
  if (child.is_given_up) return true;
  if (child.ended_by_us) return never_met(child);
  if (child.stopped_by()) return plan_.save_grace.count() == 0;
  if (child.signal() != 0 || never_met(child)) return true;
  const int code = child.exit_code();
  const bool is_cut_off = code == exit_code(ErrorKind::kPeerLost) && !blamed_rank(child);
  return is_cut_off || code == exit_code(ErrorKind::kResources);
}

void RankGroup::on_time() {
  if (base::Clock::now() >= kill_blamed_at_) {
    kill_blamed_at_ = base::kNever;
    // The blamed rank is stopped or disconnected, so it cannot report an error: kill it.
    if (Child* const blamed = blamed_by_all()) blamed->send(SIGKILL);
  }
  for (Child& child : children_) {
    if (base::Clock::now() < stopped_until(child)) continue;
    if (child.may_be_lost()) {
      child.is_given_up = true;
    } else if (!stopped_rank_ && phase_ == Phase::kRunning) {
      stopped_rank_ = child.rank;
    }
    child.send(SIGKILL);
  }
  if (base::Clock::now() < deadline_) return;
  if (phase_ != Phase::kGrace) return kill();
  send_to_all(SIGTERM);
  enter(Phase::kTerminating, kTermGrace);
}

/// Returns the living rank that all other ranks blame for their failure; null if there is none.
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

/// Returns when the launcher kills `child` because it was stopped (SIGSTOP) too long; kNever if it
/// is not stopped. Other ranks cannot detect a stopped rank if they are joining or disconnected.
base::TimePoint RankGroup::stopped_until(const Child& child) const {
  const nanoseconds limit = as_time(plan_.peer_timeout_s);
  const bool counts = child.alive() && !child.killed && child.stopped_since && limit.count() > 0;
  return counts ? *child.stopped_since + limit + kStoppedGrace : base::kNever;
}

void RankGroup::on_failure(const Child& child) {
  if (blamed_by_all()) kill_blamed_at_ = base::deadline_after(kBlamedGrace);
  if (!child.stopped_by()) {
    if (phase_ == Phase::kKilled) return;
    // After a failure no rank saves, so shorten a grace period that was set for a save.
    phase_ = std::max(phase_, Phase::kGrace);
    const nanoseconds grace = failure_grace();
    if (base::deadline_after(grace) < deadline_) enter(phase_, grace);
  } else if (phase_ == Phase::kRunning) {
    // A signal ended this rank in good order. Other ranks end after rank 0's save: wait for that.
    enter(Phase::kGrace, std::max<nanoseconds>(failure_grace(), plan_.save_grace));
  }
}

/// Returns how long the other ranks may take to notice that a rank failed.
nanoseconds RankGroup::failure_grace() const {
  // False if a failed rank blames a living rank, which is about to report its own error.
  const bool told = std::ranges::none_of(children_, [this](const Child& child) {
    const Child* const blamed = find(blamed_rank(child));
    return child.failed() && blamed && blamed->alive();
  });
  // Joining ranks would notice the failure only at the join timeout, so end them soon.
  if (!has_met() && told) return kMeetingGrace;
  return kExtraGrace + as_time(plan_.peer_timeout_s);
}

// ---- end ----

void RankGroup::end_unheard() {
  const nanoseconds grace = std::max<nanoseconds>(kTermGrace, plan_.save_grace);
  if (phase_ < Phase::kTerminating) end(SIGTERM, grace);
}

// ---- verdict ----

/// Returns true if `child` failed, but not because of the launcher's signal. A failed save counts
/// even after that signal, and so does a crash, whose core dump may have begun before the signal.
bool RankGroup::failed_itself(const Child& child) const {
  if (is_spared(child)) {  // its failure counts only if another rank blames it
    return std::ranges::any_of(children_, [&](const Child& other) {
      return other.failed() && !is_spared(other) && blamed_rank(other) == child.rank;
    });
  }
  const bool saves = plan_.save_grace.count() > 0;
  const bool failed_to_save = saves && !child.error.empty() && !is_secondary(child);
  return child.failed() && (!child.ended_by_us || failed_to_save || is_crash(child.signal()));
}

/// Returns the rank whose failure is the root cause; null if no rank failed by itself.
const Child* RankGroup::root_cause() const {
  // If a rank blames another rank that failed for a reason of its own, sort the other rank first.
  const auto blames = [this](const Child& child) {
    const Child* const other = find(blamed_rank(child));
    return other && failed_itself(*other) && !is_secondary(*other);
  };
  const auto order = [&](const Child& child) {
    return std::tuple(!failed_itself(child), is_secondary(child), blames(child), child.ended_at);
  };
  const auto first = std::ranges::min_element(children_, {}, order);
  return first != children_.end() && failed_itself(*first) ? &*first : nullptr;
}

/// Returns the verdict if a signal to the launcher (`number`; 0: none) or to a rank ended the job.
std::optional<Verdict> RankGroup::verdict_by_signal(int number) const {
  const bool is_ours = number != 0;
  const Child* first = nullptr;
  for (const Child& child : children_) {
    const int taken = child.stopped_by();
    if (!taken) continue;
    if (!first) first = &child;
    // Ranks that stopped because of another rank report SIGTERM, so prefer any other signal.
    if (!is_ours && (number == 0 || number == SIGTERM)) number = taken;
  }
  if (!number) return std::nullopt;
  Verdict verdict{cause_by_signal(number), true, {}};
  // If `first` is rank 0, its message says where rank 0 saved the job.
  if (first) verdict.cause.message = first->rank_end.value("message", verdict.cause.message);
  return verdict;
}

Cause RankGroup::cause_from(const Child& child) const {
  Cause cause{.rank = child.rank,
              .role = child.role,
              .host = host_name(),
              .kind = std::string(kind_name(ErrorKind::kInternal)),
              .exit_code = child.exit_code()};
  const std::string name = rank_name(child.rank, child.role);
  const Json& told = reason(child);
  if (child.is_given_up || child.rank == stopped_rank_) {
    cause.kind = kind_name(ErrorKind::kPeerLost);
    cause.exit_code = exit_code(ErrorKind::kPeerLost);
    cause.message =
        fmt::format("{} is lost: it was stopped, for longer than {} s", name, plan_.peer_timeout_s);
  } else if (const int number = child.signal(); number && child.error.empty()) {
    cause.signal = signal_name(number);
    if (!is_crash(number)) cause.kind = kind_name(ErrorKind::kPeerLost);
    cause.message = fmt::format("{} was killed by {}{}", name, cause.signal,
                                number == SIGKILL ? " (kill -9, or out of memory)" : "");
  } else if (told.contains("kind") && told.contains("message")) {
    cause.kind = told.value("kind", "");
    cause.message = told.value("message", "");
    // A signal killed the rank after it had reported its error, so use the reported exit code.
    if (child.signal()) cause.exit_code = told.value("exit_code", cause.exit_code);
    if (const auto other = blamed_rank(child)) {
      cause.rank = other;
      cause.role = plan_.role(*other);
      if (!find(other)) cause.host.clear();
    }
  } else {
    cause.message = fmt::format("{} left without its last line", name);
  }
  if (const Child* const named = find(cause.rank)) cause.stderr_tail = named->stderr_tail;
  return cause;
}

std::optional<Verdict> RankGroup::verdict(int ended_by) const {
  if (start_error_) return Verdict{cause_of(*start_error_), false, {}};
  const Child* const child = root_cause();
  if (!child && stopped_rank_) return Verdict{cause_from(*find(stopped_rank_)), false, {}};
  const bool all_stopped = std::ranges::all_of(children_, &Child::stopped_by);
  if (!child && !all_stopped && !is_over() && ended_by == 0) {  // no rank is left to continue
    const auto last = std::ranges::max_element(children_, {}, [this](const Child& each) {
      return std::pair(is_spared(each), each.ended_at);
    });
    if (last != children_.end() && is_spared(*last)) return Verdict{cause_from(*last), false, {}};
  }
  if (!child || all_stopped) return verdict_by_signal(ended_by);
  Verdict verdict{cause_from(*child), false, {}};
  // Prefer the `error` line of the rank that is the cause.
  const Child* const named = find(verdict.cause.rank);
  const Child* teller = named && !named->error.empty() ? named : child;
  // If the job could have continued without `child`, another rank's error says why it did not.
  if (is_spared(*child)) {
    const auto other = std::ranges::find_if(children_, [&](const Child& each) {
      return !each.error.empty() && !is_spared(each) && blamed_rank(each) == child->rank;
    });
    if (other != children_.end()) teller = &*other;
  }
  if (!teller->error.empty()) verdict.error = teller->error;
  return verdict;
}

}  // namespace distrain::app
