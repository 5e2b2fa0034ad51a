#include "process/launcher.h"

#include <errno.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "process/rank_group.h"

namespace distrain::app {
namespace {

using std::chrono::nanoseconds;

constexpr auto kSignalGrace = std::chrono::seconds(5);  // from a signal to SIGKILL for the ranks
constexpr auto kFirstPause = std::chrono::milliseconds(250);  // before a restart
constexpr auto kLongestPause = std::chrono::seconds(30);
constexpr auto kLasts = std::chrono::seconds(5);  // a rank that ran this long did not fail early

class Launcher {
 public:
  explicit Launcher(const LaunchPlan& plan)
      : plan_(plan),
        run_id_(plan.told.run_id),
        config_(plan.config),
        listener_(plan.told.listen_fd),
        output_(STDOUT_FILENO),
        display_(plan.display, screen_of(plan.display, output_)),
        handlers_{[this](const Json& event, std::string line) { print(event, std::move(line)); },
                  [this](const std::string& line) {
                    clear_display();
                    write_all(STDERR_FILENO, line);
                  }} {}

  int run() {
    const sigset_t awaited = ending_signals({SIGCHLD, kSaveSignal, kQuestionSignal, SIGTSTP});
    base::block_in_all_threads(awaited);
    signals_ = net::Fd(signalfd(-1, &awaited, SFD_CLOEXEC | SFD_NONBLOCK));
    display_.begin();
    if (!plan_.warning.empty()) tell("warn", {{"kind", "invalid"}, {"message", plan_.warning}});
    std::optional<Verdict> verdict;
    do {
      verdict = run_ranks();
    } while (verdict && may_restart(*verdict) && prepare_restart(*verdict));
    return finish(verdict);
  }

 private:
  // ---- starts of the job ----

  /// Runs the ranks until all have ended. Returns why they failed; nullopt if all succeeded.
  std::optional<Verdict> run_ranks() {
    newest_ = newest_checkpoint();
    if (restarts_ == 0) newest_at_first_ = newest_;
    group_.emplace(plan_, handlers_, [this](int rank) {  // called in the forked process
      signals_.reset();
      if (rank != 0) listener_.reset();
    });
    lost_.clear();
    group_->start(told());
    if (restarts_ == plan_.max_restarts) listener_.reset();
    while (group_->any_alive() || has_lost_to_start() || awaits_hang_up()) wait_once();
    has_met_ = has_met_ || group_->has_met();
    hear_of_run();
    return group_->verdict(ended_by_signal_);
  }

  SpawnedRank told() const {
    SpawnedRank told = plan_.told;
    told.shows_progress = plan_.display.mode >= DisplayPlan::Mode::kLines;
    if (generation_ == 0) return told;
    if (told.generation) *told.generation += generation_;
    told.rejoins = !plan_.newest_checkpoint;
    if (newest_ != newest_at_first_) told.resume = "auto";
    return told;
  }

  bool ends() const { return ended_by_signal_ || write_error_; }

  std::optional<std::string> newest_checkpoint() const {
    return plan_.newest_checkpoint ? plan_.newest_checkpoint() : std::nullopt;
  }

  /// Returns true if a restart may help. After a lack of resources, only if all ranks had joined.
  bool may_restart(const Verdict& verdict) const {
    using base::ErrorKind;
    const auto is = [&](ErrorKind kind) { return verdict.cause.kind == base::kind_name(kind); };
    const bool may_pass = is(ErrorKind::kPeerLost) || (is(ErrorKind::kResources) && has_met_);
    const bool can_go_on = plan_.newest_checkpoint || !plan_.display.has_rank_0;
    return may_pass && can_go_on && !verdict.by_signal && restarts_ < plan_.max_restarts && !ends();
  }

