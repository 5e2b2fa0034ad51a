#pragma once

#include <deque>
#include <set>
#include <vector>

#include "distrain/autograd/context.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/job/events.h"
#include "distrain/job/lease_scheduler.h"
#include "distrain/job/options.h"
#include "distrain/job/rank.h"
#include "distrain/job/step.h"
#include "distrain/nn/remote_module.h"
#include "distrain/optim/single_process_optimizer.h"
#include "distrain/table/sharded_embedding.h"

namespace distrain::job {

/// The passes of one step whose gradients add up (`--accumulate`). Each pass has its own context.
///
///   job::StepPasses passes(agent);
///   for (const Batch& batch : batches) {
///     const auto adds_up = replicas.no_sync(!is_last(batch));
///     passes.begin();
///     passes.backward(loss(replicas.forward(batch)));
///   }
///   optimizer.step(passes.contexts());
class StepPasses {
 public:
  explicit StepPasses(rpc::Agent& agent) : agent_(agent) {}
  /// Begins a pass, whose forward pass must follow on this thread.
  const autograd::Context& begin() {
    ids_.push_back(contexts_.emplace_back(agent_).id());
    return contexts_.back();
  }
  /// Runs the newest pass's backward pass. This rank's gradients of the earlier passes move to the
  /// newest context first, so that replicas average the sum in the last pass.
  void backward(const at::Tensor& loss) {
    if (ids_.size() > 1) autograd::move_gradients(agent_, ids_[ids_.size() - 2], ids_.back());
    autograd::backward(contexts_.back(), {loss});
  }
  /// Returns the numbers of the passes' contexts, for DistributedOptimizer::step().
  const std::vector<uint64_t>& contexts() const { return ids_; }

 private:
  rpc::Agent& agent_;
  std::deque<autograd::Context> contexts_;
  std::vector<uint64_t> ids_;
};

/// The length of the training and the settings of its output.
struct Plan : LeaseScheduler::Options {
  bool eval_only = false;  ///< evaluates only, without training or saving
  double lr = 0;
  std::string lr_schedule;  ///< in the form that optim::LearningRateSchedule::parse() accepts
  Unit unit = Unit::kSamples;
  std::optional<int> log_interval;            ///< see StepLines
  std::string limit;                          ///< option that limits the steps, such as --steps
  bool log = true;                            ///< print `step` and `epoch` lines
  int64_t steps_at_once = 1'000'000;          ///< maximum number of steps in one task
  std::string what_must_agree = "the files";  ///< text for the error if trainers' data differ
  /// Options::streams: divide summed gradients by the number of trainers that have data; if false,
  /// by the number of all trainers, as torch.distributed.algorithms.Join.
  bool average_over_data = true;

  // TrainingPlan sets the following members.
  int first_rank = 0;                         ///< the rank of the first trainer
  std::map<std::string, std::string> agreed;  ///< values of TrainingPlan::agree(), by name
  std::map<std::string, std::string> alike;
  std::map<std::string, int64_t> used;  ///< numbers for EventSink::used(), by field
  std::vector<PartName> parts;
  std::vector<std::string> tables;  ///< the tables of TrainingPlan::keep(), on `table_servers`
  std::vector<int> table_servers;
  std::shared_ptr<table::TableServer> local_tables;  ///< if they are in this process; not sent
  static constexpr auto kFields =
      std::tuple(&Plan::trainers, &Plan::epochs, &Plan::steps, &Plan::steps_per_epoch,
                 &Plan::take_over, &Plan::may_lose, &Plan::eval_only, &Plan::lr, &Plan::lr_schedule,
                 &Plan::unit, &Plan::limit, &Plan::what_must_agree, &Plan::first_rank,
                 &Plan::agreed, &Plan::alike, &Plan::used, &Plan::parts, &Plan::tables,
                 &Plan::table_servers, &Plan::streams, &Plan::reading, &Plan::average_over_data);

  /// The `steps_per_epoch` of a plan without epochs: more steps than any job can make.
  static constexpr int64_t kEndless = 1'000'000'000'000;

