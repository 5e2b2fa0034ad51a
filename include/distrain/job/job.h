#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <nlohmann/json.hpp>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/membership/options.h"
#include "distrain/rpc/channel.h"

namespace distrain::job {

/// Termination signals within this time count as one signal, because a process may get a signal
/// twice: timeout(1), Slurm and systemd signal a process and its group, a closed terminal and its
/// shell both signal, and the launcher forwards signals to its ranks.
inline constexpr auto kSameSignal = std::chrono::seconds(2);

/// Connects signals to a job: SIGINT, SIGTERM and SIGHUP make it save and end, SIGUSR1 makes it
/// save and continue, and SIGQUIT makes it report what blocks it. Thread-safe except for heeds().
class StopSignal {
 public:
  /// Notes that the job from now on checks requested() at every step and ends by itself. Before
  /// arm(), a signal ends the process at once. Has no effect after disarm().
  void arm() {
    State expected = State::kUnarmed;
    state_.compare_exchange_strong(expected, State::kArmed);
  }
  /// Notes that everything is saved, so that later signals end the process at once. If a signal has
  /// stopped the job (`stopped`), this rank ignores that signal if it arrives late. Returns
  /// requested().
  bool disarm(bool stopped) {
    State state = state_;
    while (!state_.compare_exchange_weak(
        state, stopped || state == State::kStopping ? State::kStopping : State::kOver)) {
    }
    return requested();
  }

  /// Requests a stop because this rank or another rank has received a signal. Returns false if the
  /// job is not armed or is stopping already.
  bool request() {
    State expected = State::kArmed;
    if (!state_.compare_exchange_strong(expected, State::kStopping)) return false;
    std::lock_guard lock(mutex_);
    if (on_request_) on_request_();
    return true;
  }
  /// Makes the first successful request() call `tell`, which must not block. Calls `tell` now if a
  /// stop is already requested. After on_request({}) returns, the former function is not called.
  void on_request(std::function<void()> tell) {
    std::lock_guard lock(mutex_);
    on_request_ = std::move(tell);
    if (on_request_ && state_ == State::kStopping) on_request_();
  }
  /// Requests a save without a stop (SIGUSR1). Does nothing unless armed().
  void request_save() {
    std::lock_guard lock(mutex_);
    if (armed() && on_save_) on_save_();
  }
  /// Makes request_save() call `tell`, which must not block. on_save({}) removes the function.
  void on_save(std::function<void()> tell) {
    std::lock_guard lock(mutex_);
    on_save_ = std::move(tell);
  }
  /// Returns the operations that block this rank, for SIGQUIT. Empty if on_question() set nothing.
  std::vector<rpc::Wait> waits() {
    std::lock_guard lock(question_mutex_);
    return on_question_ ? on_question_() : std::vector<rpc::Wait>();
  }
  /// Makes waits() call `waits`. After on_question() returns, the former function is not called.
  void on_question(std::function<std::vector<rpc::Wait>()> waits) {
    std::lock_guard lock(question_mutex_);
    on_question_ = std::move(waits);
  }
  bool requested() const { return state_ == State::kStopping; }
  bool armed() const { return state_ == State::kArmed; }
  /// Returns the signal that this process has received; 0 if only another rank has received one.
  int number() const { return number_; }
  /// Handles the signal `number`. Returns false if the caller is to end the process at once.
  bool heeds(int number, base::TimePoint now) {
    const bool is_first = heeded_ == base::TimePoint{};
    if (is_first) number_ = number;  // set first: the job may end during request()
    if (request() || (is_first && requested())) {
      heeded_ = now;
      return true;
    }
    return requested() && now - heeded_ < kSameSignal;
  }

 private:
  enum class State : uint8_t { kUnarmed, kArmed, kStopping, kOver };

  std::atomic<State> state_{State::kUnarmed};
  std::atomic<int> number_{0};
  std::mutex mutex_;
  std::function<void()> on_request_, on_save_;           // guarded by mutex_
  std::mutex question_mutex_;                            // separate: on_question_() may be slow
  std::function<std::vector<rpc::Wait>()> on_question_;  // guarded by question_mutex_
  base::TimePoint heeded_{};  // time of the first signal; used by the thread of heeds()
};

using Json = nlohmann::ordered_json;

/// Options by their long name without dashes ("lr" → "0.05"), as sent between ranks.
using OptionMap = std::map<std::string, std::string>;

/// The key under which rank 0's options have the random id of this run of the job.
inline constexpr const char* kRunId = "run id";

/// Receives the events of a job. Thread-safe.
class EventSink {
 public:
  virtual ~EventSink() = default;
  /// Writes a JSON line with `fields` and the common fields (v, ts, run, event, cmd, rank, role).
  virtual void emit(std::string_view event, const Json& fields) = 0;
  /// Called before joined() with this process's rank if rank 0 assigns it. If another process takes
  /// that rank, called with membership::kUnassignedRank and then with the next assigned rank.
  virtual void placed(int rank) { static_cast<void>(rank); }
  /// Called when all ranks have joined, with this rank's name and rank 0's options.
  virtual void joined(std::string_view role, const OptionMap& of_rank_0) = 0;
  /// Called on any thread when another rank's `error` must end this rank. A running computation may
  /// delay the end, so an implementation may exit the process without waiting for the computation.
  virtual void failing(const base::Error& error) { static_cast<void>(error); }
  /// Called about twice a second by each trainer, for displays. `fields` has `step`, `steps` (the
  /// total; 0 if unknown), `processes`, `trainers`, `epoch`, `epochs`, `loss`, `lr` and the fields
  /// of Result::progress, or only `note`, a line of text. Must not block.
  virtual void progress(const Json& fields) { static_cast<void>(fields); }
  /// Called when the job can continue without this rank. Its launcher then must not end the others.
  virtual void may_be_lost() {}
  /// Receives options that the data determines, such as `classes`. An implementation prints them in
  /// the field `config` of the job's last line.
  virtual void used(const Json& config) { static_cast<void>(config); }
  /// Called repeatedly by the saving thread while a save makes progress.
  virtual void saving() {}

