#include "process/launcher.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <errno.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "distrain/base/clock.h"
#include "distrain/job/stop_signal.h"
#include "process/child.h"
#include "process/json_lines.h"
#include "process/output.h"
#include "process/process_setup.h"
#include "process/progress.h"

namespace distrain::app {
namespace {

using std::chrono::nanoseconds;

constexpr auto kTermGrace = std::chrono::seconds(2);            // after SIGTERM of ours
constexpr auto kSignalGrace = std::chrono::seconds(5);          // after a signal that we passed on
constexpr auto kExtraGrace = std::chrono::seconds(2);           // beyond the peer timeout
constexpr auto kMeetingGrace = std::chrono::milliseconds(500);  // before all ranks are there
constexpr auto kBlamedGrace = std::chrono::milliseconds(300);   // of one that all others blame
constexpr auto kStoppedGrace = std::chrono::milliseconds(300);  // beyond the peer timeout

/// Whether the program itself went wrong, rather than somebody ending it.
bool is_crash(int signal) {
  return signal == SIGABRT || signal == SIGSEGV || signal == SIGBUS || signal == SIGFPE ||
         signal == SIGILL;
}

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

class Launcher {
 public:
  explicit Launcher(const LaunchPlan& plan)
      : plan_(plan),
        run_id_(plan.told.run_id),
        config_(plan.config),
        listener_(plan.told.listen_fd),
        output_(STDOUT_FILENO),
        progress_(plan.progress, plan.epochs),
        handlers_{[this](std::string line) {
                    if (write_error_) return;
                    progress_.on_line(line);
                    output_.push(std::move(line));
                  },
                  [this](const std::string& line) {
                    progress_.clear();
                    write_all(STDERR_FILENO, line);
                  }} {}

  int run() {
    sigset_t awaited = ending_signals();
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, kSaveSignal);
    sigaddset(&awaited, kQuestionSignal);
    sigaddset(&awaited, SIGTSTP);
    base::block_in_all_threads(awaited);
    signals_ = net::Fd(signalfd(-1, &awaited, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!plan_.warning.empty()) tell("warn", {{"kind", "invalid"}, {"message", plan_.warning}});
    start_children();
    while (any_alive()) wait_once();
    return finish();
  }

 private:
  enum class Phase {
    kRunning,
    kGrace,        ///< a rank failed; the others should end by themselves
    kTerminating,  ///< they got SIGTERM, or the signal that we got
    kKilled,
  };

  void start_children() {
    try {
      const bool by_exec = !base::other_threads().empty();
      for (const int rank : plan_.ranks) start_child(rank, by_exec);
    } catch (const base::Exception& e) {
      start_error_ = e.error();
      kill_all();
    }
    listener_.reset();
  }

  void start_child(int rank, bool by_exec) {
    Child child(rank, plan_.role(rank), handlers_);
    SpawnedRank spawned = plan_.told;
    spawned.rank = rank;
    spawned.out_fd = child.lines_fd();
    if (rank != 0) spawned.listen_fd = -1;
    const auto forked = [&] {
      children_.clear();  // with the pipes of the other ranks, which this one must not keep
      signals_.reset();
      if (rank != 0) listener_.reset();
      return plan_.rank_main(spawned);
    };
    child.start(by_exec ? rank_image(spawned) : forked);
    children_.push_back(std::move(child));
  }

  /// Waits until something happens, and sees to it.
  void wait_once() {
    // Without events it still tells of errors: of a reader that is gone.
    const short writable = output_.empty() ? 0 : POLLOUT;
    std::vector<pollfd> items{{signals_.get(), POLLIN, 0},
                              {write_error_ ? -1 : output_.fd(), writable, 0}};
    for (const Child& child : children_) {
      items.push_back({takes_lines() ? child.out_fd() : -1, POLLIN, 0});
      items.push_back({child.err_fd(), POLLIN, 0});
    }
    poll(items.data(), items.size(), poll_timeout_ms());
    if (items[1].revents & (POLLERR | POLLHUP | POLLNVAL)) on_write_error(EPIPE);
    for (Child& child : children_) {
      if (child.alive()) child.read_pipes(takes_lines());
    }
    on_signals();
    for (Child& child : children_) {
      if (child.reap() && child.failed()) on_failure(child);
    }
    pump();
    if (base::Clock::now() >= kill_blamed_at_) kill_blamed();
    kill_stopped();
    if (base::Clock::now() >= deadline_) on_deadline();
  }