  Plan() { take_over = true; }
  static Plan of(const TrainerOptions& options, int64_t steps_per_epoch);
  /// Returns a plan for trainers that read streams. An epoch is one pass over the data or, if
  /// `steps_per_epoch` is not 0, at most as many steps; the next epoch then goes on in the data.
  static Plan of_stream(const TrainerOptions& options, int64_t steps_per_epoch = 0);
  /// Returns a plan with one trainer, no epochs and no `step` lines. If `steps` is 0, training has
  /// no limit. `limit` names the option that sets `steps`. Throws `invalid` if the learning rate
  /// schedule needs epochs or evaluations.
  static Plan of_steps(const RuleOptions& options, int64_t steps, std::string limit = "");
};

using SingleProcessOptimizer = optim::SingleProcessOptimizer;
class TrainingHost;
struct Report;

/// The base of Training and SingleProcessTraining. It configures the training of a job.
class TrainingPlan {
 public:
  TrainingPlan(const TrainingPlan&) = delete;

  /// Requires `value`, such as a hash of the data, to be equal on all trainers and in the
  /// checkpoint that the job resumes from. Also needed for an option with Option::each_own, whose
  /// value is not compared otherwise; `name` is then the option with its dashes, as `--mean`.
  void agree(const std::string& name, const std::string& value) { plan_.agreed[name] = value; }
  /// Does the same for a number. Unless `used_as` is empty, it names the number's `config` field.
  void agree(const std::string& name, int64_t value, const std::string& used_as = {}) {
    agree(name, std::to_string(value));
    if (!used_as.empty()) plan_.used[used_as] = value;
  }
  /// Requires `value` to be equal on all trainers. It may differ from the checkpoint's value.
  void alike(const std::string& name, const std::string& value) { plan_.alike[name] = value; }

  /// Adds a part to each checkpoint. All trainers add the same names, in the same order.
  void keep(const std::string& name, Part part) {
    part.name = name;
    parts_.push_back(std::move(part));
  }
  void keep(SingleProcessOptimizer& optimizer);
  /// Adds tables to each checkpoint, with the state of their optimizer. Each server saves its rows
  /// in a file of its own, and a resumed job may have another number of servers. The steps of the
  /// tables must be settled at the end of each lease. All tables must be on the same servers.
  void keep(const std::string& name, const table::ShardedEmbedding& tables);
  /// Opens a shard of the data, which is divided into `shards`.
  using OpenShard = std::function<std::shared_ptr<data::Source>(int shard, int shards)>;
  /// Has the trainers of this process take their examples from the shards that `open` opens. Each
  /// step with Step::has_data takes one batch: step.source->next(). The plan must be
  /// Plan::of_stream(). Checkpoints include the sources' positions. A job may be resumed with
  /// another number of trainers; in async mode it continues without a lost trainer, whose shard
  /// another trainer then opens.
  void read(OpenShard open) {
    open_shard_ = std::move(open);
    plan_.reading = LeaseScheduler::Reading::kAnyShard;
  }
  /// Has `trainer`, which is one of this process, take its examples from `source` only, which must
  /// outlive this object. If it is one of several takers of a data::StreamServer, `reading` of the
  /// plan must be kOneStream.
  void read(data::Source& source, int trainer) {
    // The pointer does not own `source`.
    sources_[trainer] = std::shared_ptr<data::Source>(std::shared_ptr<void>(), &source);
  }
  /// Ends the job early once `reached` returns true. Trainers call it when they request steps.
  void end_when(std::function<bool()> reached) { reached_ = std::move(reached); }

  using Evaluate = std::function<Evaluation(const Share&)>;
  /// Evaluates this trainer's share of the validation data after each epoch and at the job's end.
  void evaluate_epochs(Evaluate evaluate) { evaluate_epoch_ = std::move(evaluate); }
  /// Evaluates this trainer's share of the test data at the end of the job.
  void evaluate_at_end(Evaluate evaluate) { evaluate_end_ = std::move(evaluate); }
  /// Prints, on trainer 0 only, a `warn` line that all examples in `path` have the label `label`.
  void warn_of_one_label(const std::string& path, const std::string& label) {
    if (own_.front() != 0) return;
    process_.sink().warn(base::ErrorKind::kBadData, path + ": all examples have the label " +
                                                        label + ": nothing can be learned");
  }
  /// Adds the field `name` to the job's `end` line, with the greatest `value` of all trainers.
  void note_max(const std::string& name, int64_t value) {
    const auto it = maxima_.try_emplace(name, value).first;
    it->second = std::max(it->second, value);
  }

  bool stopped() const { return stopped_; }      ///< after run(): a signal has stopped the job
  int64_t steps_made() const { return total_; }  ///< returns the steps since the job's beginning

