#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/base/future.h"
#include "distrain/job/job.h"
#include "distrain/rpc/channel.h"

namespace distrain::job {

/// What a trainer is to do next.
struct Task {
  enum class Kind : uint8_t {
    kTrain,
    kEvaluate,  ///< its share of the test data, and say how the epoch went
    kSave,      ///< hand over what a checkpoint needs of this trainer
    kEnd,
  };
  Kind kind = Kind::kTrain;
  int64_t epoch = 0;     ///< from 1
  int32_t shard = 0;     ///< whose part of the data
  int64_t step = 0;      ///< kTrain: the first, of that shard in the epoch, from 0
  int64_t count = 1;     ///< kTrain: how many, one after the other
  bool last = false;     ///< kEvaluate: the job is over then
  bool stopped = false;  ///< kEnd: before its time, by a signal
  static constexpr auto kFields = std::tuple(&Task::kind, &Task::epoch, &Task::shard, &Task::step,
                                             &Task::count, &Task::last, &Task::stopped);
};

/// How far a job has come; what a checkpoint keeps of it.
struct Position {
  int64_t epoch = 1;
  std::vector<int64_t> steps;  ///< of this epoch, by shard
  int64_t total = 0;           ///< steps of all trainers since the job's beginning

  Json to_json() const;
  /// Throws `bad_data`.
  static Position from_json(const Json& json, int trainers);
};

/// Hands out the work of a job to its trainers, wherever they run: training steps, and between
/// them, when all have finished what they had, evaluation, checkpoints and the end.
///
///   beginning → training → (epoch over, or the job) evaluating → (checkpoint due) saving →
///   training or ending
///
/// Nobody begins before all trainers are there: where the fast need not wait for the slow, one that
/// starts late would get no steps, and a stop would find it unready.
///
/// Thread-safe. The hooks, any of which may be empty, run on the thread of whoever comes last,
/// while all trainers wait.
class Schedule {
 public:
  struct Terms {
    int trainers = 1;
    int64_t epochs = 1;
    int64_t steps = 0;  ///< of each trainer; 0: as many as the epochs have
    int64_t steps_per_epoch = 1;
    /// A trainer that is through with its own shard takes over steps of the shard that has most
    /// left, so that a slow one does not hold up the epoch. Otherwise all make as many steps.
    bool take_over = false;
    bool save = false;
    int64_t save_every = 0;  ///< steps of each trainer; 0: at the end of each epoch
  };
  struct Hooks {
    std::function<void()> on_begin;  ///< all trainers are there
    /// `whole_epoch`: not only the end of the job, in the middle of one.
    std::function<void(const Position&, bool whole_epoch)> on_evaluated;
    std::function<void(const Position&)> on_save;
    std::function<void(bool stopped)> on_end;
  };

  Schedule(Terms terms, Hooks hooks);

  /// Before the first next(). Throws `bad_data` for one that cannot be of this job.
  void resume(Position position);
  /// All steps had been made by then.
  bool over() const { return job_over(); }

  /// The trainer has finished what it had. Done when there is something for it; fails for all when
  /// a hook throws. `stop`: it was told to end, so all are to save and end. `wanted`: so many steps
  /// at a time, or fewer.
  base::Future<Task> next(int trainer, bool stop, int64_t wanted = 1);
  /// All are to save as soon as they can, and to go on. Nothing in a job that does not save.
  void request_save();
  /// Nothing more is to be trained than what others have begun: then it is as after the last step.
  void finish();
  /// Nothing more is to come: who waits hears why, and so does who comes.
  void fail(const base::Error& error);
  /// Of trainers that are through with what they had, for those that are not.
  std::vector<rpc::Wait> waits() const;

 private:
  enum class Phase { kBeginning, kTraining, kEvaluating, kSaving, kEnding };
  struct Request {
    base::Promise<Task> promise;
    int64_t wanted = 1;
    base::TimePoint since = base::Clock::now();
  };
  using Waiting = std::map<int, Request>;
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  bool task_locked(int trainer, int64_t wanted, Task& task);
  bool take_locked(int trainer, int64_t wanted, Task& task);
  int64_t furthest_locked() const;
  int64_t remaining_locked(int shard) const;
  int64_t next_save() const;
  int64_t gate_locked() const;
  bool epoch_over() const;
  bool job_over() const;
  bool over_after_evaluation() const;
  bool stopped() const { return stop_at_ != kNever; }
  void enter_next_phase();
  Phase after_training() const;
  Phase after_evaluation();
  bool hand_out(Waiting& waiting);

  const Terms terms_;
  const Hooks hooks_;
  mutable std::mutex mutex_;
  Phase phase_ = Phase::kBeginning;
  Position position_;
  std::vector<int64_t> taken_;  // steps since the job's beginning, by trainer
  int64_t saved_ = 0;           // steps of each trainer at the last checkpoint
  // In steps of each trainer; kNever: nobody has asked.
  int64_t stop_at_ = kNever;
  int64_t save_at_ = kNever;
  int64_t finish_at_ = kNever;
  std::optional<base::Error> failed_;
  Waiting waiting_;
};

}  // namespace distrain::job
