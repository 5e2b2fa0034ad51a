#pragma once

#include <limits>
#include <tuple>

#include "distrain/base/future.h"
#include "distrain/data/source.h"
#include "distrain/job/job.h"
#include "distrain/job/shard_readers.h"

namespace distrain::job {

struct Task {
  enum class Kind : uint8_t {
    kTrain,
    kEvaluate,  ///< report the epoch, and evaluate this trainer's share of the data
    kSave,      ///< contribute this trainer's part of a checkpoint
    kEnd,
  };
  Kind kind = Kind::kTrain;
  int64_t epoch = 0;      ///< from 1
  int32_t shard = 0;      ///< the shard of the data; trainer i's own shard has the number i
  int64_t step = 0;       ///< kTrain: the first step, by its number in the shard and epoch, from 0
  int64_t count = 1;      ///< kTrain: number of consecutive steps; 0: see Demand::kUnknown
  bool last = false;      ///< kEvaluate: the job ends afterwards
  bool partial = true;    ///< a shard has steps left in this epoch
  bool stopped = false;   ///< kEnd: a signal has ended the job early
  int32_t part = 0;       ///< kEvaluate, kSave: this trainer's index among those with the task
  int32_t parts = 1;      ///< kEvaluate, kSave: number of trainers with the task
  bool has_data = true;   ///< kTrain: the trainer's stream has not ended; see Options::streams
  int32_t with_data = 0;  ///< kTrain: number of trainers with data in these steps; 0: all
  ShardStart start;       ///< kTrain: if start.shards > 0: the shard to read next; `count` is 0
  static constexpr auto kFields =
      std::tuple(&Task::kind, &Task::epoch, &Task::shard, &Task::step, &Task::count, &Task::last,
                 &Task::partial, &Task::stopped, &Task::part, &Task::parts, &Task::has_data,
                 &Task::with_data, &Task::start);
};

/// The steps that a trainer can make next.
struct Demand {
  Demand(int64_t wanted_steps = 1) : wanted(wanted_steps) {}  // NOLINT: implicit
  int64_t wanted;                                             ///< maximum number of steps
  static constexpr int64_t kUnknown = -1;
  /// Options::streams: steps for which the trainer has data for certain; 0: its data has ended.
  /// kUnknown: the trainer only completes its task, and gets no steps before it asks again.
  int64_t ready = kUnknown;
  data::StreamPosition position;  ///< Options::streams: where the trainer's next step begins
  static constexpr auto kFields = std::tuple(&Demand::wanted, &Demand::ready, &Demand::position);
};

/// A trainer and the number of its earlier processes, whose requests the scheduler refuses.
struct Seat {
  Seat(int trainer_number = 0, int64_t taken_before = 0)  // NOLINT: implicit
      : trainer(trainer_number), before(taken_before) {}
  int trainer;
  int64_t before;
  static constexpr auto kFields = std::tuple(&Seat::trainer, &Seat::before);
};

/// A job's progress, as checkpoints store it.
struct Position {
  int64_t epoch = 1;
  std::vector<int64_t> steps;  ///< steps in this epoch, by shard; of streams: by trainer
  int64_t total = 0;           ///< steps of all trainers since the job's beginning
  std::vector<data::StreamPosition> streams;  ///< by shard; empty unless Options::streams

