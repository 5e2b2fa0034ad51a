// distrain hybrid: an EmbeddingBag on a parameter server, a Linear layer under DDP on the trainers.
//
// After PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework".

#include "distrain/scenario/hybrid.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "checkpoint.h"
#include "data.h"
#include "distrain/autograd/context.h"
#include "distrain/base/clock.h"
#include "distrain/base/trace.h"
#include "distrain/collective/backend.h"
#include "distrain/data/named_tensors.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/job/session.h"
#include "distrain/job/train_log.h"
#include "distrain/job/trainers.h"
#include "distrain/nn/remote_module.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/placed.h"
#include "model.h"

namespace distrain::scenario {

namespace {

using RemoteTable = nn::RemoteModule<models::EmbeddingTable>;
using DataParallelDense = ddp::DistributedDataParallel<models::Dense>;

constexpr int64_t kTestBatch = 256;
constexpr double kStopInterval_s = 0.5;  // between two looks for a signal

/// What all trainers begin with.
struct Beginning {
  HybridProgress progress;
  /// Of the dense layer's optimizer, by hybrid_parameter_names(); empty: afresh.
  std::vector<optim::ParameterState> dense_state;
  std::string path;  ///< of the checkpoint
  static constexpr auto kFields =
      std::tuple(&Beginning::progress, &Beginning::dense_state, &Beginning::path);
};

/// The training is over; from now on a signal ends a rank at once, unless the job is `stopped` by
/// one. Gives back whether it is, then also by one that came here.
bool end_training(rpc::CallContext& call, bool stopped) {
  auto& stop = call.agent.local<job::StopSignal>();
  stop.disarm(stopped);
  return stop.requested();
}
/// Before the first step, so that no rank is without it once there is something to save.
void heed_stop(rpc::CallContext& call) { call.agent.local<job::StopSignal>().arm(); }
void request_stop(rpc::CallContext& call) { call.agent.local<job::StopSignal>().request(); }
bool stop_requested(rpc::CallContext& call) {
  return call.agent.local<job::StopSignal>().requested();
}

/// What a trainer's functions work on. Called by the master, one after the other.
class Trainer {
 public:
  Trainer(rpc::Agent& agent, const HybridOptions& options, const job::Job& job,
          job::EventSink& sink)
      : agent_(agent),
        options_(options),
        job_(job),
        sink_(sink),
        stop_(*job.stop),
        log_(options_.log_interval, sink) {
    if (agent.rank() == 0) checkpoints_.emplace(options_.checkpoint, job, sink);
  }

  HybridDataInfo load() {
    data_.emplace(options_);
    return data_->info();
  }

  /// On trainer 0, before anybody trains: what the job goes on from goes where it belongs.
  Beginning restore(const RemoteTable& table) {
    const auto snapshot = checkpoints_->load();
    if (!snapshot) return {};
    HybridResume resume = read_hybrid(*snapshot, options_, data_->info(), data_->steps_per_epoch());
    table.rref().rpc_sync<&models::EmbeddingTable::set_weight>(resume.model.at("embedding.weight"));
    restored_ = std::make_unique<optim::DistributedOptimizer>(
        agent_, table.remote_parameters(), optimizer_options(options_), sharing());
    snapshot->checked([&] { restored_->load_state({resume.optimizer[0]}); });
    dense_values_ = std::move(resume.model);
    return {resume.progress, {resume.optimizer[1], resume.optimizer[2]}, snapshot->path};
  }

  /// Gives back the mean loss of the last epoch.
  std::optional<double> train(const RemoteTable& table, const Beginning& beginning) {
    table_ = table;
    backend_ = job::trainers_backend(agent_, 0, options_.trainers, job_);
    models::Dense dense = make_dense(options_, data_->info().classes, agent_.device());
    if (!dense_values_.empty()) {  // trainer 0's hold for all
      const at::NoGradGuard no_grad;
      dense->weight.copy_(dense_values_.at("fc.weight"));
      dense->bias.copy_(dense_values_.at("fc.bias"));
    }
    group_ = job::trainers_group(agent_, backend_);
    job::tell(group_, sink_);
    dense_.emplace(std::move(dense), group_.group);

    optimizer_ = std::make_unique<optim::DistributedOptimizer>(
        agent_, table.remote_parameters(), dense_->parameters(),
        optim::Rule{optimizer_options(options_), {}, 0}, sharing());
    restored_.reset();
    if (!beginning.dense_state.empty()) {
      job::naming_checkpoint(beginning.path,
                             [&] { optimizer_->load_local_state(beginning.dense_state); });
    }

    progress_ = beginning.progress;
    log_.resume_after(progress_.total);
    voted_at_ = progress_.total;
    while (!progress_.over(options_) && !stopped_) {
      if (log_.epoch() != progress_.epoch) log_.begin_epoch(progress_.epoch);
      train_step();
      progress_.count_step(data_->steps_per_epoch());
      if (progress_.step == 0) log_.end_epoch();
      stopped_ = stop_agreed();
      if (stopped_ || progress_.save_due(options_)) save();
    }
    job::check_averages(group_, agent_.device());
    log_.end_epoch();
    optimizer_.reset();
    if (log_.steps() == 0) return std::nullopt;  // the job was over
    return log_.last_loss();
  }