  /// Reports the restart and pauses. Returns false if a signal or a write error ends the job.
  bool prepare_restart(Verdict& verdict) {
    const std::optional<std::string> newest = newest_checkpoint();
    const bool got_further = plan_.newest_checkpoint ? newest != newest_ : group_->has_met();
    pause_ = got_further ? kFirstPause : longer(pause_);
    ++restarts_;
    ++generation_;
    tell_restart(plan_.ranks, newest, pause_, verdict.cause,
                 "the job starts again" + (newest ? " from " + *newest : ""));
    const base::TimePoint then = base::deadline_after(pause_);
    wake_at_ = then;
    while (base::Clock::now() < then && !ends()) wait_once();
    wake_at_ = base::kNever;
    if (ended_by_signal_) verdict = {cause_by_signal(ended_by_signal_), true, {}};
    return !ends();
  }

  static nanoseconds longer(nanoseconds pause) {
    return std::clamp<nanoseconds>(pause * 2, kFirstPause, kLongestPause);
  }

  void tell_restart(const std::vector<int>& ranks, const std::optional<std::string>& checkpoint,
                    nanoseconds pause, const Cause& cause, const std::string& what) {
    tell("restart", {{"ranks", ranks},
                     {"generation", or_null(told().generation)},
                     {"restarts_left", plan_.max_restarts - restarts_},
                     {"checkpoint", or_null(checkpoint)},
                     {"after_s", std::chrono::duration<double>(pause).count()},
                     {"kind", cause.kind},
                     {"cause", cause.message},
                     {"cause_rank", or_null(cause.rank)}});
    clear_display();
    say(fmt::format("{}: {} ({} of {})", message_of(cause), what, restarts_, plan_.max_restarts));
  }

  // ---- lost ranks that the job continues without ----

  /// Schedules a lost rank's restart, if allowed. The pause grows while the rank fails early.
  void on_lost(int rank) {
    const auto child = std::ranges::find(group_->ranks(), rank, &Child::rank);
    Lost& its = lost_[rank];
    its.at = base::kNever;
    const bool found_no_place = child->is_successor && !child->ready && !child->signal();
    if (restarts_ >= plan_.max_restarts || is_crash(child->signal()) || found_no_place) return;
    const bool lasted = base::Clock::now() - its.started >= kLasts;
    its.pause = lasted ? kFirstPause : longer(its.pause);
    its.cause = group_->cause_of_loss(rank);
    its.at = base::deadline_after(its.pause);
  }

  bool has_lost_to_start() const {
    return std::ranges::any_of(lost_, [](auto& its) { return its.second.at != base::kNever; });
  }

  /// Starts the lost ranks whose pause is over. Starts none and forgets the pauses if the job ends.
  void start_lost_again() {
    const bool goes_on = !group_->is_ending() && !group_->is_over() && !ends();
    for (auto& [rank, its] : lost_) {
      if (goes_on && base::Clock::now() < its.at) continue;
      if (std::exchange(its.at, base::kNever) == base::kNever || !goes_on) continue;
      if (!its.is_told) {
        if (restarts_ >= plan_.max_restarts) continue;
        ++restarts_;
        tell_restart({rank}, {}, its.pause, its.cause, "it is started again, the job goes on");
      }
      SpawnedRank spawned = told();
      spawned.rejoins = true;
      its.is_told = !group_->start_again(spawned, rank);
      if (its.is_told) {  // no process can be started now
        its.pause = longer(its.pause);
        its.at = base::deadline_after(its.pause);
      } else {
        its.started = base::Clock::now();
      }
    }
  }

  // ---- event loop ----