 protected:
  /// `own` are the trainers of this process. If `agent` is not null, the object calls rank 0's
  /// TrainingHost by RPC; otherwise it calls `host` directly.
  TrainingPlan(Plan plan, Process& process, std::vector<int> own, rpc::Agent* agent,
               TrainingHost* host)
      : plan_(std::move(plan)),
        own_(std::move(own)),
        host_(host),
        lr_schedule_(optim::LearningRateSchedule::parse(plan_.lr_schedule)),
        process_(process),
        agent_(agent),
        lines_(process.sink(), "step", plan_.log_interval) {}

  ~TrainingPlan() = default;

  /// Sends the plan to rank 0 and loads the checkpoint that the job resumes from, if any.
  void attach();
  bool reached() const { return has_no_pass_left_ || (reached_ && reached_()); }
  /// Sets the step's learning rate, calls `step`, and reports its result. In the step, `with_data`
  /// of this process's trainers have data.
  void make(const Step& what, int64_t with_data, const std::function<Result()>& step);
  Seat seat(int trainer) const { return seats_.at(trainer); }
  /// Returns a request for at most `wanted` steps. If the trainer needs data for them, waits until
  /// its source has data, or a signal stops the job.
  Demand demand(int trainer, int64_t wanted);
  /// Has `trainer` read the shard of `start`, if there is one, from its position, which may be one
  /// of a checkpoint.
  void go_to(int trainer, const ShardStart& start, const std::string& checkpoint = {});
  /// Returns the source of the trainer's next batch, or null.
  data::Source* source_of(int trainer) const {
    const auto found = sources_.find(trainer);
    return found == sources_.end() ? nullptr : found->second.get();
  }
  /// Returns the factor that turns a mean over all trainers into one over those that have data.
  double mean_factor(const Task& task) const {
    if (!plan_.average_over_data || task.with_data == 0) return 1;
    return static_cast<double>(plan_.trainers) / task.with_data;
  }
  void meet(const Task& task);  ///< runs a task other than training

  Plan plan_;
  std::vector<int> own_;
  TrainingHost* const host_;
  optim::LearningRateSchedule lr_schedule_;
  /// Called before each step, one function per optimizer. `number` counts this run's steps from 1.
  std::vector<std::function<void(double lr_factor, int64_t number)>> begin_step_;
  /// Called before the steps of a lease, one function per optimizer and replica.
  std::vector<std::function<void(double mean_factor, bool has_data)>> begin_lease_;
  std::set<int> begins_epoch_;  // trainers that have not looked for data in this epoch
  bool asks_for_steps_ = true;  // the last task was not an evaluation or a save

 private:
  template <auto method, class... Args>
  auto ask(const Args&... args) const;
  int64_t run_steps() const { return total_ - begun_at_; }  ///< steps in this run
  bool reads_streams() const { return plan_.streams && !plan_.eval_only; }
  data::Source::Counts data_counts() const;
  void add_data_counts(Json& fields);
  int64_t processes() const { return plan_.trainers / static_cast<int64_t>(own_.size()); }
  /// Counts a step, and emits its `step` line if it is due.
  void log_step(const Result& result, int64_t with_data, double loss, double lr);
  /// Emits the `epoch` line if an epoch has begun. If `is_last`, emits the last step's line first.
  /// `is_partial`: the job ends within the epoch.
  void end_epoch(bool is_last, bool is_partial = false);
  Report close_epoch(const Task& task);
  void end(const Task& task);
  void show(int64_t epoch, double loss, double lr, const Json& more);

