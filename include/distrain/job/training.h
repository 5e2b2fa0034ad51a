#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/named_tensors.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/job/events.h"
#include "distrain/job/options.h"
#include "distrain/job/rank.h"
#include "distrain/job/schedule.h"
#include "distrain/nn/remote_module.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/optim/local_updates.h"

namespace distrain::job {

/// One step of training that is to be made.
struct Step {
  int64_t epoch = 1;
  int shard = 0;       ///< whose part of the data
  int64_t number = 0;  ///< of that shard in the epoch, from 0
  int64_t total = 0;   ///< that this trainer has made since the job's beginning
};

/// What came of it.
struct Result {
  at::Tensor loss;  ///< a number; one that is not finite ends the job
  int64_t samples = 0;
  Json more = Json::object();      ///< further fields of the `step` line
  int64_t steps = 1;               ///< that it counts as in the last line
  Json progress = Json::object();  ///< further fields of EventSink::progress()
};

/// This trainer's part of an evaluation: the examples from `first(n)` to `end(n)` of n.
struct Share {
  int index = 0;
  int count = 1;
  int64_t first(int64_t n) const { return n * index / count; }
  int64_t end(int64_t n) const { return n * (index + 1) / count; }
  /// Their numbers, `batch_size` at a time.
  void each_batch(int64_t n, int64_t batch_size,
                  const std::function<void(std::span<const int64_t> examples)>& use) const;
};

/// What a part of a checkpoint is called, and where it is kept.
struct PartName {
  std::string name;  ///< its tensors are named by it, as in "fc.weight"; empty: all others
  std::string file = "model";  ///< model, optimizer or state
  bool each_own = false;       ///< every trainer has another one; otherwise the first one's is kept
  static constexpr auto kFields = std::tuple(&PartName::name, &PartName::file, &PartName::each_own);

  /// Whether a tensor is of this part; of trainer `trainer`'s.
  bool has(const std::string& tensor, int trainer) const;
  /// As the checkpoint calls a tensor of that trainer's.
  std::string stored(const std::string& tensor, int trainer) const;
  bool operator==(const PartName&) const = default;
};

/// Tensors as they were at one moment: nobody writes to them any more. They are fetched, from
/// wherever they are, while training goes on.
struct Held {
  data::NamedTensors here;
  std::vector<rpc::RRef<data::NamedTensors>> elsewhere;  ///< held by their owners
  std::vector<std::string> trained;                      ///< names of those that must be finite
  static constexpr auto kFields = std::tuple(&Held::here, &Held::elsewhere, &Held::trained);

  Held() = default;
  /// Those that require a gradient are trained.
  Held(data::NamedTensors tensors);                       // NOLINT: implicit by design
  Held(std::vector<rpc::RRef<data::NamedTensors>> owned)  // NOLINT
      : elsewhere(std::move(owned)) {}