  /// Ranks that are to end must not wait for a reader that sleeps.
  bool takes_lines() const { return write_error_ || phase_ != Phase::kRunning || !output_.full(); }

  int poll_timeout_ms() const {
    base::TimePoint next = std::min(deadline_, kill_blamed_at_);
    for (const Child& child : children_) next = std::min(next, stopped_until(child));
    if (next == base::kNever) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - base::Clock::now());
    return static_cast<int>(std::max<int64_t>(0, left.count()));
  }

  void on_signals() {
    signalfd_siginfo info;
    while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
      if (info.ssi_signo != SIGCHLD) on_signal(static_cast<int>(info.ssi_signo));
    }
  }

  void on_signal(int number) {
    if (number == SIGTSTP) {
      stop_for_a_while();
    } else if (number == kQuestionSignal) {
      for (Child& child : children_) child.tell(number);
    } else if (!any_alive()) {
      stop_waiting_ |= number != kSaveSignal;  // nobody will read the rest
    } else if (number == kSaveSignal) {
      children_.front().tell(number);  // any rank will do
    } else if (!ended_by_signal_) {
      ended_by_signal_ = number;
      signalled_at_ = base::Clock::now();
      send_to_all(number);
      enter(Phase::kTerminating, std::max(kSignalGrace, plan_.save_grace));
    } else if (plan_.save_grace <= kSignalGrace ||
               base::Clock::now() - signalled_at_ >= job::kSameSignal) {
      stop_waiting_ = true;
      kill_all();
    }
  }