  /// The last call: this trainer's share of the test examples. Trainer 0 also hands out the
  /// parameters.
  job::Evaluation evaluate(bool stopped) {
    const base::TraceScope scope("evaluate");
    const at::NoGradGuard no_grad;
    job::Evaluation evaluation;
    const int64_t examples = stopped ? 0 : data_->info().test_examples;
    const int64_t first = examples * agent_.rank() / options_.trainers;
    const int64_t last = examples * (agent_.rank() + 1) / options_.trainers;
    for (int64_t i = first; i < last; i += kTestBatch) {
      const HybridBatch batch = data_->test_batch(i, std::min(i + kTestBatch, last));
      evaluate_batch(evaluation, dense_->module()->forward(looked_up(batch)),
                     rpc::placed(batch.targets, agent_.device()));
    }
    if (agent_.rank() == 0 && options_.on_finished) {
      options_.on_finished(model());
    }
    dense_.reset();
    group_.group.reset();
    backend_.reset();
    table_ = {};  // what others own is let go of before the shutdown
    return evaluation;
  }

  bool stopped() const { return stopped_; }
  /// How the gradients are averaged, on devices.
  const std::string& ddp() const { return group_.how; }
  const job::TrainLog& log() const { return log_; }
  std::string last_saved() const { return checkpoints_ ? checkpoints_->last_saved() : ""; }

 private:
  optim::Sharing sharing() const {
    return job::sharing_by_mode(options_.mode, options_.trainers, agent_.rank());
  }

  at::Tensor looked_up(const HybridBatch& batch) const {
    return rpc::placed(table_.forward(batch.indices, batch.offsets), agent_.device());
  }

  /// On the CPU.
  data::NamedTensors model() {
    data::NamedTensors all = data::on_host(
        {{"fc.weight", dense_->module()->weight}, {"fc.bias", dense_->module()->bias}});
    all["embedding.weight"] = table_.rref().rpc_sync<&models::EmbeddingTable::weight>();
    return all;
  }

  void train_step() {
    const base::TraceScope scope("step", "step", progress_.total);
    const HybridBatch batch = data_->batch(agent_.rank(), progress_.epoch, progress_.step);
    const at::Tensor targets = rpc::placed(batch.targets, agent_.device());
    autograd::Context context(agent_);
    const at::Tensor embedded = looked_up(batch);
    const at::Tensor scores = base::traced("forward", [&] { return dense_->forward(embedded); });
    const at::Tensor loss =
        base::traced("loss", [&] { return at::cross_entropy_loss(scores, targets); });
    const double value = job::checked_loss(loss, progress_.epoch, progress_.step + 1);
    autograd::backward(context, {loss});
    optimizer_->step(context);
    log_.step(value, batch.targets.numel());
  }

