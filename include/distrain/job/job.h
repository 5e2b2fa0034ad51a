#pragma once

#include <atomic>
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
#include "distrain/job/stop_signal.h"
#include "distrain/net/port_range.h"

namespace distrain::job {

using Json = nlohmann::ordered_json;

/// Options by their long name without dashes ("lr" → "0.05"), as they travel between ranks.
using OptionMap = std::map<std::string, std::string>;

/// The name under which the run's id travels with rank 0's options.
inline constexpr const char* kRunId = "run id";

/// Where a scenario's JSON lines go. `emit` adds the common fields (v, ts, run, event, cmd, rank,
/// role). Thread-safe. Each line is one write.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void emit(std::string_view event, const Json& fields) = 0;
  /// Called before joined() if the rank was any: with this process's rank, or any once more.
  virtual void placed(int rank) { static_cast<void>(rank); }
  /// All ranks are there: what rank 0 has told of the job, and the role that follows from it.
  virtual void joined(std::string_view role, const OptionMap& of_rank_0) = 0;
  /// This rank is about to end by `error` of another one, as soon as what it is at is over: a
  /// process that is to leave in time does not wait for that. Any thread.
  virtual void failing(const base::Error& error) { static_cast<void>(error); }

  /// Called about twice a second by each trainer, for displays: `step` of `steps` that the trainer
  /// makes (0 if unknown) of `trainers`, `epoch` of `epochs`, `loss`, `lr` and the fields of
  /// Result::progress; or a `note`, one line of text. Never waits for a reader.
  virtual void progress(const Json& fields) { static_cast<void>(fields); }

  /// From now on this rank's end does not end the job: its launcher is not to end the others.
  virtual void may_be_lost() {}

  /// Records values of options that follow from the job's data, by their names in `config`.
  virtual void used(const Json& config) { static_cast<void>(config); }

  /// Called by the thread that saves, again and again: a save is under way and has got further.
  virtual void saving() {}

  /// Trouble; the job goes on.
  void warn(base::ErrorKind kind, const std::string& message) {
    emit("warn", {{"kind", base::kind_name(kind)}, {"message", message}});
  }
};

/// Progress of a rank: steps, training time and further fields. The rank's last line shows it if a
/// signal or an error ends the rank. Thread-safe.
class Progress {
 public:
  /// Adds steps that were made; the first one began at `begun`.
  void add(int64_t steps, base::TimePoint begun) {
    steps_ += steps;
    train_s_ = base::seconds_since(begun);
  }
  /// Has fields() call `more` from now on. With an empty `more` fields() stays as it is now.
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
  mutable std::mutex mutex_;  // of what follows
  std::function<void(Json&)> more_;
  Json last_ = Json::object();
};

/// Faults of one rank, to try out what they do (`--inject`).
struct Injection {
  double call_delay_s = 0;      ///< before each call that this rank makes is sent
  double stage_sleep_s = 0;     ///< a pipeline's stage sleeps so long in place of a batch's pass
  int64_t fail_checkpoint = 0;  ///< the process dies at this system call of its first save; 0: none
  /// By the thread that writes a checkpoint, again while it gives true: a slow disk.
  std::function<bool()> before_save;
};

/// Which rank a process is, and how it reaches the others.
struct Contact {
  int rank = 0;  ///< rpc::kAnyRank: whichever nobody else is, as rank 0 says
  std::string master_addr = "localhost";
  uint16_t master_port = 29500;
  int listen_fd = -1;            ///< rank 0 of a spawned job: the launcher's listening socket
  std::string rank_0_unix_name;  ///< not empty: of that socket, and nobody listens on TCP
  std::string token;             ///< as in rpc::AgentOptions, like the next three
  std::string job_id;
  std::optional<uint32_t> generation;
  bool rejoins = false;
  base::TimePoint started;  ///< of the launcher, for startup_s
};

/// A job as one of its ranks knows it.
struct Job : Contact {
  std::string name;                ///< ranks of another one are refused
  int world_size = 0;              ///< 0: follow rank 0
  std::string listen_addr;         ///< empty: the interface that reaches the master
  std::string meeting_name;        ///< as in rpc::AgentOptions
  net::PortRange ports;            ///< to listen on
  bool insecure = false;           ///< as in rpc::AgentOptions
  bool spawned = false;            ///< by our launcher; otherwise this rank joined
  std::string transport = "auto";  ///< auto, tcp or unix
  double rpc_timeout_s = 60;
  double collective_timeout_s = 0;  ///< 0: an operation waits for its ranks while they live
  double join_timeout_s = 300;
  double peer_timeout_s = 5;
  Injection inject;
  /// Where this rank computes; all but the first are for ps's server alone.
  std::vector<c10::Device> devices = {c10::kCPU};
  /// Decides it once this rank's name and rank 0's options are known; null: `devices` hold.
  std::function<std::vector<c10::Device>(const std::string& name, const OptionMap& of_rank_0)>
      choose_devices;
  /// Adds what this process has used so far to its figures, memory and devices say; may be null.
  std::function<void(Json& fields)> add_usage;
  /// Sets an operation's threads once the ranks that share this one's CPUs are known; may be null.
  std::function<void(int ranks)> share_cpus;
  /// SIGINT, SIGTERM and SIGHUP, for jobs that save before they end. Never null.
  std::shared_ptr<StopSignal> stop = std::make_shared<StopSignal>();
  /// For the last line of a process that ends before the job does. Never null.
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
  OptionMap given;      ///< job options that the user gave to this rank
  OptionMap effective;  ///< all job options, defaults filled in, and kRunId; rank 0's hold

  c10::Device device() const { return devices.front(); }
};

/// What `end` and `rank_end` say beyond the common fields: counters and the job's metrics.
struct Outcome {
  Json fields = Json::object();
  /// On rank 0: such fields of each other rank that was there at the end.
  std::map<int, Json> others = {};
  /// The job saved what it had at a signal to stop, and ended in good order. `message` says where.
  bool stopped = false;
  /// The job ended in good order, but without what it was for. `message` says what is missing.
  bool goal_missed = false;
  std::string message;
  /// What failed once the work was done: the trace could not be written, say. The results hold.
  std::optional<base::Error> afterwards;
};

/// Of what runs in one process, without RPC.
Outcome outcome_without_ranks(Json fields);
/// A job in one process, `--local`: chooses its devices, runs it on them, and does what `--trace`
/// asks for. Throws what `run` throws.
Outcome run_local_job(const Job& job, EventSink& sink,
                      const std::function<Outcome(const Job& placed)>& run);

/// As JSON lines have them: "cuda:0", or a list of several.
Json device_names(const std::vector<c10::Device>& devices);

}  // namespace distrain::job