  Process& process_;
  rpc::Agent* const agent_;
  std::vector<Part> parts_;
  OpenShard open_shard_;                                  // unset if the trainers have one source
  std::map<int, std::shared_ptr<data::Source>> sources_;  // by trainer
  data::Source::Counts closed_;                           // of the sources that were closed
  bool has_no_pass_left_ = false;                         // a source with one pass has ended
  double waited_s_ = 0;  // time for which steps of earlier epochs waited for data
  Evaluate evaluate_epoch_, evaluate_end_;
  std::function<bool()> reached_;
  std::map<std::string, int64_t> maxima_;
  StepLines lines_;
  base::TimePoint first_{}, epoch_start_, last_line_;
  int64_t epoch_ = 0;     // the current epoch; 0 between epochs
  int64_t begun_at_ = 0;  // steps before this run
  int64_t total_ = 0;     // steps since the job's beginning
  int64_t epoch_steps_ = 0, epoch_samples_ = 0;
  int64_t line_samples_ = 0;  // samples since the last `step` line
  double epoch_loss_ = 0;     // sum of the losses in this epoch, times their weights
  int64_t epoch_weight_ = 0;  // sum of these weights, which are 1 without streams
  double last_loss_ = 0;      // mean loss of the last epoch
  double first_loss_ = 0;     // loss of the first step of this run
  double train_s_ = 0;        // seconds from the first step to the last
  bool has_warned_ = false;
  bool told_of_bad_rows_ = false;
  std::map<int, Seat> seats_;  // of the trainers in `own_`
  int64_t samples_ = 0;        // samples in this run
  int64_t steps_ = 0;          // sum of Result::steps in this run, over the trainers in `own_`
  base::TimePoint shown_{};    // time of the last show()
  bool stopped_ = false;
};

/// The training loop of one trainer: steps, evaluation, checkpoints, stop signals and output.
///
///   job::Training training(rank, options, data.steps_per_epoch());
///   training.keep("net", net);
///   training.keep(optimizer);
///   training.run([&](const job::Step& step) { …; return job::Result{loss, samples}; });
///
/// A trainer requests steps from rank 0 for about a quarter of a second at a time, so that the
/// requests cost little. Trainers that wait for each other, because they have a group or because of
/// `--mode`, make only the steps of their own shards. Otherwise a trainer that has finished its
/// shard takes over steps of the slowest trainer, but of streams only the shards of lost trainers.
/// All trainers pause for evaluations and saves.
/// Every rank of the role must create and run one Training, on one thread.
///
/// If a trainer other than rank 0 is lost after training has begun, the job continues unless
/// `--mode` is sync, the trainers have a group, no part is kept, or a kept part is not Part::once.
/// The other trainers make the lost trainer's steps, and a new process can take over its rank.
class Training : public TrainingPlan {
 public:
  Training(Rank& rank, const TrainerOptions& options, int64_t steps_per_epoch)
      : Training(rank, Plan::of(options, steps_per_epoch)) {}
  Training(Rank& rank, Plan plan)
      : TrainingPlan(std::move(plan), rank, {rank.index()}, &rank.agent(), nullptr), rank_(rank) {
    plan_.trainers = rank.count();
    plan_.first_rank = rank.number() - rank.index();
  }

  using TrainingPlan::keep;
  using TrainingPlan::read;
  void read(data::Source& source) { read(source, own_.front()); }
  /// Adds a module on another rank to each checkpoint.
  void keep(const std::string& name, const nn::RemoteModule<>& module);
  /// Adds an object on another rank to each checkpoint; see expose_parameters(). `tensors` names
  /// its parameters if other parts have the same `name`.
  template <class T>
  void keep(const std::string& name, const rpc::RRef<T>& object,
            std::vector<std::string> tensors = {}) {
    rpc::Agent& agent = rank_.agent();
    const auto take = [&agent, object](int) {
      return agent.rpc_sync<&detail::hold_parameters<T>>(rpc::To(object.owner()).without_deadline(),
                                                         object);
    };
    const auto give = [&agent, object](int, const rpc::NamedTensors& saved) {
      agent.rpc_sync<&detail::give_parameters<T>>(rpc::To(object.owner()).without_deadline(),
                                                  object, saved);
    };
    keep(name, {{.tensors = std::move(tensors)}, /*once=*/true, take, give});
  }
  /// Adds to each checkpoint a module of which each trainer has a replica. If the trainers read
  /// streams, its gradients are means over those that have data.
  template <class Module>
  void keep(const std::string& name, ddp::DistributedDataParallel<Module>& module) {
    keep(name, part_of(store::named_tensors(name, *module.module())));
    begin_lease_.emplace_back(
        [&module](double factor, bool) { module.reducer().scale_means(factor); });
  }
  /// Adds the state of `optimizer` to each checkpoint. `parameters` names its parameters in the
  /// order of DistributedOptimizer::state(); parameters without a name are numbered. The learning
  /// rate of `optimizer` follows the plan's schedule.
  void keep(optim::DistributedOptimizer& optimizer, std::vector<std::string> parameters = {});

  /// Trains to the end of the job. Throws `not_finite` for a loss that is NaN or infinite.
  void run(const std::function<Result(const Step&)>& step);

 private:
  void train(const Task& task, const std::function<Result(const Step&)>& step);

  Rank& rank_;
  int64_t wanted_ = 1;                         // number of steps to request next
  std::vector<std::function<void()>> settle_;  // called after the steps of a task
};

}  // namespace distrain::job