  /// Has `agent`'s rank hold what is here until it is fetched.
  void leave_at(rpc::Agent& agent);
};

/// Something that a checkpoint keeps.
struct Part : PartName {
  bool once = false;  ///< it is one thing, which the first trainer gives for all
  /// Called while all trainers wait. What goes on changing is copied (data::copies_on_host).
  std::function<Held(int trainer)> take;
  /// Throws `bad_data` for tensors that do not fit.
  std::function<void(int trainer, const data::NamedTensors& saved)> give;
};

/// Tensors that are written and read in place.
Part part_of(data::NamedTensors live, std::string file = "model");
/// A trainer's own, which are asked for anew each time: `state`.
Part part_of_each(std::function<data::NamedTensors(int trainer)> live);
/// Lists of words that the model's numbers stand for, by name: what it takes to use the model. None
/// has a line break in it. The part has a file of its own, so no name.
Part part_of_words(const std::map<std::string, std::vector<std::string>>& lists);

namespace detail {

template <class T>
Held hold_parameters(rpc::CallContext& call, const rpc::RRef<T>& object) {
  Held held(data::copies_on_host(object.local_value().named_parameters()));
  held.leave_at(call.agent);
  return held;
}
template <class T>
void give_parameters(const rpc::RRef<T>& object, const data::NamedTensors& saved) {
  data::copy_into(object.local_value().named_parameters(), saved);
}

}  // namespace detail

/// So that Training::keep() takes a reference to a T of another rank: it has named_parameters(), a
/// data::NamedTensors. On every rank, before it joins.
template <class T>
void expose_parameters(rpc::Agent& agent, const std::string& name) {
  agent.expose<&detail::hold_parameters<T>>(name + ".hold_parameters");
  agent.expose<&detail::give_parameters<T>>(name + ".give_parameters");
}

/// How much there is to train, and how it is told.
struct Plan : Schedule::Terms {
  bool eval_only = false;  ///< nothing is trained, only evaluated, and nothing saved
  double lr = 0;
  std::string lr_schedule;  ///< optim::Schedule::parse
  Unit unit = Unit::kSamples;
  std::optional<int> log_interval;            ///< see StepLines
  std::string limit;                          ///< the option that says how long to train
  bool log = true;                            ///< `step` and `epoch` lines, the last epoch's loss
  int64_t steps_at_once = 1'000'000;          ///< that are handed out together, at most
  std::string what_must_agree = "the files";  ///< in words, for a trainer that has read others

  // What a TrainingPlan is told, and its place in the job.
  int first_rank = 0;
  std::map<std::string, std::string> agreed;  ///< with the checkpoint, too
  std::map<std::string, std::string> alike;
  std::map<std::string, int64_t> used;  ///< EventSink::used()
  std::vector<PartName> parts;
  static constexpr auto kFields =
      std::tuple(&Plan::trainers, &Plan::epochs, &Plan::steps, &Plan::steps_per_epoch,
                 &Plan::take_over, &Plan::may_lose, &Plan::eval_only, &Plan::lr, &Plan::lr_schedule,
                 &Plan::unit, &Plan::limit, &Plan::what_must_agree, &Plan::first_rank,
                 &Plan::agreed, &Plan::alike, &Plan::used, &Plan::parts);

  Plan() { take_over = true; }
  static Plan of(const TrainerOptions& options, int64_t steps_per_epoch);
  /// Of one trainer that has no epochs, and lines of its own. Without end if `steps`, which the
  /// option `limit` says, is 0. Throws `invalid` for a schedule that counts epochs or evaluations.
  static Plan of_steps(const RuleOptions& options, int64_t steps, std::string limit = "");
};

/// Decides which steps of a run print a line, as `--log-interval` says: every Nth step or, by time,
/// the first step, the last one, and at most one step every 5 s between them.
///
///   StepLines lines(sink, "step", options.log_interval);
///   lines.add(number, [loss] { return Json{{"loss", loss}}; });  // after each step
///   lines.end();
class StepLines {
 public:
  /// `event`: the kind of the lines. `interval`: steps from one line to the next, 0 for no lines;
  /// by time if unset.
  StepLines(EventSink& sink, std::string event, std::optional<int> interval)
      : sink_(sink), event_(std::move(event)), interval_(interval) {}

  /// Emits the line of step `number`, counted from 1, and returns true if the line is due.
  /// Otherwise keeps `fields` for end(), because the step may be the last one.
  bool add(int64_t number, std::function<Json()> fields);
  /// Ends the run: emits the last step's line if there is none yet. Another run may follow.
  void end();

 private:
  EventSink& sink_;
  const std::string event_;
  const std::optional<int> interval_;
  base::TimePoint next_{};         // by time: when the next line is due
  std::function<Json()> pending_;  // by time: the fields of the last step if it has no line
};

/// Returns the loss of a step. Throws `not_finite` for NaN and infinity, and `invalid` if `loss` is
/// not one number; both messages name the epoch and the step.
double checked_loss(const at::Tensor& loss, int64_t epoch, int64_t step);

using LocalUpdates = optim::LocalUpdates;
class TrainingHost;
struct Report;

/// What Training and LocalTraining have in common: what is told of a job's training before it runs.
class TrainingPlan {
 public:
  TrainingPlan(const TrainingPlan&) = delete;