  void warn(base::ErrorKind kind, const std::string& message) {
    emit("warn", {{"kind", base::kind_name(kind)}, {"message", message}});
  }
};

/// A rank's progress, for its last JSON line if a signal or an error ends the rank. Thread-safe.
class Progress {
 public:
  /// Adds completed steps. The rank's first step began at `begun`.
  void add(int64_t steps, base::TimePoint begun) {
    steps_ += steps;
    train_s_ = base::seconds_since(begun);
  }
  /// Makes fields() call `more`, which adds fields. If `more` is empty, freezes fields()'s result.
  void report(std::function<void(Json& fields)> more) {
    Json now = more ? Json::object() : fields();
    std::lock_guard lock(mutex_);
    last_ = std::move(now);
    more_ = std::move(more);
  }
  Json fields() const {
    std::lock_guard lock(mutex_);
    Json fields = last_;
    if (!more_) return fields;
    if (steps_ > 0) fields.update({{"steps", steps_.load()}, {"train_s", train_s_.load()}});
    more_(fields);
    return fields;
  }

 private:
  std::atomic<int64_t> steps_{0};
  std::atomic<double> train_s_{0};
  mutable std::mutex mutex_;  // guards `more_` and `last_`
  std::function<void(Json&)> more_;
  Json last_ = Json::object();
};

/// Faults injected into one rank for tests (`--inject`).
struct Injection {
  double call_delay_s = 0;      ///< delay before each call that this rank sends
  double stage_sleep_s = 0;     ///< time that a pipeline stage sleeps instead of computing
  int64_t fail_checkpoint = 0;  ///< number of the first save's system call to die at; 0: none
  /// The saving thread calls this function until it returns false. Simulates a slow disk.
  std::function<bool()> before_save;
};

/// The settings of a job on one of its ranks.
struct Job : membership::Contact {
  std::string name;         ///< ranks of a job with another name are refused
  bool spawned = false;     ///< started by a launcher; otherwise started by the user
  base::TimePoint started;  ///< start of the process or its launcher, for startup_s
  double rpc_timeout_s = 60;
  double collective_timeout_s = 0;  ///< 0: operations have no timeout
  double join_timeout_s = 300;
  double peer_timeout_s = 5;
  bool takes_turns = false;  ///< one rank computes at a time, and the others wait for it
  Injection inject;
  /// The devices on which this rank computes. Only the server of the job `ps` uses more than one.
  std::vector<c10::Device> devices = {c10::kCPU};
  /// If not null, called to set `devices` once this rank's name and rank 0's options are known.
  std::function<std::vector<c10::Device>(const std::string& name, const OptionMap& of_rank_0)>
      choose_devices;
  /// Adds this process's resource usage, such as memory, to `fields`; may be null.
  std::function<void(Json& fields)> add_usage;
  /// Sets the threads per operation when `ranks` ranks share this rank's CPUs; may be null.
  std::function<void(int ranks)> share_cpus;
  /// Receives this process's signals, for jobs that save before they end. Never null.
  std::shared_ptr<StopSignal> stop = std::make_shared<StopSignal>();
  /// Has the fields of the last JSON line in case this process ends before the job. Never null.
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
  OptionMap given;      ///< job options that the user gave to this rank
  OptionMap effective;  ///< all job options and kRunId; rank 0 sends these to the other ranks

  Job() { master_port = 29500; }
  c10::Device device() const { return devices.front(); }
};

/// The result of a rank, for its `end` or `rank_end` line.
struct Outcome {
  Json fields = Json::object();     ///< counters and the job's metrics
  std::map<int, Json> others = {};  ///< on rank 0: `fields` of each other rank
  bool stopped = false;      ///< the job saved and ended on a signal; `message` says where it saved
  bool goal_missed = false;  ///< the job ended normally but missed its goal, as `message` says
  std::string message;
  /// An error after the job's work was complete, for instance when the trace cannot be written.
  std::optional<base::Error> afterwards;
};

/// Runs a job in one process (`--local`): chooses the devices, passes them to `run` in a copy of
/// `job`, and writes the trace if `--trace` is given. Rethrows exceptions of `run`.
Outcome run_local_job(const Job& job, EventSink& sink,
                      const std::function<Outcome(const Job& placed)>& run);

/// Checks that `path` (`--trace`) can be written or replaced. Creates and removes a file beside it.
/// Throws `invalid` if `path` is not a regular file, otherwise `resources` with the reason.
void check_trace_path(const std::string& path);

/// Returns the value of the field `device` of JSON lines: "cuda:0", or a list of several devices.
Json device_names(const std::vector<c10::Device>& devices);

}  // namespace distrain::job