  void wait_once() {
    // Even if no event is requested, poll() reports a reader that has closed the pipe.
    const short writable = output_.empty() ? 0 : POLLOUT;
    std::vector<pollfd> items{{signals_.get(), POLLIN, 0},
                              {write_error_ ? -1 : output_.fd(), writable, 0}};
    group_->add_to(items, takes_lines());
    poll(items.data(), items.size(), poll_timeout_ms());
    if (items[1].revents & (POLLERR | POLLHUP | POLLNVAL)) {
      on_write_error(isatty(output_.fd()) == 1 || errno == EIO ? EIO : EPIPE);
    }
    group_->read(takes_lines());
    signalfd_siginfo info;
    while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
      if (info.ssi_signo != SIGCHLD) on_signal(static_cast<int>(info.ssi_signo));
    }
    for (const int rank : group_->reap()) on_lost(rank);
    start_lost_again();
    display_.tick();
    pump();
    group_->on_time();
  }

  /// Returns true if the queue has room, or if ranks are ending and must not wait for its reader.
  bool takes_lines() const { return write_error_ || group_->is_ending() || !output_.full(); }

  int poll_timeout_ms() const {
    base::TimePoint next = std::min({wake_at_, group_->next_deadline(), display_.next_tick()});
    if (awaits_hang_up()) next = std::min(next, hang_up_by_);
    for (const auto& [rank, its] : lost_) next = std::min(next, its.at);
    if (next == base::kNever) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - base::Clock::now());
    return static_cast<int>(std::max<int64_t>(0, left.count()));
  }

  void on_signal(int number) {
    if (number == SIGTSTP) {
      stop_for_a_while();
    } else if (number == kQuestionSignal) {
      group_->tell_all(number);
    } else if (number == kSaveSignal) {
      group_->tell_one(number);
    } else if (is_finishing_) {
      stop_waiting_ = true;  // do not wait until the queued lines are written
    } else if (!ended_by_signal_) {
      ended_by_signal_ = number;
      signalled_at_ = base::Clock::now();
      group_->end(number, plan_.save_grace.count() > 0 ? plan_.save_grace : kSignalGrace);
    } else if (plan_.save_grace.count() == 0 ||
               base::Clock::now() - signalled_at_ >= job::kSameSignal) {
      stop_waiting_ = true;
      group_->kill();
    }
  }

