// Runs whole jobs of the scenarios in a test and reads their checkpoints. The ranks of a job are
// threads of this process, or the job is one `--local` run.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "../cmd/jobs.h"
#include "../src/app/program.h"
#include "distrain/base/error.h"
#include "distrain/job/checkpoints.h"
#include "distrain/net/socket.h"
#include "support/catch.h"
#include "support/event_check.h"
#include "support/files.h"

namespace distrain::testing {

using job::Job;
using job::Json;
using job::Outcome;
using rpc::NamedTensors;
using testing::Folder;

enum class Place { kRanks, kLocal };

/// A checkpoint with all of its tensors in memory. The rows of a table are in the order of their
/// ids, because the order in the file depends on the order in which lookups have made the rows.
struct Snapshot : job::Snapshot {
  explicit Snapshot(job::Snapshot snapshot) : job::Snapshot(std::move(snapshot)) {
    for (const auto& [name, file] : job::Snapshot::files) {
      for (const auto& [tensor, info] : file.tensors()) {
        files[name][tensor] = file.tensor(tensor);
        if (!name.starts_with("table-")) continue;
        const std::string ids =
            tensor.substr(0, tensor.find('.')) + ".ids" + tensor.substr(tensor.rfind('.'));
        files[name][tensor] = files[name][tensor].index_select(0, file.tensor(ids).argsort());
      }
    }
  }
  const NamedTensors& file(const std::string& name) const { return files.at(name); }
  std::map<std::string, NamedTensors> files;  // hides the member of job::Snapshot
};

/// A line that a rank has printed.
struct Line {
  int rank = 0;
  std::string event;
  Json fields;
};

/// Callbacks that a test sets to act on the ranks of a job.
template <class Options>
struct Hooks {
  std::function<void(Job&)> job;                       ///< called before the rank starts
  std::function<void(int rank, Options&)> options;     ///< may change the options of the rank
  std::function<void(const Job&, const Line&)> heard;  ///< called for each line, one at a time
  /// Called for each line, concurrently for several ranks, so it may wait for another rank.
  std::function<void(const Job&, const Line&)> heard_at_once;
};

/// Returns a hook that delays each save, as a slow disk does.
inline std::function<bool()> slow_by(double seconds) {
  return [seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return false;
  };
}

/// Returns hooks that delay the calls of `rank`. With a long delay, this rank is the slowest.
template <class Options>
Hooks<Options> slow_rank(int rank, double delay_s) {
  Hooks<Options> hooks;
  hooks.job = [rank, delay_s](Job& job) {
    if (job.rank == rank) job.inject.call_delay_s = delay_s;
  };
  return hooks;
}

struct Finished {
  std::map<int, Outcome> outcomes;    ///< by rank
  std::map<int, base::Error> errors;  ///< by rank
  std::vector<Line> lines;

  /// Returns the fields of each `event` line that `rank` (or, if it is negative, any rank) printed.
  std::vector<Json> all(const std::string& event, int rank = -1) const {
    std::vector<Json> found;
    for (const Line& line : lines) {
      if (line.event == event && (rank < 0 || line.rank == rank)) found.push_back(line.fields);
    }
    return found;
  }
  const Json& fields(int rank) const { return outcomes.at(rank).fields; }
};

/// Checks that each line of a rank is declared in `events`, and passes the line to `hear`. Passes
/// the rank number that rank 0 assigns, if it does, to `placed`.
class Listener final : public job::EventSink {
 public:
  explicit Listener(
      std::vector<job::Event> events = job::common_events(),
      std::function<void(Line)> hear = [](const Line&) {},
      std::function<void(int)> placed = [](int) {})
      : events_(std::move(events)), hear_(std::move(hear)), placed_(std::move(placed)) {}
  void emit(std::string_view event, const Json& fields) override {
    check_declared(events_, event, fields);
    hear_({0, std::string(event), fields});
  }
  void joined(std::string_view, const job::OptionMap&) override {}
  void placed(int rank) override { placed_(rank); }