  /// Ctrl-Z reaches the terminal's foreground group, which the ranks are not in. Where SIGTSTP is
  /// ignored, by this process or, in a group without a shell, by the kernel, they go on at once.
  void stop_for_a_while() {
    const base::TimePoint since = base::Clock::now();
    for (Child& child : children_) child.stop(true);
    const sigset_t set = base::signal_set({SIGTSTP});
    raise(SIGTSTP);
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);  // until somebody sends SIGCONT
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
    for (Child& child : children_) child.stop(false);
    if (deadline_ != base::kNever) deadline_ += base::Clock::now() - since;
  }

  /// The rank that all others have ended for, if it has not.
  Child* blamed_by_all() {
    std::optional<int> rank;
    for (const Child& child : children_) {
      if (child.failed() && is_secondary(child)) rank = blamed_rank(child);
    }
    const auto blamed =
        std::ranges::find_if(children_, [&](const Child& child) { return child.rank() == rank; });
    if (!rank || blamed == children_.end() || !blamed->alive()) return nullptr;
    const bool by_all = std::ranges::all_of(children_, [&](const Child& child) {
      return &child == &*blamed ||
             (child.failed() && is_secondary(child) && blamed_rank(child) == rank);
    });
    return by_all ? &*blamed : nullptr;
  }

  /// It is stopped, or cut off, and there is nobody left to wait for a word of it.
  void kill_blamed() {
    kill_blamed_at_ = base::kNever;
    if (Child* const blamed = blamed_by_all()) blamed->send(SIGKILL);
  }

  /// Until when others may take a rank that is stopped for one that is there. While they meet they
  /// wait for it, and at the end they have gone: it is for the launcher to see.
  base::TimePoint stopped_until(const Child& child) const {
    const auto limit = nanoseconds(static_cast<int64_t>(plan_.peer_timeout_s * 1e9));
    const bool counts =
        child.alive() && !child.killed() && child.stopped_since() && limit.count() > 0;
    return counts ? *child.stopped_since() + limit + kStoppedGrace : base::kNever;
  }

  void kill_stopped() {
    for (Child& child : children_) {
      if (base::Clock::now() < stopped_until(child)) continue;
      if (!stopped_rank_ && phase_ == Phase::kRunning) stopped_rank_ = child.rank();
      child.send(SIGKILL);
    }
  }

  void on_failure(const Child& child) {
    if (blamed_by_all()) kill_blamed_at_ = base::deadline_after(kBlamedGrace);
    if (!child.stopped_by()) {
      if (phase_ == Phase::kKilled) return;
      // Sooner than a save would take: there will be none now.
      phase_ = std::max(phase_, Phase::kGrace);
      deadline_ = std::min(deadline_, base::deadline_after(failure_grace()));
    } else if (phase_ == Phase::kRunning) {
      // Somebody sent a signal to a rank: the others stop, too, once rank 0 has saved.
      enter(Phase::kGrace, std::max<nanoseconds>(failure_grace(), plan_.save_grace));
    }
  }

  /// How long the others may take to notice that a rank failed.
  nanoseconds failure_grace() const {
    const bool met = std::ranges::any_of(children_, &Child::ready);
    // One that others blame is about to say what happened.
    const bool told = std::ranges::none_of(children_, [this](const Child& child) {
      const Child* const blamed = find(blamed_rank(child));
      return child.failed() && blamed && blamed->alive();
    });
    // Those that look for each other would do so until the join timeout.
    if (!met && told) return kMeetingGrace;
    return kExtraGrace + nanoseconds(static_cast<int64_t>(plan_.peer_timeout_s * 1e9));
  }

  void pump() {
    if (write_error_) return;
    if (const int error = output_.pump()) on_write_error(error);
  }

  void on_write_error(int error) {
    if (write_error_) return;
    write_error_ = error;
    if (phase_ >= Phase::kTerminating) return;
    send_to_all(SIGTERM);
    enter(Phase::kTerminating, std::max(kTermGrace, plan_.save_grace));
  }

  void on_deadline() {
    if (phase_ != Phase::kGrace) return kill_all();
    send_to_all(SIGTERM);
    enter(Phase::kTerminating, kTermGrace);
  }

  /// It only ever gets more serious.
  void enter(Phase phase, nanoseconds grace) {
    if (phase < phase_) return;
    phase_ = phase;
    deadline_ = base::deadline_after(grace);
  }

  void kill_all() {
    send_to_all(SIGKILL);
    phase_ = Phase::kKilled;
    deadline_ = base::kNever;
  }

  void send_to_all(int signal) {
    for (Child& child : children_) child.send(signal);
  }

  bool any_alive() const { return std::ranges::any_of(children_, &Child::alive); }

  /// Null for a rank that is not here.
  const Child* find(std::optional<int> rank) const {
    const auto child =
        std::ranges::find_if(children_, [rank](const Child& each) { return each.rank() == rank; });
    return child == children_.end() ? nullptr : &*child;
  }

  /// For another reason than that we asked for it. A save that failed is one.
  /// Whatever signal of ours came while it was at its core dump.
  static bool crashed(const Child& child) {
    const int number = child.signal();
    return number == SIGSEGV || number == SIGBUS || number == SIGFPE || number == SIGILL ||
           number == SIGABRT;
  }

  bool failed_itself(const Child& child) const {
    const bool failed_to_save =
        plan_.save_grace.count() > 0 && !child.error().empty() && !is_secondary(child);
    return child.failed() && (!child.ended_by_us() || failed_to_save || crashed(child));
  }

  /// Whether it blames another of our ranks, which has a reason of its own: even if that ends
  /// later.
  bool blames_another(const Child& child) const {
    const Child* const other = find(blamed_rank(child));
    return other && failed_itself(*other) && !is_secondary(*other);
  }

  /// Null if none failed by itself.
  const Child* root_cause() const {
    const auto order = [this](const Child& child) {
      return std::tuple(!failed_itself(child), is_secondary(child), blames_another(child),
                        child.ended_at());
    };
    const auto first = std::ranges::min_element(children_, {}, order);
    return first != children_.end() && failed_itself(*first) ? &*first : nullptr;
  }

  /// The end of a job by a signal to us, or else to a rank that made the others stop, too.
  std::optional<Cause> stop_cause() const {
    int number = ended_by_signal_;
    const Child* first = nullptr;
    for (const Child& child : children_) {
      const int taken = child.stopped_by();
      if (!taken) continue;
      if (!first) first = &child;
      // Ranks that another one told to stop call that SIGTERM.
      if (!ended_by_signal_ && (number == 0 || number == SIGTERM)) number = taken;
    }
    if (!number) return std::nullopt;
    Cause cause = cause_by_signal(number);
    // Rank 0 tells where it saved.
    if (first) cause.message = first->rank_end().value("message", cause.message);
    return cause;
  }

  Cause cause_from(const Child& child) const {
    Cause cause{.rank = child.rank(),
                .role = child.role(),
                .host = host_name(),
                .kind = std::string(base::kind_name(base::ErrorKind::kInternal)),
                .exit_code = child.exit_code()};
    const std::string name = name_of(child);
    const Json& told = reason(child);
    if (const int number = child.signal(); number && child.error().empty()) {
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

  Cause cause_of_stopped(const Child& child) const {
    return {.rank = child.rank(),
            .role = child.role(),
            .host = host_name(),
            .kind = std::string(base::kind_name(base::ErrorKind::kPeerLost)),
            .message = fmt::format("{} is lost: it was stopped, for longer than {} s",
                                   name_of(child), plan_.peer_timeout_s),
            .stderr_tail = child.stderr_tail(),
            .exit_code = base::exit_code(base::ErrorKind::kPeerLost)};
  }

  static std::string name_of(const Child& child) {
    return child.role().empty() ? fmt::format("rank {}", child.rank())
                                : fmt::format("rank {} ({})", child.rank(), child.role());
  }

  /// Why the job failed, if it did, which is told in an `error` line unless a signal was to end it.
  std::optional<Cause> tell_cause() {
    const Child* const child = root_cause();
    if (!child && stopped_rank_) {
      const Cause cause = cause_of_stopped(*find(stopped_rank_));
      tell("error", error_fields(cause, plan_.told.started));
      return cause;
    }
    const bool all_stopped = std::ranges::all_of(children_, &Child::stopped_by);
    if (!start_error_ && (all_stopped || !child)) return stop_cause();
    const Cause cause = start_error_ ? cause_of(*start_error_) : cause_from(*child);
    // A rank that threw has said so in its own line, best the one that is the cause itself; for one
    // that cannot we do.
    const Child* const named = find(cause.rank);
    const Child* const teller = named && !named->error().empty() ? named : child;
    if (!start_error_ && !teller->error().empty()) {
      output_.push(teller->error().dump() + '\n');
    } else {
      tell("error", error_fields(cause, plan_.told.started));
    }
    return cause;
  }

  /// What rank 0 has told our ranks, where another launcher has it.
  void hear_of_run() {
    for (const Child& child : children_) {
      if (run_id_.empty()) run_id_ = child.run_id();
      config_ = child.rank_end().value("config", config_);
    }
  }

  int finish() {
    hear_of_run();
    const std::optional<Cause> cause = tell_cause();
    Summary summary;
    for (const Child& child : children_) {
      summary.add(child.rank_end());
      summary.add({{"rss_mb", child.rss_mb()}});
    }
    Json end = summary.end_fields(plan_.told.started, cause);
    tell_config(config_, end);
    tell("end", end);
    pump();
    await_reader();
    progress_.finish(end);
    // The signal that ended us may have ended stdout's reader, too, or a terminal's end was both.
    const bool took_reader =
        cause && ended_by_signal_ && (write_error_ == EPIPE || write_error_ == EIO);
    if (write_error_ && !took_reader) return exit_code_of_write_error(write_error_);
    if (cause) say(cause->message);
    return cause ? cause->exit_code : 0;
  }

  /// Until stdout's reader has all lines, or takes none when a signal has ended the job.
  void await_reader() {
    size_t left = output_.bytes();
    base::TimePoint taken = base::Clock::now();
    while (left > 0 && !write_error_ && !stop_waiting_) {
      deadline_ = ended_by_signal_ ? taken + kReaderGrace : base::kNever;
      wait_once();
      if (std::exchange(left, output_.bytes()) != output_.bytes()) {
        taken = base::Clock::now();
      } else if (ended_by_signal_ && base::Clock::now() - taken >= kReaderGrace) {
        return;
      }
    }
  }

  void tell(const char* event, const Json& fields) {
    output_.push(json_line(event, run_id_, plan_.cmd, std::nullopt, "launcher", fields));
  }

  const LaunchPlan& plan_;
  std::string run_id_;  // empty: not known yet
  Json config_;
  net::Fd listener_;
  net::Fd signals_;
  OutputQueue output_;
  Progress progress_;
  const Child::Handlers handlers_;
  std::vector<Child> children_;
  Phase phase_ = Phase::kRunning;
  base::TimePoint deadline_ = base::kNever;
  base::TimePoint kill_blamed_at_ = base::kNever;
  int ended_by_signal_ = 0;
  base::TimePoint signalled_at_{};
  bool stop_waiting_ = false;  ///< a second signal: stdout is not waited for either
  int write_error_ = 0;
  std::optional<base::Error> start_error_;
  std::optional<int> stopped_rank_;  // that had to be killed before anybody else had failed
};

}  // namespace

int run_launcher(const LaunchPlan& plan) { return Launcher(plan).run(); }

}  // namespace distrain::app
