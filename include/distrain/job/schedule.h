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
  bool partial = true;   ///< the epoch is not over
  bool stopped = false;  ///< kEnd: before its time, by a signal
  /// kEvaluate, kSave: its place among the trainers that do so together, and how many they are.
  int32_t part = 0;
  int32_t parts = 1;
  static constexpr auto kFields =
      std::tuple(&Task::kind, &Task::epoch, &Task::shard, &Task::step, &Task::count, &Task::last,
                 &Task::partial, &Task::stopped, &Task::part, &Task::parts);
};

/// A trainer, and how many had its place before, so that late words of a lost one are known.
struct Seat {
  Seat(int trainer_number = 0, int64_t taken_before = 0)  // NOLINT: a trainer's first one
      : trainer(trainer_number), before(taken_before) {}
  int trainer;
  int64_t before;
  static constexpr auto kFields = std::tuple(&Seat::trainer, &Seat::before);
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
/// Note [Leases]
///
/// What a trainer has been handed is its lease: a range of a shard's steps, or its part of an
/// evaluation or a save. It gives the lease back by asking for the next task. When a trainer is
/// lost, the steps of its lease that were not made are handed out again, before any others and
/// whatever all are to meet for, so that at each meeting all steps handed out have been made; and
/// an evaluation or a save that it had a part in begins again with those who are left. From then on
/// they take over steps of its shard, too, as there is nobody else to make them. A new process can
/// take the lost one's place, in a seat of its own; the old one is refused.
///
/// Thread-safe. The hooks run on the thread of whoever comes last, while all trainers wait.
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
    /// The job goes on without a trainer that is lost, as long as there is another.
    bool may_lose = false;
  };
  struct Hooks {
    std::function<void()> on_begin = [] {};  ///< all trainers are there
    /// `whole_epoch`: not only the end of the job, in the middle of one.
    std::function<void(const Position&, bool whole_epoch)> on_evaluated = [](auto&, bool) {};
    std::function<void(const Position&)> on_save = [](auto&) {};
    std::function<void(bool stopped)> on_end = [](bool) {};
    /// What trainers have said since they were handed their parts of an evaluation or a save does
    /// not count: one of them is lost, and all begin it again.
    std::function<void()> on_again = [] {};
    /// That trainer waits for others from here on, and others may make more steps than it does.
    std::function<void(int trainer)> on_rest = [](int) {};
  };

  Schedule(Terms terms, Hooks hooks);

  /// Before the first next(). Throws `bad_data` for one that cannot be of this job.
  void resume(Position position);
  /// All steps had been made by then.
  bool over() const;

  /// The trainer has finished what it had. Done when there is something for it; fails for all when
  /// a hook throws. `stop`: it was told to end, so all are to save and end. `wanted`: so many steps
  /// at a time, or fewer. `peer_lost` for a seat that another has taken.
  base::Future<Task> next(Seat seat, bool stop, int64_t wanted = 1);

  /// A new process takes the place of a trainer that is lost.
  Seat take_seat(int trainer);
  /// What became of a lost trainer's lease.
  struct Lost {
    int64_t made = 0;      ///< steps that it has made in all, as far as that is known
    int64_t back = 0;      ///< steps that are given back
    int64_t in_doubt = 0;  ///< of these: nobody knows whether they were made
  };
  /// The trainer is lost. `made`: the number of the last step of its seat that was made, counted
  /// from 1, if that is known. go_on() is to follow, on a thread that may take its time.
  Lost lose(int trainer, std::optional<int64_t> made);
  void go_on();
  /// How many are there now.
  int trainers_left() const;
  /// Steps of each trainer since the job's beginning, as if all had made as many.
  int64_t steps_of_each() const;
  /// Steps in this run that trainers which are there have reported.
  int64_t steps_made() const;
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
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  /// Steps of a shard in the epoch under way that follow each other.
  struct Range {
    int shard = 0;
    int64_t step = 0;
    int64_t count = 0;
  };
  /// A trainer's place.
  struct Place {
    bool is_here = true;
    bool has_task = false;
    int64_t before = 0;  ///< others that have had it
    int64_t taken = 0;   ///< steps since the job's beginning
    int64_t made = 0;    ///< of whoever has it now, without the lease
    Range lease;         ///< count 0: none
  };

  Place& place(int trainer) { return places_[static_cast<size_t>(trainer)]; }
  int here_locked() const;
  bool task_locked(int trainer, int64_t wanted, Task& task);
  bool take_locked(int trainer, int64_t wanted, Task& task);
  Range take_new_locked(int trainer, int64_t wanted);
  int64_t furthest_locked() const;
  int64_t remaining_locked(int shard) const;
  int64_t next_save() const;
  int64_t gate_locked() const;
  bool epoch_over() const;
  bool stopped() const { return stop_at_ != kNever; }
  void tell_who_rests();
  void advance();
  void enter_next_phase(Phase before, bool again);
  Phase after_training() const;
  Phase after_evaluation();
  void hand_out();

  const Terms terms_;
  const Hooks hooks_;
  mutable std::mutex mutex_;
  Phase phase_ = Phase::kBeginning;
  Position position_;
  std::vector<Place> places_;
  std::vector<Range> given_back_;  // by those who are lost
  bool takes_over_ = false;        // terms_.take_over, or somebody was lost
  bool is_advancing_ = false;      // a thread is in the hooks
  bool again_ = false;             // somebody was lost who had a part in this phase
  int64_t saved_ = 0;              // steps of each trainer at the last checkpoint
  // In steps of each trainer; kNever: nobody has asked.
  int64_t stop_at_ = kNever;
  int64_t save_at_ = kNever;
  int64_t finish_at_ = kNever;
  std::optional<base::Error> failed_;
  std::map<int, Request> waiting_;  // by trainer
};

}  // namespace distrain::job
