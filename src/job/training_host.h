#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "distrain/base/executor.h"
#include "distrain/base/future.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/definition.h"
#include "distrain/rpc/of_local.h"

namespace distrain::job {

inline constexpr int kHostRank = 0;

/// What a trainer hears before it trains.
struct Attached {
  std::string path;        ///< of the checkpoint that the job goes on from; empty: afresh
  int64_t steps_made = 0;  ///< by each trainer
  bool saves = false;      ///< the job
  Seat seat;
  bool is_late = false;  ///< it takes the place of a trainer that was lost, in the midst of the job
  static constexpr auto kFields = std::tuple(&Attached::path, &Attached::steps_made,
                                             &Attached::saves, &Attached::seat, &Attached::is_late);
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

/// A trainer's part of a checkpoint that is being made.
struct HeldPart {
  PartName part;
  int32_t trainer = 0;
  Held tensors;
  static constexpr auto kFields =
      std::tuple(&HeldPart::part, &HeldPart::trainer, &HeldPart::tensors);
};

/// A training's schedule, learning rate, evaluation, checkpoints and end, on rank 0. Thread-safe.
class TrainingHost final : public rpc::Layer, public std::enable_shared_from_this<TrainingHost> {
 public:
  /// Tries to write to the folder of checkpoints. `agent`: null if all trainers are here.
  TrainingHost(std::string cmd, RankBody::Known known, rpc::Agent* agent, const Job& job,
               EventSink& sink);

  /// Exposes the functions that trainers call on rank 0, and those by which rank 0 tells the `sink`
  /// of each rank that the job may continue without it. Must be called before join().
  static void expose(rpc::Agent& agent, EventSink& sink);

  /// The first one makes the schedule, and reads the checkpoint if there is one to go on from.
  /// `incarnation`: of the trainer's rank.
  Attached attach(const Plan& plan, int trainer, uint32_t incarnation);
  /// Of the checkpoint that the job goes on from.
  data::NamedTensors saved_part(const PartName& part, int trainer);
  base::Future<Lease> next(Seat seat, bool stop, bool last, int64_t wanted);
  void report(Seat seat, const Report& report);
  /// Done when no save is under way. A new save waits for it, so that one is in memory at a time.
  base::Future<void> await_save() { return checkpoints_.idle(); }
  /// On a task to save: a trainer's parts.
  void contribute(Seat seat, const std::vector<HeldPart>& parts);

  // Note [Who waits on rank 0]
  //
  // Trainers wait on rank 0 for each other's next step. A call to another rank fails when that rank
  // is lost; here it is a third one that does not come, and one of those who wait may be on rank 0
  // itself. So the host hears of each loss, and tells all who wait; or, where the job goes on
  // without that rank, waits for it no more: Note [Leases].
  void on_rank_lost(const rpc::Loss& loss) override;

  /// All are to save as soon as they can, and to go on. Takes no lock, so that a line that cannot
  /// be written, which asks for a stop, may come from under it.
  void request_save();
  std::vector<rpc::Wait> waits() const override {
    const Schedule* const schedule = current_;
    return schedule ? schedule->waits() : std::vector<rpc::Wait>();
  }
  /// Adds what rank 0 knows of the training so far, `steps` too if `all_steps`: those of all
  /// trainers. Any thread.
  void add_to(Json& fields, bool all_steps = false) const;
  std::string last_saved() const { return checkpoints_.last_saved(); }

 private:
  void begin(const Plan& plan);
  std::optional<int> trainer_of(int rank) const;
  void go_on_without_any(bool may_return) const;
  void rest(int trainer) const;
  void load();
  void check_seat_locked(Seat seat) const;
  void read_position(const Snapshot& snapshot);
  void add_loss(Json& fields) const;
  void on_evaluated(const Position& position, bool whole_epoch);
  void tell_evaluation(const char* set, const Evaluation& evaluation, const Position& position);
  void save(const Position& position);

  const std::string cmd_;
  const RankBody::Known known_;
  rpc::Agent* const agent_;
  EventSink& sink_;
  const std::shared_ptr<StopSignal> stop_;

  base::InlineExecutor executor_;

  mutable std::mutex mutex_;  // of what follows, but the schedule, which locks itself
  std::optional<Plan> plan_;
  std::map<int, Seat> trainers_;         // that are there
  std::map<int, int> untried_;           // who have come late: what they have asked for so far
  std::map<int, uint32_t> lost_before_;  // of each trainer that was lost: its next incarnation
  bool may_lose_ = false;                // the job may lose trainers
  int64_t lost_steps_ = 0;               // that those who are lost have made
  int64_t lost_ = 0;                     // how many are
  bool told_of_schedule_ = false;
  std::optional<Schedule> schedule_;
  std::atomic<Schedule*> current_{nullptr};  // once it is ready
  std::optional<base::Error> failed_;
  optim::Schedule lr_schedule_;
  std::optional<Snapshot> resumed_;  // until all have taken their parts of it
  int64_t steps_made_ = 0;
  Report total_;                                 // of the reports since the last evaluation
  std::optional<base::TimePoint> saving_since_;  // all have come to a save
  std::vector<HeldPart> gathered_;
  Json metrics_ = Json::object();

  Checkpoints checkpoints_;  // the last: its thread ends before what it tells of a failure
};

}  // namespace distrain::job