  /// Stops the ranks, whose process groups Ctrl-Z does not reach, and then this process until
  /// SIGCONT. If SIGTSTP does not stop it (orphaned group or SIG_IGN), all processes go on at once.
  void stop_for_a_while() {
    const base::TimePoint since = base::Clock::now();
    group_->stop();
    clear_display();
    const sigset_t set = base::signal_set({SIGTSTP});
    raise(SIGTSTP);
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);  // stops here until SIGCONT
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
    group_->go_on(base::Clock::now() - since);
  }

  void pump() {
    if (!write_error_) on_write_error(output_.pump());
  }

  void on_write_error(int error) {
    if (write_error_ || !error) return;
    write_error_ = error;
    if (error == EIO) hang_up_by_ = base::deadline_after(kHangUp);
    group_->end_unheard();
  }

  /// Returns true if a terminal may have closed whose SIGHUP, the cause to report, has not come.
  bool awaits_hang_up() const { return !ended_by_signal_ && base::Clock::now() < hang_up_by_; }

  // ---- end ----

  /// Takes the run id and the options from the ranks' lines, in case another launcher has rank 0.
  void hear_of_run() {
    for (const Child& child : group_->ranks()) {
      if (run_id_.empty()) run_id_ = child.run_id;
      const Json told = child.rank_end.value("config", Json::object());
      for (const auto& [option, value] : told.items()) {
        if (!value.is_null()) config_[option] = value;
      }
    }
    rss_mb_ = std::max(rss_mb_, group_->rss_mb());
  }

  int finish(const std::optional<Verdict>& verdict) {
    is_finishing_ = true;
    std::optional<Cause> cause;
    if (verdict) cause = verdict->cause;
    if (verdict && !verdict->error.is_null()) {
      print(verdict->error, line_of(verdict->error));
    } else if (verdict && !verdict->by_signal) {
      tell("error", error_fields(*cause, plan_.told.started));
    }
    Summary summary;
    for (const Child& child : group_->ranks()) summary.add(child.rank_end);
    for (const Child& child : group_->ranks()) {
      for (const Json& other : child.figures) {
        if (std::ranges::count(plan_.ranks, other[0].get<int>()) == 0) summary.add(other[1]);
      }
    }
    summary.add({{"rss_mb", rss_mb_}});
    const char* const scope = plan_.ranks.front() == 0 ? "job" : "rank";
    Json end = summary.end_fields(scope, plan_.told.started, cause);
    if (plan_.max_restarts > 0) end["restarts"] = restarts_;
    end.update({{"seed", config_.value("seed", Json())}, {"config", config_}});
    tell("end", end);
    if (display_.pretty()) display_.finish(end);
    pump();
    await_reader();
    display_.finish(end);
    // After a signal, ignore a closed stdout, because the signal may have ended the reader, too.
    const bool is_reader_gone = write_error_ == EPIPE || write_error_ == EIO;
    const bool by_signal = cause && ended_by_signal_ && is_reader_gone;
    if (write_error_ && !by_signal) return exit_code_of_write_error(write_error_);
    if (cause && !display_.is_told()) say(message_of(*cause));
    return cause ? cause->exit_code : 0;
  }

  /// Writes the queue to stdout. After a signal, gives up if nothing was written for kReaderGrace.
  void await_reader() {
    const base::TimePoint since = base::Clock::now();
    while (!output_.empty() && !write_error_ && !stop_waiting_) {
      wake_at_ = ended_by_signal_ ? output_.given_up_at(since) : base::kNever;
      if (base::Clock::now() >= wake_at_) return;
      wait_once();
    }
  }

  void tell(const char* name, const Json& fields) {
    const Json event = json_event(name, run_id_, plan_.cmd, std::nullopt, "launcher", fields);
    print(event, line_of(event));
  }

  /// Logs an event, passes it to the display and, unless that writes to stdout, writes its line.
  void print(const Json& event, std::string line) {
    const std::string name = text_in(event, "event");
    const Json problem = name == kProgress ? Json() : plan_.log->write(line);
    if (!problem.is_null()) tell("warn", problem);
    if (write_error_) return;
    // After a signal, a rank may end before rank 0 does, so do not show that rank as lost.
    if (!ended_by_signal_ || name != "lost") display_.on_event(event);
    if (!display_.pretty() && name != kProgress) output_.push(std::move(line));
  }

  void clear_display() {
    display_.clear();
    if (display_.pretty()) pump();
  }

  const LaunchPlan& plan_;
  std::string run_id_;  // empty while unknown
  Json config_;
  net::Fd listener_;
  net::Fd signals_;
  OutputQueue output_;
  Display display_;
  const Child::Handlers handlers_;
  std::optional<RankGroup> group_;  // the ranks of the latest start
  double rss_mb_ = 0;               // the largest peak memory of any rank in any start
  struct Lost {
    nanoseconds pause{0};
    base::TimePoint at = base::kNever;  // when the rank is started again
    base::TimePoint started{};          // when the rank was last started
    bool is_told = false;               // the restart is reported, but the rank is not started yet
    Cause cause;
  };
  std::map<int, Lost> lost_;                             // by rank
  int restarts_ = 0;                                     // restarts of the job and of single ranks
  uint32_t generation_ = 0;                              // restarts of the job
  bool has_met_ = false;                                 // all ranks had joined in some start
  std::optional<std::string> newest_at_first_, newest_;  // checkpoint at first and latest start
  nanoseconds pause_{0};
  base::TimePoint wake_at_ = base::kNever;
  base::TimePoint hang_up_by_{};
  int ended_by_signal_ = 0;
  base::TimePoint signalled_at_{};
  bool is_finishing_ = false;
  bool stop_waiting_ = false;  ///< set by a second signal: do not wait for stdout's reader
  int write_error_ = 0;
};

}  // namespace

int run_launcher(const LaunchPlan& plan) { return Launcher(plan).run(); }

}  // namespace distrain::app