  /// Whether any rank was told to end: the same on all trainers, as they have to stop together.
  bool stop_agreed() {
    if (options_.checkpoint.dir.empty()) return false;
    if (progress_.total < next_vote_ && !progress_.save_due(options_)) return false;
    bool stop = stop_.requested();
    const int ranks = hybrid_world_size(options_);
    if (agent_.rank() == 0) {
      for (int other = options_.trainers; other < ranks; ++other) {
        stop = agent_.rpc_sync<&stop_requested>(other) || stop;
      }
    }
    // Together with the number of steps until the next look, by the pace of the slowest.
    const double elapsed = base::seconds_since(last_vote_);
    const auto pace = static_cast<double>(progress_.total - voted_at_) / std::max(elapsed, 1e-6);
    const auto wanted = static_cast<int64_t>(std::clamp(pace * kStopInterval_s, 1.0, 1e6));
    // No more than twice as far as the last time: steps may come to take longer.
    const int64_t steps = std::min(wanted, 2 * std::max<int64_t>(next_vote_ - voted_at_, 1));
    at::Tensor votes = at::tensor({stop ? int64_t{1} : 0, -steps}, at::kLong);
    backend_->allreduce(votes, collective::Backend::ReduceOp::MAX).wait();
    last_vote_ = base::Clock::now();
    voted_at_ = progress_.total;
    next_vote_ = voted_at_ - votes[1].item<int64_t>();
    if (votes[0].item<int64_t>() == 0) return false;
    if (agent_.rank() == 0) {
      for (int other = 0; other < ranks; ++other) agent_.rpc_sync<&request_stop>(other);
    }
    return true;
  }

  /// All wait while trainer 0 saves, so that what it saves is of one step.
  void save() {
    constexpr std::chrono::milliseconds kUntilLost{0};
    job::check_averages(group_, agent_.device());
    backend_->enter_barrier(kUntilLost).wait();
    if (agent_.rank() == 0) {
      checkpoints_->save(
          hybrid_snapshot(options_, data_->info(), progress_, model(), optimizer_->state()));
    }
    backend_->enter_barrier(kUntilLost).wait();
  }