 private:
  const std::vector<job::Event> events_;
  const std::function<void(Line)> hear_;
  const std::function<void(int)> placed_;
};

inline const auto& job_of(const scenario::HybridOptions&) { return cmd::hybrid_job(); }
inline const auto& job_of(const scenario::PsOptions&) { return cmd::ps_job(); }
inline const auto& job_of(const scenario::RnnOptions&) { return cmd::rnn_job(); }
inline const auto& job_of(const scenario::PipelineOptions&) { return cmd::pipeline_job(); }
inline const auto& job_of(const scenario::RlOptions&) { return cmd::rl_job(); }

/// Returns the events that the job may print.
template <class Options>
std::vector<job::Event> events_of() {
  return app::events_of(app::JobCommand(job_of(Options())));
}

/// Waits at most 30 s until `count` connections are in the queue of a listening socket.
inline void await_connections(int listening, unsigned count) {
  const base::TimePoint deadline = base::deadline_after(std::chrono::seconds(30));
  for (;;) {
    tcp_info info{};
    socklen_t size = sizeof info;
    // For a listening socket, Linux reports the length of its queue in `tcpi_unacked`.
    if (getsockopt(listening, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
    if (info.tcpi_unacked >= count) return;
    if (base::Clock::now() >= deadline) {
      WARN("only " << info.tcpi_unacked << " of " << count << " ranks have connected");
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// Runs a job until it ends or fails. Starts rank 0 after all other ranks have connected, because
/// they would retry until the join timeout if rank 0 failed first. A `--local` run is rank 0.
template <class Options>
Finished try_job(Place place, const Options& options, const Hooks<Options>& hooks = {}) {
  Finished finished;
  std::mutex mutex;
  const std::vector<job::Event> events = events_of<Options>();
  at::set_num_threads(1);
  net::Fd socket = std::move(net::listen_tcp("localhost", 0).value());
  const uint16_t port = net::local_name(socket.get()).port;
  const auto run = [&](Job job) {
    if (hooks.job) hooks.job(job);
    Options own = options;
    if constexpr (requires { own.epochs, own.steps; }) {
      if (own.steps > 0) own.epochs = 0;  // as with --steps alone on a command line
    }
    if (hooks.options) hooks.options(job.rank, own);
    Listener sink(events, [&](Line line) {
      line.rank = job.rank;
      if (hooks.heard_at_once) hooks.heard_at_once(job, line);
      std::lock_guard lock(mutex);
      if (hooks.heard) hooks.heard(job, line);
      finished.lines.push_back(std::move(line));
    });
    try {
      Outcome outcome = place == Place::kLocal ? job_of(own).run_local(own, job, sink)
                                               : job_of(own).run(own, job, sink);
      check_outcome(events, outcome.fields);
      std::lock_guard lock(mutex);
      finished.outcomes[job.rank] = std::move(outcome);
    } catch (...) {
      std::lock_guard lock(mutex);
      finished.errors[job.rank] = base::current_error(base::ErrorKind::kInternal);
    }
  };
  std::vector<std::thread> ranks;
  const int size = place == Place::kLocal ? 1 : job_of(options).roles(options).world_size();
  for (int rank = size - 1; rank >= 0; --rank) {
    Job job;
    job.rank = rank;
    job.master_port = port;
    job.started = std::chrono::steady_clock::now();
    job.peer_timeout_s = 0;
    job.join_timeout_s = 60;  // below the time limit of any test
    if (rank == 0 && place == Place::kRanks) {
      await_connections(socket.get(), static_cast<unsigned>(size) - 1);
      job.listen_fd = socket.release();
    }
    ranks.emplace_back([&run, job] {
      at::set_num_threads(1);
      run(job);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return finished;
}

/// Runs a job with try_job() and checks that all ranks succeed.
template <class Options>
Finished run_job(Place place, const Options& options, const Hooks<Options>& hooks = {}) {
  Finished finished = try_job(place, options, hooks);
  for (const auto& [rank, error] : finished.errors) {
    FAIL("rank " << rank << ": " << base::kind_name(error.kind) << ": " << error.message);
  }
  if (place == Place::kLocal) return finished;
  for (const auto& [rank, outcome] : finished.outcomes) {
    CAPTURE(rank);
    CHECK(outcome.fields["live_rrefs"] == 0);
    CHECK(outcome.fields["live_contexts"] == 0);
  }
  return finished;
}

/// Checks the `eval` lines of a job of two epochs: validation data after each epoch, test data
/// last. The field `counted` must be the size of the data, `valid` or `test`.
inline void check_evaluated(const Finished& job, const char* counted, int64_t valid, int64_t test) {
  const std::vector<Json> lines = job.all("eval");
  REQUIRE(lines.size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    CAPTURE(i, lines[i].dump());
    CHECK(lines[i]["set"] == (i == 2 ? "test" : "valid"));
    CHECK(lines[i][counted] == (i == 2 ? test : valid));
    CHECK(lines[i]["epoch"] == (i == 0 ? 1 : 2));
  }
  CHECK(job.fields(0)["eval"] == lines[2]);
}

/// Checks that all ranks fail with an error of `kind`; returns the error of the lowest rank.
template <class Options>
base::Error error_of_job(base::ErrorKind kind, Place place, const Options& options,
                         const Hooks<Options>& hooks = {}) {
  const Finished finished = try_job(place, options, hooks);
  REQUIRE(finished.outcomes.empty());
  for (const auto& [rank, error] : finished.errors) {
    CAPTURE(rank, error.message);
    CHECK(base::kind_name(error.kind) == base::kind_name(kind));
  }
  return finished.errors.begin()->second;
}

/// Returns the error of a job in which the data of trainer 2 differ from those of other trainers.
/// Repeats the job with longer delays of trainer 2 until trainer 2 is the last to report its data.
template <class Options>
std::string refusal_of_other_data(const Options& options,
                                  std::function<void(Options&)> read_other) {
  std::string message;
  for (const double delay_s : {0.3, 3.0, 15.0}) {
    Hooks<Options> hooks = slow_rank<Options>(2, delay_s);
    hooks.options = [&](int rank, Options& own) {
      if (rank == 2) read_other(own);
    };
    message = error_of_job(base::ErrorKind::kBadData, Place::kRanks, options, hooks).message;
    if (!contains(message, "trainer 1 ")) break;
  }
  return message;
}

inline Snapshot newest_checkpoint(const std::string& folder) {
  Listener nobody;
  auto snapshot = job::Checkpoints({folder, 0, "auto"}, Job{}, nobody).load();
  REQUIRE(snapshot);
  return Snapshot(*std::move(snapshot));
}

/// Replaces the newest checkpoint by `snapshot`, which must be of the same step.
inline void replace_checkpoint(const std::string& folder, const Snapshot& snapshot) {
  Listener nobody;
  job::Checkpoints checkpoints({folder, 0, "auto"}, Job{}, nobody);
  job::Content content{snapshot.step, snapshot.state};
  for (const auto& [name, tensors] : snapshot.files) {
    for (const auto& [tensor, value] : tensors) {
      content.files[name].push_back(job::HeldTensor::of(tensor, value));
    }
  }
  checkpoints.save(std::move(content), {}, base::Clock::now());
  checkpoints.finish();
}

inline void check_close(const NamedTensors& a, const NamedTensors& b, double tolerance) {
  REQUIRE(a.size() == b.size());
  for (const auto& [name, tensor] : a) {
    CAPTURE(name);
    REQUIRE(b.contains(name));
    REQUIRE(tensor.sizes() == b.at(name).sizes());
    if (tensor.numel() == 0) continue;
    CHECK((tensor - b.at(name)).abs().max().template item<double>() <= tolerance);
  }
}

/// Checks that two snapshots are equal bit by bit.
inline void check_same(const Snapshot& a, const Snapshot& b) {
  CHECK(a.step == b.step);
  CHECK(a.state == b.state);
  REQUIRE(a.files.size() == b.files.size());
  for (const auto& [file, tensors] : a.files) {
    CAPTURE(file);
    REQUIRE(b.files.contains(file));
    REQUIRE(b.files.at(file).size() == tensors.size());
    for (const auto& [name, tensor] : tensors) {
      CAPTURE(name);
      REQUIRE(b.files.at(file).contains(name));
      CHECK(at::equal(tensor, b.files.at(file).at(name)));
    }
  }
}

constexpr int64_t kSaveAtEndOnly = 1'000'000;

/// Returns the checkpoint that a job saves at its end.
template <class Options>
Snapshot checkpoint_of(Place place, Options options, const Hooks<Options>& hooks = {}) {
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  run_job(place, options, hooks);
  return newest_checkpoint(folder.path());
}

/// Checks that a job of `whole` steps saves the same state whether it runs at once or ends after
/// `half` steps and is resumed.
template <class Options>
void check_resume_is_exact(Place place, Options options, int64_t half, int64_t whole) {
  options.steps = whole;
  const Snapshot expected = checkpoint_of(place, options);
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, "auto"};
  options.steps = half;
  run_job(place, options);
  REQUIRE(newest_checkpoint(folder.path()).step == half);
  options.steps = whole;
  const Finished rest = run_job(place, options);
  REQUIRE(rest.all("checkpoint").size() == 2);  // one is loaded, one is saved
  check_same(newest_checkpoint(folder.path()), expected);
}

/// Checks that a slow save contains the state of the step at which the save began, although the job
/// continues to train. Compares each save with the final state of a job that ends at that step.
template <class Options>
void check_saved_as_it_was(Place place, Options options, int64_t every,
                           int64_t Options::*steps = &Options::steps) {
  CAPTURE(place);
  const Folder folder;
  options.checkpoint = {folder.path(), every, "", 10};
  options.log_interval = 1;
  options.*steps = 3 * every;
  Hooks<Options> hooks;
  hooks.job = [](Job& job) { job.inject.before_save = slow_by(0.15); };
  const Finished job = run_job(place, options, hooks);
  const std::vector<Json> lines = job.all("checkpoint");
  REQUIRE(lines.size() == 3);
  for (const int64_t at : {every, 2 * every}) {
    options.*steps = at;
    Snapshot saved(job::read_checkpoint(lines[static_cast<size_t>(at / every - 1)]["path"]));
    const Snapshot expected = checkpoint_of(place, options);
    saved.state["options"] = expected.state["options"];
    CAPTURE(at);
    check_same(saved, expected);
  }
}

/// The stop signals of a job's ranks, for a test that requests stops at run time.
class StopSignals {
 public:
  /// Stores the stop signal of a rank. Call before the rank starts.
  void keep(const Job& job) {
    std::lock_guard lock(mutex_);
    signals_[job.rank] = job.stop;
  }
  /// Returns the signal of a rank that has started.
  job::StopSignal& of(int rank) const {
    std::lock_guard lock(mutex_);
    return *signals_.at(rank);
  }
  std::vector<int> ranks() const {
    std::lock_guard lock(mutex_);
    std::vector<int> found;
    for (const auto& [rank, signal] : signals_) found.push_back(rank);
    return found;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, std::shared_ptr<job::StopSignal>> signals_;  // guarded by mutex_
};

/// Checks that a signal stopped all ranks, and that rank 0 reports a checkpoint in `folder`.
inline void check_stopped(const Finished& job, const std::string& folder) {
  for (const auto& [rank, outcome] : job.outcomes) {
    CAPTURE(rank);
    CHECK(outcome.stopped);
    CHECK_FALSE(outcome.goal_missed);
  }
  CHECK(contains(job.outcomes.at(0).message, "checkpoint saved in " + folder));
}

/// Requests a stop of `rank` at step `at` or, if `at` is 0, before the job begins. Checks that the
/// job stops, and that resuming it gives the final state of a job that was not stopped. Delays each
/// call by `call_delay_s`, so that the job does not end before the stop.
template <class Options>
void check_stop_and_go_on(Place place, Options options, int rank, int64_t at,
                          double call_delay_s = 0) {
  options.log_interval = 1;
  const Snapshot expected = checkpoint_of(place, options);
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, "auto"};
  StopSignals signals;
  Hooks<Options> hooks;
  hooks.job = [&](Job& job) {
    signals.keep(job);
    job.inject.call_delay_s = call_delay_s;
    if (at > 0 || job.rank != rank) return;
    job.stop->arm();
    job.stop->request();
  };
  hooks.heard = [&](const Job&, const Line& line) {
    if (line.event == "step" && line.fields["step"] == at) signals.of(rank).request();
  };
  check_stopped(run_job(place, options, hooks), folder.path());
  const int64_t stopped_at = newest_checkpoint(folder.path()).step;
  CHECK(stopped_at >= at);
  REQUIRE(stopped_at < expected.step);

  const Finished rest = run_job(place, options);
  for (const auto& [who, outcome] : rest.outcomes) CHECK_FALSE(outcome.stopped);
  check_same(newest_checkpoint(folder.path()), expected);
}

/// Returns the error with which a job refuses to resume from the newest checkpoint of `folder`.
template <class Options>
std::string refusal_of(Place place, Options options, const std::string& folder) {
  options.checkpoint = {folder, kSaveAtEndOnly, "auto"};
  return error_of_job(base::ErrorKind::kBadData, place, options).message;
}

/// Checks that a job refuses to resume, and that its error names the checkpoint and the reason.
template <class Options>
void check_resume_refused(Place place, const Options& options, const std::string& folder,
                          const std::string& why) {
  const std::string message = refusal_of(place, options, folder);
  CAPTURE(why, message);
  CHECK(contains(message, why));
  CHECK(contains(message, folder + "/step-"));
}

/// A change that makes a checkpoint invalid, and the expected reason.
struct Spoilt {
  std::function<void(Snapshot&)> change;
  std::string why;
};

/// Checks for each of `cases` that a job refuses to resume from the newest checkpoint so changed.
template <class Options>
void check_spoilt_refused(Place place, const Options& options, const std::string& folder,
                          const std::vector<Spoilt>& cases) {
  const Snapshot good = newest_checkpoint(folder);
  for (const Spoilt& spoilt : cases) {
    Snapshot bad = good;
    spoilt.change(bad);
    replace_checkpoint(folder, bad);
    check_resume_refused(place, options, folder, spoilt.why);
  }
}

}  // namespace distrain::testing
