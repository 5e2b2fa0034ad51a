#include "process/rank_process.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/temporary_path.h"
#include "distrain/cuda/device_choice.h"
#include "distrain/rpc/error.h"
#include "process/json_sink.h"
#include "process/output.h"
#include "process/summary.h"

namespace distrain::app {
namespace {

constexpr int kGoalNotReached = 11;

sigset_t ending_signal_set() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : ending_signals()) sigaddset(&set, number);
  return set;
}

sigset_t awaited_signal_set() {
  sigset_t set = ending_signal_set();
  sigaddset(&set, kSaveSignal);
  return set;
}

/// A spawned rank leaves the words to the launcher, which knows the root cause.
void tell(const RankRun& run, const std::string& message) {
  if (!run.job.spawned) say(message);
}

/// From any thread, whatever the others are at.
[[noreturn]] void leave(const RankRun& run, int code) {
  const auto none_anew = base::TemporaryPath::remove_all();
  if (!run.job.spawned) leave_process(code);
  std::fflush(nullptr);
  _exit(code);  // a signal of its own would look to the launcher like a rank that was killed
}

/// Gives back the exit code.
int tell_unheard(const RankRun& run, int error) {
  if (error != EPIPE) tell(run, fmt::format("stdout: {}", strerror(error)));
  return exit_code_of_write_error(error);
}

/// A signal that has come and that nobody has looked at, which this does; 0 if there is none.
int pending_signal() {
  const sigset_t set = ending_signal_set();
  const timespec now{};
  return std::max(0, sigtimedwait(&set, nullptr, &now));
}

/// Ctrl-C ends stdout's reader, too, and a terminal that closes takes stdout with it: whichever is
/// noticed first, the signal is why the process ends.
[[noreturn]] void leave_unheard(const RankRun& run, int error) {
  const int number = pending_signal();
  if (number == 0) leave(run, tell_unheard(run, error));
  const Cause cause = cause_by_signal(number, run.job.rank);
  tell(run, cause.message);
  leave(run, cause.exit_code);
}

Json start_fields(const RankRun& run, int threads) {
  Json fields;
  const Json config = run.config({});
  fields["world_size"] = run.shown_world_size ? Json(*run.shown_world_size) : Json();
  fields["pid"] = getpid();
  fields["host"] = host_name();
  fields["version"] = DISTRAIN_VERSION;
  fields["torch"] = torch_version();
  fields["seed"] = config.value("seed", Json());
  fields["threads"] = threads;
  fields["device"] = run.devices->names();
  fields["transport"] = run.job.transport;
  fields["config"] = config;
  return fields;
}

/// Of the last line.
Json end_fields(const RankRun& run, const JsonSink& sink, const Summary& summary, int code,
                const std::optional<Cause>& cause) {
  Json fields = summary.end_fields(code, base::seconds_since(run.job.started), cause);
  if (run.last_event == "end") tell_config(run.config(sink.of_rank_0()), fields);
  return fields;
}

/// For the first line. That there is none is told after it.
void look_for_devices(const RankRun& run) {
  try {
    run.devices->get(run.role, {});
  } catch (...) {  // kept, and thrown again
  }
}

Cause cause_by_goal(const RankRun& run, const std::string& message) {
  return {.rank = run.job.rank,
          .host = host_name(),
          .kind = "goal_not_reached",
          .message = message,
          .exit_code = kGoalNotReached};
}

/// An `error` line for what is no base::Error: the program did as it should.
Json goal_fields(const RankRun& run, const Cause& cause) {
  Json fields = error_fields({base::ErrorKind::kInternal, cause.message, run.job.rank, {}},
                             base::seconds_since(run.job.started));
  fields["kind"] = cause.kind;
  fields["exit_code"] = cause.exit_code;
  return fields;
}

/// Waits for a signal that ends the process and says so in the last line. Without this a rank that
/// joined, with no launcher above it, would leave its log without an end. A job that saves before
/// it ends sees to its first signal itself. `ending` turns true when the process is about to end.
void end_by_signal(const RankRun& run, JsonSink& sink, std::atomic<bool>& ending) {
  const sigset_t set = awaited_signal_set();
  int number = 0;
  do {
    if (sigwait(&set, &number) != 0) return;
    if (number == kSaveSignal) run.job.stop->request_save();
  } while (number == kSaveSignal || run.job.stop->heeds(number, base::Clock::now()));
  ending = true;
  const Cause cause = cause_by_signal(number, run.job.rank);
  Summary summary;
  summary.add_rss(peak_rss_mb());
  summary.add(run.devices->usage());
  const Json fields = end_fields(run, sink, summary, cause.exit_code, cause);
  if (!sink.finish(run.last_event, fields)) return;  // the body ended just now: its word holds
  tell(run, cause.message);
  leave(run, cause.exit_code);
}

