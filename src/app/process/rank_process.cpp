#include <cstdio>
#include <system_error>
#include <thread>

#include <fmt/format.h>
#include <poll.h>
#include <torch/version.h>
#include <unistd.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/process.h"
#include "distrain/job/device_choice.h"
#include "distrain/membership/slot.h"
#include "distrain/net/shared_memory.h"
#include "distrain/rpc/error.h"
#include "process/launcher.h"
#include "process/output.h"

namespace distrain::app {
namespace {

constexpr int kGoalExitCode = 11;
// Time for the main thread of a failed rank to unwind and exit. Most ranks need a tenth of it.
constexpr auto kUnwinding = std::chrono::milliseconds(700);
constexpr auto kDisplayTick = std::chrono::milliseconds(500);
constexpr int kLookAgainMs = 100;  // a blocked write checks this often whether to stop

sigset_t awaited_signals() { return ending_signals({kSaveSignal, kQuestionSignal}); }

/// Runs `what` on a detached thread. Returns false if no thread can be started.
bool run_aside(std::function<void()> what) {
  try {
    std::thread(std::move(what)).detach();
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

/// Runs a rank and writes its JSON lines. emit() waits for a slow reader. When the job stops,
/// emit() only queues the lines that the reader does not accept, so that the job can save.
class RankProcess final : public job::EventSink {
 public:
  explicit RankProcess(const RankRun& run)
      : run_(run), lines_(run.out_fd), display_(run.display, screen_of(run.display, lines_)) {
    identity_.role = run.role;
    if (run.job.rank != membership::kUnassignedRank) identity_.rank = run.job.rank;
    take_run_id(run.job.effective);
  }

  int run() {
    base::block_in_all_threads(awaited_signals());      // threads started later inherit the mask
    std::thread([this] { end_by_signal(); }).detach();  // never joined: the process ends by _exit()
    if (run_.display.mode != DisplayPlan::Mode::kNone) {
      show([](Display& display) { display.begin(); });
      run_aside([this] {
        for (;; std::this_thread::sleep_for(kDisplayTick)) show([](Display& each) { each.tick(); });
      });
    }
    job::Outcome outcome;
    std::optional<Cause> cause;
    try {
      outcome = run_body();
      cause = report(outcome);
    } catch (...) {
      outcome.fields = run_.job.progress->fields();
      cause = report(error_of_this_rank());
    }
    if (!finish(outcome.fields, cause, outcome.others)) pause();  // another thread ends the process
    std::fflush(nullptr);
    if (const int error = unheard()) leave_unheard(error);
    return cause ? cause->exit_code : 0;
  }

  void emit(std::string_view event, const Json& fields) override {
    std::lock_guard lock(mutex_);
    if (finished_) return;
    push_locked(event, fields);
    write_locked([this] { return !stop_.requested(); });
  }

  void placed(int rank) override {
    run_.devices->set_rank(rank);
    std::lock_guard lock(identity_mutex_);
    identity_.rank = rank == membership::kUnassignedRank ? std::nullopt : std::optional(rank);
  }

  void joined(std::string_view role, const job::OptionMap& of_rank_0) override {
    std::lock_guard lock(identity_mutex_);
    identity_.role = role;
    identity_.of_rank_0 = of_rank_0;
    take_run_id(of_rank_0);
  }

  void used(const Json& config) override {
    std::lock_guard lock(identity_mutex_);
    identity_.used.update(config);
  }

  void may_be_lost() override {
    if (run_.job.spawned) emit(kMayBeLost, Json::object());
  }

  /// Emits at most one line a second. Waits neither for the launcher nor for other threads.
  void saving() override {
    if (!run_.job.spawned) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    const base::TimePoint now = base::Clock::now();
    if (!lock || finished_ || now - told_saving_ < std::chrono::seconds(1)) return;
    told_saving_ = now;
    push_locked(kSaving, Json::object());
    write_locked();
  }

  void progress(const Json& fields) override {
    if (!run_.shows_progress && !display_.is_on()) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || finished_ || !lines_.empty()) return;
    push_locked(kProgress, fields);
    write_locked();
  }

  /// Called when the rank fails. If the main thread does not end in time, reports the error and
  /// exits, because a running step, on the main thread or on a worker, cannot be interrupted.
  void failing(const base::Error& error) override {
    if (is_unwinding_.exchange(true)) return;
    run_aside([this, error] {  // if no thread can start, there is no time limit
      std::this_thread::sleep_for(kUnwinding);
      const Cause cause = own_cause(error);
      leave_in_time(cause);                 // because the next lines may wait for the reader
      if (!tell_error_once(error)) return;  // the main thread reports the error
      if (finish(run_.job.progress->fields(), cause)) leave(cause.exit_code);
    });
  }

 private:
  // ---- JSON lines ----

  /// Calls `what` with the display. Does nothing while another thread writes lines.
  void show(const std::function<void(Display&)>& what) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return;
    what(display_);
    if (display_.pretty()) write_locked();
  }

  /// The fields that lines have in common, and values for `config`.
  struct Identity {
    std::string run_id;
    std::optional<int> rank;  ///< null until rank 0 has assigned a rank
    std::string role;
    job::OptionMap of_rank_0;    ///< rank 0's options; empty until they arrive
    Json used = Json::object();  ///< from EventSink::used(); replaces values in `config`
  };
  Identity identity() const {
    std::lock_guard lock(identity_mutex_);
    return identity_;
  }

  /// Returns true to the first caller only. That caller reports on stderr why the process ends.
  bool may_tell() { return !is_told_.exchange(true); }

  /// Writes the last line. Returns false if another thread has written it or is ending the process.
  /// Waits for the reader; if the reader is no launcher and a stop is requested, for kReaderGrace.
  bool write_last(const Json& fields) {
    std::lock_guard lock(mutex_);
    if (std::exchange(finished_, true)) return false;
    push_locked(run_.job.spawned ? "rank_end" : "end", fields);
    if (display_.pretty()) display_.finish(fields);
    write_locked([this, since = base::Clock::now()] {
      return run_.job.spawned || !stop_.requested() ||
             base::Clock::now() < lines_.given_up_at(since);
    });
    if (!may_tell()) return false;
    display_.finish(fields);
    is_told_ = display_.is_told();
    return true;
  }

  void take_run_id(const job::OptionMap& options) {
    if (const auto id = options.find(job::kRunId); id != options.end())
      identity_.run_id = id->second;
  }

  void push_locked(std::string_view event, const Json& fields) {
    std::unique_lock lock(identity_mutex_);
    const Json whole =
        json_event(event, identity_.run_id, run_.job.name, identity_.rank, identity_.role, fields);
    lock.unlock();
    const std::string line = line_of(whole);
    const Json problem = run_.log && event != kProgress ? run_.log->write(line) : Json();
    if (!problem.is_null()) push_locked("warn", problem);
    display_.on_event(whole);
    if (run_.job.spawned || (event != kProgress && !display_.pretty())) lines_.push(line);
  }

  /// Writes the lines that the reader accepts now. While `waits` returns true, waits for the rest.
  /// If stdout cannot be written, drops the lines and ends the job.
  void write_locked(const std::function<bool()>& waits = [] { return false; }) {
    writing_since_ = base::Clock::now();
    int error = lines_.pump();
    while (!error && !lines_.empty() && waits()) {
      pollfd item{lines_.fd(), POLLOUT, 0};
      poll(&item, 1, kLookAgainMs);
      error = lines_.pump();
    }
    writing_since_ = base::TimePoint{};
    if (!error) return;
    lines_.clear();
    // If the job saves, end it as a signal would (save, then end), so that no work is lost.
    if (!stop_.request() && !stop_.requested() && !ending_) leave_unheard(error);
    int none = 0;
    write_error_.compare_exchange_strong(none, error);
  }

  // ---- the rank ----

  job::Outcome run_body() {
    const int threads = set_up_threads(run_.threads, run_.local_ranks);
    try {  // choose the devices before the first line, which shows them
      if (run_.knows_devices) run_.devices->get(run_.role, {});
    } catch (...) {  // ignored, because the next get(), after the first line, throws again
    }
    const Json config = run_.config({});
    emit("start",
         {{"world_size", run_.job.world_size != 0 ? Json(run_.job.world_size) : Json()},
          {"pid", getpid()},
          {"host", host_name()},
          {"version", DISTRAIN_VERSION},
          {"torch", TORCH_VERSION},
          {"seed", config.value("seed", Json())},
          {"threads", threads},
          {"device", run_.devices->names()},
          {"transport", run_.job.transport},
          {"shared_memory", run_.job.transport != "tcp" && net::SharedMemory::is_available()},
          {"trust", !run_.job.token.empty() ? "token"
                    : run_.job.insecure     ? "anybody"
                                            : "user"},
          {"data", run_.data},
          {"config", config}});
    if (run_.all_here) run_.devices->get(run_.role, {});  // otherwise run_.body chooses the devices
    if (!run_.warning.empty()) emit("warn", {{"kind", "invalid"}, {"message", run_.warning}});
    return run_.body(run_.job, *this);
  }

  std::optional<Cause> report(const job::Outcome& outcome) {
    std::optional<Cause> cause;
    if (outcome.stopped) {
      const int number = stop_.number();
      cause = cause_by_signal(number != 0 ? number : SIGTERM, identity().rank);
      if (!outcome.message.empty()) cause->message = outcome.message;
    } else if (outcome.goal_missed) {  // not a base::Error, because the program worked correctly
      cause = Cause{.rank = identity().rank,
                    .host = host_name(),
                    .kind = kGoalNotReached,
                    .message = outcome.message,
                    .exit_code = kGoalExitCode};
      emit("error", error_fields(*cause, run_.job.started));
    }
    if (outcome.afterwards && !cause) return report(*outcome.afterwards);
    if (outcome.afterwards) {  // the earlier cause sets the exit code
      emit("warn", {{"kind", base::kind_name(outcome.afterwards->kind)},
                    {"message", outcome.afterwards->message}});
    }
    return cause;
  }

  Cause report(const base::Error& error) {
    tell_error_once(error);
    return own_cause(error);
  }

  Cause own_cause(const base::Error& error) const {
    Cause cause = cause_of(error);
    const Identity own = identity();
    if (!cause.rank || cause.rank == own.rank) {
      cause.rank = own.rank;
      cause.role = own.role;
      cause.host = host_name();
    }
    return cause;
  }

  bool tell_error_once(const base::Error& error) {
    std::lock_guard lock(told_error_mutex_);
    if (std::exchange(told_error_, true)) return false;
    emit("error", error_fields(cause_of(error), run_.job.started));
    return true;
  }

  /// Returns the current exception as an Error, which names this rank unless it names another one.
  base::Error error_of_this_rank() const {
    base::Error error = rpc::error_in_flight(base::ErrorKind::kInternal);
    if (error.rank >= 0) return error;
    error.rank = identity().rank.value_or(-1);
    const bool is_short = error.kind == base::ErrorKind::kResources && error.rank >= 0;
    return is_short ? job::error_of_rank(std::move(error), error.rank, run_.role) : error;
  }

  /// Writes the last line and prints the cause on stderr. `others` has the fields of other ranks,
  /// for the job's last line. Returns false if another thread ends the process.
  bool finish(const Json& fields, const std::optional<Cause>& cause,
              const std::map<int, Json>& others = {}) {
    const bool spawned = run_.job.spawned;
    Json own = fields;  // of a rank that has failed, without its usage
    run_.job.add_usage(own);
    Summary summary;
    summary.add(own);
    if (!spawned) {
      for (const auto& [other, its_fields] : others) summary.add(its_fields);
    } else if (!run_.all_here && !others.empty()) {  // the launcher gets lines of its ranks only
      emit(kFigures, {{"ranks", others}});
    }
    const auto [run_id, rank, role, of_rank_0, used] = identity();
    const char* const scope = !spawned && rank == 0 ? "job" : "rank";
    Json end = summary.end_fields(scope, run_.job.started, cause);
    // Omit `config` if the launcher knows it. Rank 0's launcher knows all values but `used`.
    const bool known = of_rank_0.empty() || run_.job.effective.contains(job::kRunId);
    if (!spawned || !known || (rank == 0 && !used.empty())) {
      Json config = run_.config(of_rank_0);
      config.update(used);
      end.update({{"seed", config.value("seed", Json())}, {"config", config}});
    }
    if (!write_last(end)) return false;
    const bool is_cancelled = cause && cause->kind == base::kind_name(base::ErrorKind::kCancelled);
    if (cause && !(is_cancelled && unheard())) tell(*cause);
    return true;
  }

  /// Waits for a signal that ends the process, reports it in the last output line and exits. A job
  /// that saves before it ends handles its first signal itself; this thread then waits for another.
  void end_by_signal() {
    const sigset_t set = awaited_signals();
    int number = 0;
    do {
      if (sigwait(&set, &number) != 0) return;
      if (number == kSaveSignal) stop_.request_save();
      if (number == kQuestionSignal) tell_waits();
    } while (number == kSaveSignal || number == kQuestionSignal ||
             stop_.heeds(number, base::Clock::now()));
    ending_ = true;
    const Cause cause = cause_by_signal(number, identity().rank);
    leave_in_time(cause);
    if (finish(run_.job.progress->fields(), cause)) leave(cause.exit_code);
  }

  /// Prints a line for each operation that blocks this rank. Uses a new thread, because a deadlock
  /// or a blocked reader of stderr must not keep this thread from handling signals.
  void tell_waits() {
    if (telling_.exchange(true)) return;
    const auto say_so = [this] {
      const Identity own = identity();
      const std::string who = own.rank ? rank_name(*own.rank, own.role) : "a new rank";
      try {
        std::vector<rpc::Wait> waits = stop_.waits();
        const base::TimePoint writing = writing_since_;
        if (writing != base::TimePoint{}) {
          waits.push_back({"the reader of standard output", writing});
        }
        if (waits.empty()) say(who + " waits for nothing");
        for (const auto& [what, since] : waits) {
          say(fmt::format("{} waits, {:.1f} s: {}", who, base::seconds_since(since), what));
        }
      } catch (...) {  // the job continues
        say(who + " cannot tell: " + base::current_error(base::ErrorKind::kInternal).message);
      }
      telling_ = false;
    };
    if (!run_aside(say_so)) telling_ = false;
  }

  /// Makes a new thread exit the process after kReaderGrace, in case a write to stdout blocks and
  /// holds the sink's lock. If another thread is reporting the end, that thread gets more time.
  void leave_in_time(const Cause& cause) {
    run_aside([this, cause] {  // if no thread can start, there is no time limit
      std::this_thread::sleep_for(kReaderGrace);
      if (is_writable(STDERR_FILENO) && !tell(cause)) std::this_thread::sleep_for(kUnwinding);
      leave(cause.exit_code);
    });
  }

  /// Returns the errno of the failed write to stdout; 0 if no write failed, or a signal has come.
  int unheard() const { return stop_.number() == 0 ? write_error_.load() : 0; }

  /// Exits because stdout cannot be written. Reports a signal as the cause instead: Ctrl-C also
  /// ends stdout's reader, and after a terminal has closed, writes fail (EIO) before SIGHUP comes.
  [[noreturn]] void leave_unheard(int error) {
    const sigset_t set = ending_signals();
    const timespec look_again{.tv_sec = 0, .tv_nsec = 10'000'000};
    const base::TimePoint until = base::deadline_after(error == EIO ? kHangUp : kHangUp.zero());
    int number = 0;
    do {
      number = std::max(sigtimedwait(&set, nullptr, &look_again), stop_.number());
    } while (number == 0 && base::Clock::now() < until);
    if (number == 0) leave(exit_code_of_write_error(error, !run_.job.spawned));
    const Cause cause = cause_by_signal(number, identity().rank);
    say(cause.message);
    leave(cause.exit_code);
  }

  /// Reports the cause on stderr. Returns false if another thread reports it. A spawned rank
  /// reports nothing, because its launcher reports the root cause.
  bool tell(const Cause& cause) {
    if (run_.job.spawned) return true;
    if (!may_tell()) return false;
    say(message_of(cause));
    return true;
  }

  /// Exits at once; callable on any thread.
  [[noreturn]] void leave(int code) const {
    const auto none_anew = base::TemporaryPath::remove_all();
    if (!run_.job.spawned) leave_process(code);
    std::fflush(nullptr);
    _exit(code);  // leave_process() may raise SIGINT, and the rank would look killed
  }

  const RankRun run_;
  job::StopSignal& stop_ = *run_.job.stop;
  std::mutex mutex_;  // held during a write, which may wait for the reader
  OutputQueue lines_;
  Display display_;
  bool finished_ = false;
  std::atomic<bool> is_told_{false};  // a thread has begun to report why the process ends
  base::TimePoint told_saving_{};
  std::atomic<base::TimePoint> writing_since_{};  // if no write is in progress: TimePoint{}
  mutable std::mutex identity_mutex_;
  Identity identity_;                 // guarded by identity_mutex_
  std::atomic<bool> telling_{false};  // a thread of tell_waits() is running
  std::atomic<bool> ending_{false};   // the process is about to end
  std::atomic<bool> is_unwinding_{false};
  std::mutex told_error_mutex_;  // held while the error line is written: the last line follows it
  bool told_error_ = false;      // guarded by told_error_mutex_
  std::atomic<int> write_error_{0};  // errno of the first failed write
};

}  // namespace

int run_rank(const RankRun& run) {
  // The object is never destroyed, because the signal thread uses it until the process exits.
  return (new RankProcess(run))->run();
}

}  // namespace distrain::app