  /// What must be the same on all trainers, and in the checkpoint that a job goes on from: what was
  /// read of the data, say. A name that begins with `--` is that of an option which each_own.
  void agree(const std::string& name, const std::string& value) { plan_.agreed[name] = value; }
  /// The recorded `config` shows `value` in its field `used_as`, if that is not empty.
  void agree(const std::string& name, int64_t value, const std::string& used_as = {}) {
    agree(name, std::to_string(value));
    if (!used_as.empty()) plan_.used[used_as] = value;
  }
  /// What must be the same on all trainers only.
  void alike(const std::string& name, const std::string& value) { plan_.alike[name] = value; }

  /// Adds a part to each checkpoint. All trainers add the same names, in the same order.
  void keep(const std::string& name, Part part) {
    part.name = name;
    parts_.push_back(std::move(part));
  }
  /// The state of updates that this process makes by itself; as with a DistributedOptimizer.
  void keep(LocalUpdates& optimizer);

  /// The job ends before its last step once this holds on a trainer that asks for further steps.
  void end_when(std::function<bool()> reached) { reached_ = std::move(reached); }

  using Evaluate = std::function<Evaluation(const Share&)>;
  /// At the end of each epoch, and of the job: this trainer's share of the validation data.
  void evaluate_epochs(Evaluate evaluate) { evaluate_epoch_ = std::move(evaluate); }
  /// At the end of the job only: of the test data.
  void evaluate_at_end(Evaluate evaluate) { evaluate_end_ = std::move(evaluate); }
  /// Prints a `warn` line of trainer 0: the training data in `path` has no label but this one.
  void warn_of_one_label(const std::string& path, const std::string& label);
  /// A number for the last line; of all trainers' the greatest.
  void note_max(const std::string& name, int64_t value);

  /// The job was told to end before its time. Known when run() is over.
  bool stopped() const { return stopped_; }
  /// Steps that this trainer has made since the job's beginning.
  int64_t steps_made() const { return total_; }

 protected:
  /// `own`: the trainers of this process. It calls the host by `agent`; null: it is here.
  TrainingPlan(Plan plan, Process& process, std::vector<int> own, Share share, rpc::Agent* agent,
               TrainingHost* host);
  ~TrainingPlan() = default;

  /// Tells rank 0 of the plan, and goes on from a checkpoint if there is one to go on from.
  void attach();
  bool reached() const { return reached_ && reached_(); }
  /// Makes a step, at the learning rate that is its, and tells of it.
  void make(const Step& what, const std::function<Result()>& step);
  Seat seat(int trainer) const { return seats_.at(trainer); }
  /// A task that is not to train.
  void meet(const Task& task);

  Plan plan_;
  std::vector<int> own_;
  TrainingHost* const host_;
  optim::Schedule lr_schedule_;
  /// For each optimizer, before a step: the learning rate's factor, and the step's number from 1.
  std::vector<std::function<void(double lr_factor, int64_t number)>> begin_step_;

 private:
  template <auto method, class... Args>
  auto ask(const Args&... args) const;
  /// Steps that this trainer has made in this run.
  int64_t run_steps() const { return total_ - begun_at_; }
  void begin_epoch(int64_t epoch);
  /// Counts a step and emits its `step` line if that is due.
  void log_step(const Result& result, double loss, double lr);
  /// Emits the `epoch` line if an epoch has begun. `is_last`: after the line of the last step;
  /// `is_partial`: the job ends within the epoch.
  void end_epoch(bool is_last, bool is_partial = false);
  Report close_epoch(const Task& task);
  void end(const Task& task);
  void show(int64_t epoch, double loss, double lr, const Json& more);