  Json to_json() const {
    Json json{{"epoch", epoch}, {"steps", steps}, {"total", total}};
    for (const data::StreamPosition& at : streams) {
      json["streams"].push_back({at.epoch, at.piece, at.offset, at.block, at.used});
    }
    return json;
  }
  /// Throws `bad_data` if `json` is not the position of a job with `trainers` trainers. A position
  /// of streams may have another number of trainers.
  static Position from_json(const Json& json, int trainers);
};

/// Hands out the tasks of a job to its trainers: training steps and, when all trainers have
/// finished their steps, evaluation, saving and the end.
///
///   beginning → training → (epoch or job over) evaluating → (checkpoint due) saving →
///   training or ending
///
/// Training begins when all trainers have asked for a task. Otherwise fast trainers might take over
/// all steps of a late trainer, or a signal might stop the job before that trainer can save.
///
/// Note [Leases]
///
/// A trainer's current task is its lease: a range of a shard's steps, or a part of an evaluation or
/// a save. Asking for the next task completes the lease. If a trainer is lost, the remaining steps
/// of its lease are handed out first, before other steps and before any evaluation or save, so that
/// every evaluation and save includes all steps handed out before. An evaluation or save in which
/// the lost trainer had a part is repeated by the other trainers. After a loss, trainers also take
/// over steps of other shards, because nobody else makes the steps of the lost trainer's shard. A
/// new process can replace the lost one with a new Seat; requests with the old Seat are refused.
///
/// Note [Uneven shards]
///
/// Trainers that read streams (Options::streams) do not know how many steps their shards have. With
/// each request a trainer tells how many steps it has data for. When all trainers have asked, each
/// gets the same number of steps, for which all that have data are certain to have it. A trainer
/// whose data has ended makes its steps without data, until the data of all trainers has ended. So
/// trainers that wait for each other in each step never wait in vain, and all know how many of them
/// have data. (torch.distributed.algorithms.Join asks in each step.)
///
/// Trainers that need not wait for each other (Options::take_over) get steps of their streams one
/// by one. If such a trainer is lost, another one reads the rest of its shard: see ShardReaders.
///
/// Thread-safe. Hooks other than `on_rest` run in next() or go_on(), while all trainers wait.
class LeaseScheduler {
 public:
  /// The parts of a stream that a trainer can read.
  enum class Reading : uint8_t {
    kOwnShard,   ///< each trainer can read only its own shard
    kAnyShard,   ///< a trainer can read any shard from any position
    kOneStream,  ///< one process reads one stream for all trainers; see data::StreamServer
  };
  struct Options {
    int trainers = 1;
    int64_t epochs = 1;
    int64_t steps = 0;  ///< steps of each trainer; 0: as many as the epochs have
    int64_t steps_per_epoch = 1;
    /// If true, a trainer that has finished its shard makes steps of the shard with the most steps
    /// left, so that slow trainers do not delay the epoch. If false, it makes only its own steps.
    bool take_over = false;
    bool save = false;
    int64_t save_every = 0;  ///< steps of each trainer between saves; 0: at the end of each epoch
    bool may_lose = false;   ///< the job continues without lost trainers as long as one is left
    /// An epoch ends when the data of all trainers has ended, or after `steps_per_epoch` steps. If
    /// `epochs` is 0, only `steps` limits the job. `take_over` and `may_lose` need
    /// Reading::kAnyShard and no `steps_per_epoch`.
    bool streams = false;
    Reading reading = Reading::kOwnShard;  ///< of streams
  };
  struct Hooks {
    std::function<void()> on_begin = [] {};  ///< called when all trainers have asked for a task
    /// Called after each evaluation. `whole_epoch` is false if the job ends within the epoch.
    std::function<void(const Position&, bool whole_epoch)> on_evaluated = [](auto&, bool) {};
    std::function<void(const Position&)> on_save = [](auto&) {};
    std::function<void(bool stopped)> on_end = [](bool) {};
    /// Called when a trainer was lost during an evaluation or a save. The remaining trainers repeat
    /// that task, so the reports since the task's start do not count.
    std::function<void()> on_again = [] {};
    /// Called after a loss for each `trainer` that waits for a task, so that no rank waits for the
    /// next step of `trainer`.
    std::function<void(int trainer)> on_rest = [](int) {};
  };

  LeaseScheduler(Options options, Hooks hooks);

  /// Sets the position to resume at. Call it before next(). Throws `bad_data` if it is invalid.
  void resume(Position position);
  /// Options::streams: returns the shard of `trainer` and its position before its first request.
  ShardStart start_of(int trainer) const {
    std::lock_guard lock(mutex_);
    return shards_.start_of(trainer);
  }
  /// Returns true if all steps of the job have been handed out.
  bool over() const {
    if (finish_at_ != kNever && position_.total >= finish_at_ * options_.trainers) return true;
    if (options_.steps > 0 && position_.total >= options_.steps * options_.trainers) return true;
    return counts_epochs() && position_.epoch > options_.epochs;
  }