/// The error in flight: whatever names no other rank went wrong on this one.
base::Error error_of_this_rank(const RankRun& run) {
  base::Error error = rpc::error_in_flight(base::ErrorKind::kInternal);
  if (error.rank >= 0) return error;
  error.rank = run.job.rank;
  const bool of_device =
      error.kind == base::ErrorKind::kResources && run.devices->has_accelerator();
  return of_device ? cuda::error_of_rank(std::move(error), error.rank, run.role) : error;
}

Cause report(const RankRun& run, JsonSink& sink, const base::Error& error) {
  sink.emit("error", error_fields(error, base::seconds_since(run.job.started)));
  tell(run, error.message);
  Cause cause = cause_of(error);
  if (cause.rank.value_or(run.job.rank) == run.job.rank) {
    cause.rank = run.job.rank;
    cause.host = host_name();
  }
  return cause;
}

}  // namespace

void block_ending_signals() { block_in_all_threads(awaited_signal_set()); }

int run_rank(const RankRun& run) {
  std::atomic<bool> ending{false};
  std::atomic<int> write_error{0};  // the first
  job::StopSignal& stop = *run.job.stop;
  const auto id = run.job.effective.find(job::kRunId);
  const std::string run_id = id == run.job.effective.end() ? std::string() : id->second;
  JsonSink sink(run.out_fd, run_id, run.job.name, run.job.rank, run.role, [&](int error) {
    // A job that saves does so when nobody hears it any more, as it does by a signal.
    if (!stop.request() && !stop.requested() && !ending) leave_unheard(run, error);
    int none = 0;
    write_error.compare_exchange_strong(none, error);
  });
  // What stdout failed with, unless a signal came as well: then that is why the job ends.
  const auto unheard = [&] { return stop.number() == 0 ? write_error.load() : 0; };
  block_ending_signals();
  // Never joined: the process leaves by _exit.
  std::thread(end_by_signal, std::cref(run), std::ref(sink), std::ref(ending)).detach();

  Summary summary;
  std::optional<Cause> cause;
  try {
    const int threads = set_up_threads(run.threads, run.local_ranks);
    if (run.knows_devices) look_for_devices(run);
    sink.emit("start", start_fields(run, threads));
    if (run.all_here) run.devices->get(run.role, {});  // else the others are to hear of it
    if (!run.warning.empty()) {
      sink.emit("warn", {{"kind", "invalid"}, {"message", run.warning}});
    }
    const job::Outcome outcome = run.body(run.job, sink);
    summary.add(outcome.fields);
    if (outcome.stopped) {
      const int number = stop.number();
      cause = cause_by_signal(number != 0 ? number : SIGTERM, run.job.rank);
      if (!outcome.message.empty()) cause->message = outcome.message;
      if (unheard() == 0) tell(run, cause->message);
    } else if (outcome.goal_missed) {
      cause = cause_by_goal(run, outcome.message);
      sink.emit("error", goal_fields(run, *cause));
      tell(run, cause->message);
    }
    if (outcome.afterwards && !cause) {
      cause = report(run, sink, *outcome.afterwards);
    } else if (outcome.afterwards) {  // the code and the error are those of what came first
      sink.emit("warn", {{"kind", base::kind_name(outcome.afterwards->kind)},
                         {"message", outcome.afterwards->message}});
    }
  } catch (...) {
    cause = report(run, sink, error_of_this_rank(run));
  }
  summary.add_rss(peak_rss_mb());
  summary.add(run.devices->usage());
  const int code = cause ? cause->exit_code : 0;
  if (!sink.finish(run.last_event, end_fields(run, sink, summary, code, cause))) {
    pause();  // a signal came first; its thread is about to end the process
  }
  std::fflush(nullptr);
  const int error = unheard();
  return error != 0 ? tell_unheard(run, error) : code;
}

}  // namespace distrain::app
