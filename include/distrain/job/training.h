#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "distrain/data/named_tensors.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/job/options.h"
#include "distrain/job/rank.h"
#include "distrain/job/schedule.h"
#include "distrain/job/train_log.h"
#include "distrain/nn/remote_module.h"
#include "distrain/optim/distributed_optimizer.h"

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
  Json more = Json::object();  ///< further fields of the `step` line
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

/// Something that a checkpoint keeps. Its tensors are named by the part, as in "fc.weight".
struct Part {
  std::string file = "model";  ///< model, optimizer or state
  bool each_own = false;       ///< every trainer has another one; otherwise the first one's is kept
  bool once = false;           ///< it is one thing, which the first trainer gives for all
  std::function<data::NamedTensors(int trainer)> take;
  /// Throws `bad_data` for tensors that do not fit.
  std::function<void(int trainer, const data::NamedTensors& saved)> give;
};
using Parts = std::vector<std::pair<std::string, Part>>;

class LocalUpdates;
struct Attachment;
struct PartName;
struct Report;

/// Tensors that are written and read in place.
Part part_of(data::NamedTensors live, std::string file = "model");
/// A trainer's own, which are asked for anew each time: `state`.
Part part_of_each(std::function<data::NamedTensors(int trainer)> live);
/// Lists of words that the model's numbers stand for, by name: what it takes to use the model. None
/// has a line break in it. The part has a file of its own, so no name.
Part part_of_words(const std::map<std::string, std::vector<std::string>>& lists);
/// Of a torch::nn module, under `name`: parameters and buffers.
data::NamedTensors named_tensors(const std::string& name, const torch::nn::Module& module);
/// Copies values into tensors of these names, shapes and dtypes. `bad_data` for another set.
void copy_into(const data::NamedTensors& live, const data::NamedTensors& saved);

namespace detail {

template <class T>
data::NamedTensors take_parameters(const rpc::RRef<T>& object) {
  return data::on_host(object.local_value().named_parameters());
}
template <class T>
void give_parameters(const rpc::RRef<T>& object, const data::NamedTensors& saved) {
  copy_into(object.local_value().named_parameters(), saved);
}

}  // namespace detail

/// So that Training::keep() takes a reference to a T of another rank: it has named_parameters(), a
/// data::NamedTensors. On every rank, before it joins.
template <class T>
void expose_parameters(rpc::Agent& agent, const std::string& name) {
  agent.expose<&detail::take_parameters<T>>(name + ".take_parameters");
  agent.expose<&detail::give_parameters<T>>(name + ".give_parameters");
}

/// How much there is to train, and how it is told.
struct Plan {
  int64_t epochs = 1;
  int64_t steps = 0;  ///< of each trainer; 0: as many as the epochs have
  int64_t steps_per_epoch = 1;
  bool one_pace = false;   ///< nobody takes over steps of a slow trainer
  bool eval_only = false;  ///< nothing is trained, only evaluated, and nothing saved
  double lr = 0;
  optim::Schedule lr_schedule;
  int log_interval = 0;
  bool log = true;                    ///< `step` and `epoch` lines, the last epoch's loss
  int64_t steps_at_once = 1'000'000;  ///< that are handed out together, at most
  Unit unit = Unit::kSamples;
  std::string what_must_agree = "the files";  ///< in words, for a trainer that has read others

  static Plan of(const TrainerOptions& options, int64_t steps_per_epoch);
  /// Of one trainer that has no epochs, and lines of its own. Without end if `steps` is 0. Throws
  /// `invalid` for a schedule that counts epochs or evaluations.
  static Plan of_steps(const RuleOptions& options, int64_t steps);
};

/// What Training and LocalTraining have in common: what is told of a job's training before it runs.
class TrainingPlan {
 public:
  TrainingPlan(const TrainingPlan&) = delete;
  TrainingPlan& operator=(const TrainingPlan&) = delete;

  /// What must be the same on all trainers, and in the checkpoint that a job goes on from: what was
  /// read of the data, say. A name that begins with `--` is that of an option which each_own.
  void agree(const std::string& name, const std::string& value) { agreed_[name] = value; }
  void agree(const std::string& name, int64_t value) { agree(name, std::to_string(value)); }
  /// What must be the same on all trainers only.
  void alike(const std::string& name, const std::string& value) { alike_[name] = value; }

  /// What a checkpoint keeps, under a name that it has there. All trainers name the same, in the
  /// same order.
  void keep(const std::string& name, Part part) { parts_.emplace_back(name, std::move(part)); }
  /// The state of updates that this process makes by itself; as with a DistributedOptimizer.
  void keep(LocalUpdates& optimizer);

  /// The job has reached its goal, and ends before its last step, once this holds on some trainer
  /// when it asks for further steps.
  void end_when(std::function<bool()> reached) { reached_ = std::move(reached); }

  using Evaluate = std::function<Evaluation(const Share&)>;
  /// At the end of each epoch, and of the job: this trainer's share of the validation data.
  void evaluate_epochs(Evaluate evaluate) { evaluate_epoch_ = std::move(evaluate); }
  /// At the end of the job only: of the test data.
  void evaluate_at_end(Evaluate evaluate) { evaluate_end_ = std::move(evaluate); }
  /// A number for the last line; of all trainers' the greatest.
  void note_max(const std::string& name, int64_t value);

  /// The job was told to end before its time. Known when run() is over.
  bool stopped() const { return stopped_; }
  /// Steps that this trainer has made since the job's beginning.
  int64_t steps_made() const { return made_; }
  const TrainLog& log() const { return log_; }

 protected:
  TrainingPlan(Plan plan, EventSink& sink);
  ~TrainingPlan() = default;

  Attachment attachment() const;
  /// How the epoch went, of which this is the share.
  Report close_epoch(const Task& task, const std::vector<Share>& shares);
  /// What a trainer has for a checkpoint, by file, as it is stored there.
  std::map<std::string, data::NamedTensors> taken(int trainer) const;
  /// Gives each part what `saved` has for it.
  void give(int trainer, const std::string& checkpoint,
            const std::function<data::NamedTensors(const PartName&)>& saved) const;
  bool reached() const { return reached_ && reached_(); }
  /// The learning rate of the next step, for all optimizers.
  void set_lr_factors(int64_t epoch) const;
  /// Counts a step that was made, and tells of it.
  void made(const Result& result, int64_t epoch, int64_t number);

  Plan plan_;
  std::map<std::string, std::string> agreed_, alike_;
  Parts parts_;
  std::vector<std::function<void(double)>> set_lr_factors_;
  Evaluate evaluate_epoch_, evaluate_end_;
  std::function<bool()> reached_;
  std::map<std::string, int64_t> maxima_;
  TrainLog log_;
  int64_t made_ = 0;     // steps since the job's beginning
  int64_t samples_ = 0;  // in this run
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
      return agent.rpc_sync<&detail::take_parameters<T>>(rpc::To(object.owner()).without_deadline(),
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
    keep(name, part_of(named_tensors(name, *module.module())));
  }
  /// The state of all its parameters, in files by these names: those that are shared first, as the
  /// optimizer got them. Without names they are numbered. Its learning rate follows the plan's
  /// schedule from here on.
  void keep(optim::DistributedOptimizer& optimizer, std::vector<std::string> parameters = {});

  /// Trains, as the job's other trainers do, to its end. Throws what `step` throws; `not_finite`.
  void run(const std::function<Result(const Step&)>& step);

 private:
  void attach();
  void train(const Task& task, const std::function<Result(const Step&)>& step);

  Rank& rank_;
  int64_t wanted_ = 1;  // steps at a time
};

}  // namespace distrain::job