  Process& process_;
  const Share share_;
  rpc::Agent* const agent_;
  std::vector<Part> parts_;
  Evaluate evaluate_epoch_, evaluate_end_;
  std::function<bool()> reached_;
  std::map<std::string, int64_t> maxima_;
  StepLines lines_;
  base::TimePoint first_{}, epoch_start_, last_line_;
  int64_t epoch_ = 0;     // that has begun; 0: none
  int64_t begun_at_ = 0;  // steps before this run
  int64_t total_ = 0;     // steps since the job's beginning
  int64_t epoch_steps_ = 0, epoch_samples_ = 0;
  int64_t line_samples_ = 0;  // since the last line
  double epoch_loss_ = 0;     // sum of its steps
  double last_loss_ = 0;      // mean of the last epoch
  double first_loss_ = 0;     // of the first step of this run
  double train_s_ = 0;        // first step to last
  bool has_warned_ = false;
  std::map<int, Seat> seats_;  // of `own_`
  int64_t samples_ = 0;        // in this run
  int64_t steps_ = 0;          // in this run, as results count them
  base::TimePoint shown_{};    // last, by show()
  bool stopped_ = false;
};

/// The loop of one trainer, as all trainers of a job have it: which step comes next, evaluation,
/// checkpoints, the end, a signal to stop, and the lines that tell of it.
///
///   job::Training training(rank, options, data.steps_per_epoch());
///   training.keep("net", net);
///   training.keep(optimizer);
///   training.run([&](const job::Step& step) { …; return job::Result{loss, samples}; });
///
/// Steps are handed out by rank 0, some at a time, so many that nobody notices: about a quarter of
/// a second. Trainers that wait for each other, in a group or by --mode, make all steps of their
/// own shards; otherwise one that is done takes over steps of the slowest. Epochs are evaluated and
/// saved while all trainers wait. To be used by one thread, on all ranks of the role.
///
/// The job goes on without a trainer that is lost, but for rank 0, if `--mode` is not sync, the
/// trainers have no group, and nothing that is kept is a trainer's own: what it had begun goes to
/// others, and a new process of its rank can take its place. Until all have begun a loss ends it.
class Training : public TrainingPlan {
 public:
  Training(Rank& rank, const TrainerOptions& options, int64_t steps_per_epoch)
      : Training(rank, Plan::of(options, steps_per_epoch)) {}
  Training(Rank& rank, Plan plan);

  using TrainingPlan::keep;
  /// A module on another rank.
  void keep(const std::string& name, const nn::RemoteModule<>& module);
  /// Something on another rank; see expose_parameters().
  template <class T>
  void keep(const std::string& name, const rpc::RRef<T>& object) {
    rpc::Agent& agent = rank_.agent();
    Part part;
    part.once = true;
    part.take = [&agent, object](int) {
      return agent.rpc_sync<&detail::hold_parameters<T>>(rpc::To(object.owner()).without_deadline(),
                                                         object);
    };
    part.give = [&agent, object](int, const data::NamedTensors& saved) {
      agent.rpc_sync<&detail::give_parameters<T>>(rpc::To(object.owner()).without_deadline(),
                                                  object, saved);
    };
    keep(name, std::move(part));
  }
  /// A replica on each trainer.
  template <class Module>
  void keep(const std::string& name, ddp::DistributedDataParallel<Module>& module) {
    keep(name, part_of(data::named_tensors(name, *module.module())));
  }
  /// The state of all its parameters, in files by these names: shared ones first, as the optimizer
  /// got them. Without names they are numbered. Its learning rate follows the plan's schedule.
  void keep(optim::DistributedOptimizer& optimizer, std::vector<std::string> parameters = {});

  /// Trains, as the job's other trainers do, to its end. Throws what `step` throws; `not_finite`.
  void run(const std::function<Result(const Step&)>& step);

 private:
  void train(const Task& task, const std::function<Result(const Step&)>& step);

  Rank& rank_;
  int64_t wanted_ = 1;  // steps at a time
};

}  // namespace distrain::job
