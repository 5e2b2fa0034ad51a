#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "distrain/base/executor.h"
#include "distrain/base/future.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/schedule.h"
#include "distrain/job/train_log.h"
#include "distrain/job/training.h"
#include "distrain/optim/schedule.h"
#include "distrain/rpc/agent.h"

namespace distrain::job {

/// What a part is called, and where it is kept. Without a name it has all of its file.
struct PartName {
  std::string name;
  std::string file;
  bool each_own = false;
  static constexpr auto kFields = std::tuple(&PartName::name, &PartName::file, &PartName::each_own);

  /// Whether a tensor is of this part; of trainer `trainer`'s.
  bool has(const std::string& tensor, int trainer) const;
  /// As the checkpoint calls a tensor of that trainer's.
  std::string stored(const std::string& tensor, int trainer) const;
  bool operator==(const PartName&) const = default;
};

/// What a trainer says before it trains. All but `trainer` is the same for all.
struct Attachment {
  int trainer = 0;
  int trainers = 1;
  int64_t epochs = 1;
  int64_t steps = 0;
  int64_t steps_per_epoch = 1;
  bool take_over = false;
  bool eval_only = false;
  double lr = 0;
  std::string lr_schedule;
  bool words = false;                         ///< that are evaluated, in place of samples
  std::map<std::string, std::string> agreed;  ///< with the checkpoint, too
  std::map<std::string, std::string> alike;
  std::vector<PartName> parts;
  std::string what_must_agree;
  static constexpr auto kFields = std::tuple(
      &Attachment::trainer, &Attachment::trainers, &Attachment::epochs, &Attachment::steps,
      &Attachment::steps_per_epoch, &Attachment::take_over, &Attachment::eval_only, &Attachment::lr,
      &Attachment::lr_schedule, &Attachment::words, &Attachment::agreed, &Attachment::alike,
      &Attachment::parts, &Attachment::what_must_agree);
};

/// What it hears.
struct Attached {
  std::string path;        ///< of the checkpoint that the job goes on from; empty: afresh
  int64_t steps_made = 0;  ///< by each trainer
  bool saves = false;      ///< the job
  static constexpr auto kFields =
      std::tuple(&Attached::path, &Attached::steps_made, &Attached::saves);
};

/// What a trainer is to do next, and how far the learning rate's schedule has come.
struct Lease {
  Task task;
  optim::ScheduleState schedule;
  static constexpr auto kFields = std::tuple(&Lease::task, &Lease::schedule);
};

/// How a trainer's epoch went, and its share of an evaluation.
struct Report {
  double loss = 0;  ///< mean of its steps
  int64_t steps = 0;
  Evaluation valid, test;  ///< of an epoch; of the job's end
  std::map<std::string, int64_t> maxima;
  static constexpr auto kFields =
      std::tuple(&Report::loss, &Report::steps, &Report::valid, &Report::test, &Report::maxima);
};

// What the trainers call on rank 0.
namespace on_host {
Attached attach(rpc::CallContext& call, const Attachment& attachment);
data::NamedTensors saved_part(rpc::CallContext& call, const PartName& part, int trainer);
base::Future<Lease> next(rpc::CallContext& call, bool stop, bool last, int64_t wanted);
void report(rpc::CallContext& call, const Report& report);
void contribute(rpc::CallContext& call, const std::map<std::string, data::NamedTensors>& files);
}  // namespace on_host

/// What a job's training has one of, on rank 0: schedule, learning rate, evaluation, checkpoints,
/// the end. Thread-safe.
class TrainingHost {
 public:
  struct Setting {
    std::string cmd;
    CheckpointOptions checkpoint;
    OptionMap options;                    ///< as a checkpoint remembers them
    std::vector<std::string> must_agree;  ///< those of them that have to be the same
    std::function<void()> heed;           ///< on all ranks: a signal is seen to from now on
    /// On all ranks: a signal ends the process again, unless the job is stopped. Whether it is,
    /// then.
    std::function<bool(bool stopped)> end;
  };

  /// Tries whether the folder of checkpoints can be written, and is this job's.
  TrainingHost(Setting setting, const Job& job, EventSink& sink);

  /// What trainers call on rank 0. Before join().
  static void expose(rpc::Agent& agent);

  /// The first one makes the schedule, and reads the checkpoint if there is one to go on from.
  Attached attach(const Attachment& attachment, int rank);
  /// Of the checkpoint that the job goes on from.
  data::NamedTensors saved_part(const PartName& part, int trainer);
  base::Future<Lease> next(int rank, bool stop, bool last, int64_t wanted,
                           base::Executor& executor);
  void report(const Report& report);
  /// On a task to save: a trainer's tensors, by file, as they are stored.
  void contribute(const std::map<std::string, data::NamedTensors>& files);

  /// A rank is lost: nobody is to wait for it.
  void fail(const base::Error& error);

  /// All are to save as soon as they can, and to go on. Takes no lock, so that a line that cannot
  /// be written, which asks for a stop, may come from under it.
  void request_save();
  void add_to(Outcome& outcome) const;

 private:
  void load();
  void read_position(const Snapshot& snapshot);
  void check_all_taken() const;
  void on_evaluated(const Position& position, bool whole_epoch);
  void tell_evaluation(const char* set, const Evaluation& evaluation, const Position& position);
  void save(const Position& position);

  const Setting setting_;
  EventSink& sink_;
  const std::shared_ptr<StopSignal> stop_;
  Checkpoints checkpoints_;

  mutable std::mutex mutex_;  // of what follows, but the schedule, which locks itself
  std::optional<Attachment> terms_;
  std::map<int, int> trainers_;  // by rank
  bool told_of_schedule_ = false;
  std::optional<Schedule> schedule_;
  std::atomic<Schedule*> current_{nullptr};  // once it is ready
  std::optional<base::Error> failed_;
  optim::Schedule lr_schedule_;
  std::optional<Snapshot> resumed_;  // until all have taken their parts of it
  int64_t steps_made_ = 0;
  Report total_;  // of the reports since the last evaluation
  std::map<std::string, int64_t> maxima_;
  Snapshot gathered_;
  Json metrics_ = Json::object();
};

}  // namespace distrain::job