  rpc::Agent& agent_;
  const HybridOptions options_;
  const job::Job& job_;
  job::EventSink& sink_;
  const job::StopSignal& stop_;
  job::TrainLog log_;
  std::optional<HybridData> data_;
  c10::intrusive_ptr<collective::Backend> backend_;
  std::optional<DataParallelDense> dense_;
  job::TrainersGroup group_;
  RemoteTable table_;
  std::unique_ptr<optim::DistributedOptimizer> optimizer_;
  HybridProgress progress_;
  bool stopped_ = false;
  base::TimePoint last_vote_ = base::Clock::now();
  int64_t voted_at_ = 0;
  int64_t next_vote_ = 0;
  std::optional<job::Checkpoints> checkpoints_;            // trainer 0's
  std::unique_ptr<optim::DistributedOptimizer> restored_;  // keeps the table's state until train()
  data::NamedTensors dense_values_;
};

// The functions that the master calls on the trainers.
HybridDataInfo load(rpc::CallContext& call) { return call.agent.local<Trainer>().load(); }
Beginning restore(rpc::CallContext& call, const RemoteTable& table) {
  return call.agent.local<Trainer>().restore(table);
}
std::optional<double> train(rpc::CallContext& call, const RemoteTable& table,
                            const Beginning& beginning) {
  return call.agent.local<Trainer>().train(table, beginning);
}
bool trained_until_stopped(rpc::CallContext& call) { return call.agent.local<Trainer>().stopped(); }
job::Evaluation evaluate(rpc::CallContext& call, bool stopped) {
  return call.agent.local<Trainer>().evaluate(stopped);
}

bool end_on_all(rpc::Agent& agent, const HybridOptions& options, bool stopped) {
  std::vector<base::Future<bool>> ending;
  for (int rank = 0; rank < hybrid_world_size(options); ++rank) {
    ending.push_back(agent.rpc_async<&end_training>(rank, stopped));
  }
  base::wait_all(ending);
  return std::any_of(ending.begin(), ending.end(), [](const auto& told) { return told.wait(); });
}

job::Outcome run_master(rpc::Agent& agent, const HybridOptions& options, job::EventSink& sink) {
  // Trainer 0 reads first, so that a bad file is reported once.
  const HybridDataInfo data = agent.rpc_sync<&load>(rpc::To(0).without_deadline());
  std::vector<base::Future<HybridDataInfo>> others;
  for (int t = 1; t < options.trainers; ++t) {
    others.push_back(agent.rpc_async<&load>(rpc::To(t).without_deadline()));
  }
  base::wait_all(others);
  for (size_t i = 0; i < others.size(); ++i) {
    if (!(others[i].wait() == data)) job::refuse_other_data(static_cast<int>(i) + 1, "the files");
  }

  const int server = agent.worker("ps").rank;
  const RemoteTable table(agent, server, data.rows, options.embedding_dim, embedding_range(options),
                          options.seed, agent.device_of(server));
  const auto beginning = agent.rpc_sync<&restore>(rpc::To(0).without_deadline(), table);
  if (!options.checkpoint.dir.empty()) {
    std::vector<base::Future<void>> heeding;
    for (int rank = 0; rank < hybrid_world_size(options); ++rank) {
      heeding.push_back(agent.rpc_async<&heed_stop>(rank));
    }
    base::wait_all(heeding);
  }
  std::vector<base::Future<std::optional<double>>> training;
  for (int t = 0; t < options.trainers; ++t) {
    training.push_back(agent.rpc_async<&train>(rpc::To(t).without_deadline(), table, beginning));
  }
  base::wait_all(training);
  std::optional<double> loss_sum = 0;
  for (const auto& trained : training) {
    const std::optional<double> loss = trained.wait();
    loss_sum = loss && loss_sum ? std::optional(*loss + *loss_sum) : std::nullopt;
  }

  bool stopped = !options.checkpoint.dir.empty() && agent.rpc_sync<&trained_until_stopped>(0);
  if (end_on_all(agent, options, stopped) && !stopped) {
    stopped = end_on_all(agent, options, true);  // one came after the last look
  }
  std::vector<base::Future<job::Evaluation>> evaluating;
  for (int t = 0; t < options.trainers; ++t) {
    evaluating.push_back(agent.rpc_async<&evaluate>(rpc::To(t).without_deadline(), stopped));
  }
  base::wait_all(evaluating);
  job::Evaluation total;
  for (const auto& evaluation : evaluating) total.add(evaluation.wait());
  job::Outcome outcome;
  outcome.fields["loss"] = loss_sum ? job::Json(*loss_sum / options.trainers) : job::Json();
  if (total.samples > 0) {
    sink.emit("eval", total.fields());
    outcome.fields["accuracy"] = total.fields()["accuracy"];
  }
  return outcome;
}

std::vector<std::string> roles(const HybridOptions& options) {
  std::vector<std::string> names;
  for (int rank = 0; rank < hybrid_world_size(options); ++rank) {
    names.push_back(hybrid_role(options, rank));
  }
  return names;
}

}  // namespace

int hybrid_world_size(const HybridOptions& options) { return options.trainers + 2; }

std::string hybrid_role(const HybridOptions& options, int rank) {
  if (rank < options.trainers) return "trainer" + std::to_string(rank);
  return rank == options.trainers ? "master" : "ps";
}

job::Outcome run_hybrid(const HybridOptions& own, const job::Job& job,
                        const std::function<HybridOptions(const job::OptionMap&)>& adopt,
                        job::EventSink& sink) {
  job::Session session(job, roles(own), sink);
  rpc::Agent& agent = session.agent();
  nn::expose_module<models::EmbeddingTable>(agent, "EmbeddingTable");
  agent.expose<&models::EmbeddingTable::weight>("EmbeddingTable.weight");
  agent.expose<&models::EmbeddingTable::set_weight>("EmbeddingTable.set_weight");
  agent.expose<&load>("hybrid.load");
  agent.expose<&restore>("hybrid.restore");
  agent.expose<&heed_stop>("hybrid.heed_stop");
  agent.expose<&request_stop>("hybrid.request_stop");
  agent.expose<&trained_until_stopped>("hybrid.trained_until_stopped");
  agent.expose<&end_training>("hybrid.end_training");
  agent.expose<&stop_requested>("hybrid.stop_requested");
  agent.expose<&train>("hybrid.train");
  agent.expose<&evaluate>("hybrid.evaluate");

  HybridOptions options = own;
  std::shared_ptr<Trainer> trainer;
  job::Outcome outcome;
  const auto prepare = [&] {
    if (job.rank != 0) options = adopt(agent.job_options());
    options.on_finished = own.on_finished;
    agent.provide(job.stop);
    if (job.rank >= options.trainers) return;
    trainer = std::make_shared<Trainer>(agent, options, session.job(), sink);
    agent.provide(trainer);
  };
  const auto work = [&] {
    if (agent.name() == "master") outcome = run_master(agent, options, sink);
  };
  session.run(prepare, work, outcome);
  if (trainer) {
    outcome.fields["steps"] = trainer->log().steps();
    outcome.fields["train_s"] = trainer->log().train_s();
    if (!trainer->ddp().empty()) outcome.fields["ddp"] = trainer->ddp();
  }
  outcome.stopped = job.stop->requested();
  if (trainer) outcome.message = trainer->last_saved();
  if (agent.name() == "ps") outcome.fields["updates"] = session.updates();
  return outcome;
}

}  // namespace distrain::scenario