  /// Notes that the trainer has completed its task. Returns a future of its next task, which has at
  /// most `demand.wanted` steps. If `stop` is true and the job saves checkpoints, all trainers save
  /// and end. The future fails if a hook throws. Throws `peer_lost` if `seat` is of a lost process.
  base::Future<Task> next(Seat seat, bool stop, const Demand& demand = {});

  /// Replaces a lost trainer by a new process and returns the new process's seat.
  Seat take_seat(int trainer) {
    std::lock_guard lock(mutex_);
    TrainerState& its = state_of(trainer);
    if (its.is_here) base::invalid("this place is taken");
    its = TrainerState{.before = its.before + 1, .handed_out = its.handed_out};
    return {trainer, its.before};
  }
  /// The steps of a lost trainer's process.
  struct Lost {
    int64_t made = 0;      ///< steps that the lost process is known to have made
    int64_t back = 0;      ///< steps of its last task that will be handed out again
    int64_t in_doubt = 0;  ///< number of steps in `back` that the process may have made
  };
  /// Notes that a trainer is lost. `made` is the number of steps that its process made, if known.
  /// Must be followed by go_on(), which hands out the trainer's remaining steps and may block.
  Lost lose(int trainer, std::optional<int64_t> made);
  void go_on();
  int trainers_left() const {  ///< trainers that are not lost
    std::lock_guard lock(mutex_);
    return here_locked();
  }
  /// Returns the mean number of steps per trainer since the job's beginning.
  int64_t steps_of_each() const {
    std::lock_guard lock(mutex_);
    return position_.total / options_.trainers;
  }
  /// Returns the total number of steps that the current processes of the trainers have completed.
  int64_t steps_made() const {
    std::lock_guard lock(mutex_);
    int64_t made = 0;
    for (const TrainerState& each : trainers_) made += each.is_here ? each.made : 0;
    return made;
  }
  /// Makes all trainers save as soon as possible and continue, if the job saves at all.
  void request_save() {
    std::lock_guard lock(mutex_);
    if (options_.save && save_at_ == kNever) save_at_ = furthest_locked();
  }
  /// Ends the job early, but in the same way as after its last step.
  void finish() {
    std::lock_guard lock(mutex_);
    if (finish_at_ == kNever) finish_at_ = furthest_locked();
  }
  /// Makes all current and later calls of next() fail with `error`.
  void fail(const base::Error& error) {
    std::map<int, Request> waiting;
    {
      std::lock_guard lock(mutex_);
      failed_ = error;
      waiting.swap(waiting_);
    }
    for (auto& [who, request] : waiting) request.promise.fail(error);
  }
  /// Returns a Wait that names the trainers for which others wait; empty if no trainer waits.
  std::vector<rpc::Wait> waits() const;

 private:
  enum class Phase { kBeginning, kTraining, kEvaluating, kSaving, kEnding };
  struct Request {
    base::Promise<Task> promise;
    int64_t wanted = 1;
    base::TimePoint since = base::Clock::now();
  };
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  /// Consecutive steps of a shard in the current epoch.
  struct Range {
    int shard = 0;
    int64_t step = 0;
    int64_t count = 0;
  };
  struct TrainerState {
    bool is_here = true;  ///< not lost
    bool has_task = false;
    int64_t before = 0;      ///< number of earlier processes
    int64_t handed_out = 0;  ///< steps handed out since the job's beginning
    int64_t made = 0;        ///< steps that the current process has completed
    int64_t ready = 0;       ///< the last Demand::ready
    Range lease;             ///< `count` is 0 if there is none
  };
  /// The steps that all trainers get at the same time: Note [Uneven shards].
  struct Round {
    int64_t count = 0;
    int32_t with_data = 0;
  };

