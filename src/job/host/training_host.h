#pragma once

#include <atomic>
#include <cmath>

#include "distrain/base/executor.h"
#include "distrain/job/definition.h"
#include "distrain/rpc/agent.h"
#include "host/held_part.h"
#include "host/table_parts.h"

namespace distrain::job {

/// The reply to a trainer that attaches.
struct Attached {
  std::string path;        ///< checkpoint to resume from; empty if the job starts afresh
  int64_t steps_made = 0;  ///< steps that each trainer has made so far
  bool saves = false;      ///< the job saves checkpoints
  Seat seat;
  bool is_late = false;      ///< the trainer replaces a lost one in a running job
  ShardStart start;          ///< where the trainer's stream begins
  bool begins_epoch = true;  ///< an epoch begins, but the stream may be at the end of a pass
  static constexpr auto kFields =
      std::tuple(&Attached::path, &Attached::steps_made, &Attached::saves, &Attached::seat,
                 &Attached::is_late, &Attached::start, &Attached::begins_epoch);
};

struct NextTask {
  Task task;
  optim::ScheduleState schedule;
  static constexpr auto kFields = std::tuple(&NextTask::task, &NextTask::schedule);
};

/// A trainer's results of an epoch and of its share of an evaluation.
struct Report {
  double loss = 0;  ///< mean loss of the trainer's steps
  int64_t steps = 0;
  Evaluation valid, test;  ///< after an epoch (`valid`) and after the job (`test`)
  std::map<std::string, int64_t> maxima;
  int64_t bad_rows = 0;  ///< rows of streamed data that the trainer has skipped so far
  static constexpr auto kFields = std::tuple(&Report::loss, &Report::steps, &Report::valid,
                                             &Report::test, &Report::maxima, &Report::bad_rows);
};

/// Controls the training from rank 0: leases, learning rate, evaluation, checkpoints. Thread-safe.
class TrainingHost final : public rpc::Layer, public std::enable_shared_from_this<TrainingHost> {
 public:
  /// Checks that checkpoints can be written. `agent` is null if all trainers are in this process.
  TrainingHost(std::string cmd, RankBody::Known known, rpc::Agent* agent, const Job& job,
               EventSink& sink);

  /// Exposes the functions that trainers call on rank 0, and the function by which rank 0 notifies
  /// a rank's `sink` that the rank may be lost. Must be called before join().
  static void expose(rpc::Agent& agent, EventSink& sink);

  /// Registers a trainer, whose rank had `incarnation` earlier processes. The first call creates
  /// the scheduler and reads the checkpoint to resume from, if any.
  Attached attach(const Plan& plan, int trainer, uint32_t incarnation);
  /// Returns a part of the checkpoint that the job resumes from.
  rpc::NamedTensors saved_part(const PartName& part, int trainer);
  /// Returns the next task of the trainer in `seat`: see LeaseScheduler::next() for `stop` and
  /// `demand`. If `last` is true, no steps are handed out any more and the job ends early.
  base::Future<NextTask> next(Seat seat, bool stop, bool last, Demand demand);
  void report(Seat seat, const Report& report);
  /// Returns a future that completes when no save is in progress. Trainers wait for it before they
  /// take a snapshot, so that memory holds only one snapshot.
  base::Future<void> await_save() { return checkpoints_.idle(); }
  /// Loads the tables from the checkpoint that the job resumes from.
  void load_tables();
  /// Adds the tensors of a trainer to the current save.
  void contribute(Seat seat, const std::vector<HeldPart>& parts) {
    std::lock_guard lock(mutex_);
    check_seat_locked(seat);
    gathered_.insert(gathered_.end(), parts.begin(), parts.end());
  }

  // Note [Who waits on rank 0]
  //
  // A trainer's call of next() waits on rank 0 for other trainers' steps. RPC fails the call only
  // if rank 0 is lost, so the call would wait forever if another trainer is lost. The host
  // therefore handles each loss: it fails all waiting calls or, if the job continues without the
  // lost rank, no longer waits for that rank: Note [Leases].
  void on_rank_lost(const rpc::Loss& loss) override;

  /// Makes all trainers save as soon as possible and continue. Takes no lock, because a failed
  /// write of a JSON line may call this function while the lock is held.
  void request_save() {
    if (LeaseScheduler* const scheduler = current_) scheduler->request_save();
  }
  std::vector<rpc::Wait> waits() const override {
    const LeaseScheduler* const scheduler = current_;
    return scheduler ? scheduler->waits() : std::vector<rpc::Wait>();
  }
  /// Adds the metrics of the training so far to `fields`, and the steps of all trainers if
  /// `all_steps`. May be called by any thread.
  void add_to(Json& fields, bool all_steps = false) const;
  std::string last_saved() const { return checkpoints_.last_saved(); }

 private:
  void begin(const Plan& plan);
  std::optional<int> trainer_of(int rank) const {
    const int trainer = rank - plan_->first_rank;
    return trainer >= 0 && trainer < plan_->trainers ? std::optional(trainer) : std::nullopt;
  }
  void go_on_without_any(bool may_return) const;
  void rest(int trainer) const;
  void load();
  void check_seat_locked(Seat seat) const;
  void read_position(const Snapshot& snapshot);
  void check_other_trainers(const Snapshot& snapshot, int64_t saved) const;
  /// Adds the mean loss of the steps since the last evaluation to `fields`, if there were any.
  void add_loss(Json& fields) const {
    if (total_.steps == 0) return;
    const double loss = total_.loss / static_cast<double>(total_.steps);
    fields["loss"] = loss;
    if (plan_->unit == Unit::kWords) fields["perplexity"] = std::exp(loss);
  }
  void on_evaluated(const Position& position, bool whole_epoch);
  void tell_evaluation(const char* set, const Evaluation& evaluation, const Position& position);
  void save(const Position& position);

  const std::string cmd_;
  const RankBody::Known known_;
  rpc::Agent* const agent_;
  EventSink& sink_;
  const std::shared_ptr<StopSignal> stop_;

  base::InlineExecutor executor_;

  mutable std::mutex mutex_;  // guards what follows, except the scheduler, which locks itself
  std::optional<Plan> plan_;
  std::map<int, Seat> trainers_;         // attached and not lost
  std::map<int, int> untried_;           // next() calls of replacements that finished no task yet
  std::map<int, uint32_t> lost_before_;  // lowest incarnation that can replace a lost trainer
  bool may_lose_ = false;                // the job continues without lost trainers
  int64_t lost_steps_ = 0;               // steps made by lost trainers
  int64_t lost_ = 0;                     // number of losses
  bool told_of_schedule_ = false;
  std::optional<LeaseScheduler> scheduler_;
  std::atomic<LeaseScheduler*> current_{nullptr};  // null until the scheduler is ready
  std::optional<base::Error> failed_;
  optim::LearningRateSchedule lr_schedule_;
  std::shared_ptr<const Snapshot> resumed_;      // set until all trainers have loaded their parts
  bool begins_epoch_ = true;                     // no step of the first epoch was made before
  std::map<int, int64_t> bad_rows_;              // by trainer
  int64_t lost_bad_rows_ = 0;                    // that lost processes have reported
  Report total_;                                 // sum of the reports since the last evaluation
  std::optional<base::TimePoint> saving_since_;  // start of the current save
  std::vector<HeldPart> gathered_;
  Json metrics_ = Json::object();

  const std::shared_ptr<TableParts> tables_;
  Checkpoints checkpoints_;  // last, so that its thread ends before other members do
};

}  // namespace distrain::job