  TrainerState& state_of(int trainer) { return trainers_[static_cast<size_t>(trainer)]; }
  void resume_streams(Position& position);
  int here_locked() const {
    return static_cast<int>(std::ranges::count_if(trainers_, &TrainerState::is_here));
  }
  std::optional<Task> task_locked(int trainer, int64_t wanted);
  std::optional<Task> take_locked(int trainer, int64_t wanted);
  Range take_new_locked(int trainer, int64_t wanted);
  /// Returns the number of steps that the trainer may make before all trainers stop.
  int64_t allowed_locked(int trainer) const {
    const int64_t gate = gate_locked();
    if (!takes_over_ || gate == kNever) {
      return gate - trainers_[static_cast<size_t>(trainer)].handed_out;
    }
    const int64_t all = std::max(here_locked(), 1);  // they share the remaining steps
    return (gate * options_.trainers - position_.total + all - 1) / all;
  }
  Round round_locked() const;
  /// Returns the number of steps handed out to the furthest trainer. All trainers must make as many
  /// before a save or the end: in sync and ssp modes the furthest trainer may wait for their steps,
  /// so the job could otherwise deadlock. Returns 0 if trainers take over steps of other shards,
  /// because they then need not make equally many.
  int64_t furthest_locked() const {
    if (takes_over_) return 0;
    return std::ranges::max(trainers_, {}, &TrainerState::handed_out).handed_out;
  }
  /// Returns the steps per trainer at the next periodic save, a multiple of the interval.
  int64_t next_save() const { return (saved_ / options_.save_every + 1) * options_.save_every; }
  /// Returns the number of steps per trainer after which all trainers next stop, to save or to end.
  int64_t gate_locked() const {
    const int64_t last = options_.steps > 0 ? options_.steps : kNever;
    const int64_t save = options_.save && options_.save_every > 0 ? next_save() : kNever;
    return std::min({last, save, save_at_, stop_at_, finish_at_});
  }
  bool epoch_over() const {
    return data_ended_ || std::ranges::min(position_.steps) >= options_.steps_per_epoch;
  }
  /// Returns true if the number of epochs limits the job.
  bool counts_epochs() const {
    return options_.streams ? options_.epochs > 0 : options_.steps == 0;
  }
  /// Returns true if trainers of streams get their steps together: Note [Uneven shards].
  bool has_rounds() const { return options_.streams && !options_.take_over; }
  bool stopped() const { return stop_at_ != kNever; }
  void tell_who_rests();
  void advance();
  void enter_next_phase(Phase before, bool again);
  Phase after_training() {
    if (!returned_.empty() || shards_.has_skip()) return Phase::kTraining;
    data_ended_ = options_.streams && shards_.ended();
    if (epoch_over() || over()) return Phase::kEvaluating;
    return stopped() || gate_locked() <= position_.total / options_.trainers ? Phase::kSaving
                                                                             : Phase::kTraining;
  }
  Phase after_evaluation();
  void hand_out();

  const Options options_;
  const Hooks hooks_;
  mutable std::mutex mutex_;
  Phase phase_ = Phase::kBeginning;
  Position position_;
  std::vector<TrainerState> trainers_;
  std::vector<Range> returned_;  // remaining steps of lost trainers' leases
  ShardReaders shards_;          // Options::streams
  Round round_;
  bool data_ended_ = false;    // Options::streams: no trainer has data left in this epoch
  bool takes_over_ = false;    // options_.take_over, or a trainer was lost
  bool is_advancing_ = false;  // a thread runs hooks or hands out tasks
  bool again_ = false;         // a trainer was lost during its part of an evaluation or save
  int64_t saved_ = 0;          // steps of each trainer at the last checkpoint
  // Steps per trainer at which a requested stop, save or finish() takes effect; otherwise kNever.
  int64_t stop_at_ = kNever;
  int64_t save_at_ = kNever;
  int64_t finish_at_ = kNever;
  std::optional<base::Error> failed_;
  std::map<int, Request> waiting_;  // by trainer
  base::TimePoint last_request_{};
};

}  // namespace distrain::job
