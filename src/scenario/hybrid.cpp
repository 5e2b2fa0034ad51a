// distrain hybrid: an EmbeddingBag on a parameter server, a Linear layer under DDP on the trainers.
//
// After PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework".

#include "distrain/scenario/hybrid.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/autograd/context.h"
#include "distrain/collective/backend.h"
#include "distrain/ddp/context_pass.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/nn/remote_module.h"
#include "distrain/optim/distributed_optimizer.h"
#include "hybrid_data.h"
#include "hybrid_model.h"
#include "session.h"

namespace distrain::scenario {

namespace {

using RemoteTable = nn::RemoteModule<EmbeddingTable>;
using Dense = ddp::DistributedDataParallel<torch::nn::Linear>;

constexpr uint16_t kCollectiveChannel = 2;
constexpr int64_t kTestBatch = 256;

/// What a trainer's functions work on. Called by the master, one after the other.
class Trainer {
 public:
  Trainer(rpc::Agent& agent, const HybridOptions& options, double timeout_s, EventSink& sink)
      : agent_(agent), options_(options), timeout_s_(timeout_s), log_(options_, sink) {}

  HybridDataInfo load() {
    data_.emplace(options_);
    return data_->info();
  }

  /// Gives back the mean loss of the last epoch.
  double train(const RemoteTable& table) {
    table_ = table;
    std::vector<int> trainers;
    for (int rank = 0; rank < options_.trainers; ++rank) trainers.push_back(rank);
    collective::Backend::Settings settings;
    settings.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s_ * 1000));
    auto backend = c10::make_intrusive<collective::Backend>(
        agent_.open_channel(kCollectiveChannel), agent_.executor(),
        collective::Group{0, std::move(trainers)}, settings);
    dense_.emplace(make_dense(options_, data_->info().classes), std::move(backend));

    std::vector<rpc::RRef<at::Tensor>> parameters = table.remote_parameters();
    for (const at::Tensor& parameter : dense_->parameters()) {
      parameters.push_back(agent_.make_rref(parameter));
    }
    optim::Sharing sharing;
    sharing.mode =
        options_.mode == "sync" ? optim::Sharing::Mode::kSync : optim::Sharing::Mode::kAsync;
    sharing.participants = options_.trainers;
    sharing.participant = agent_.rank();
    optim::DistributedOptimizer optimizer(agent_, parameters, optimizer_options(options_), sharing);

    const int64_t steps = data_->steps_per_epoch();
    for (int64_t epoch = 1; epoch <= options_.epochs; ++epoch) {
      log_.begin_epoch(epoch);
      for (int64_t step = 0; step < steps; ++step) {
        const HybridBatch batch = data_->batch(agent_.rank(), epoch, step);
        autograd::Context context(agent_);
        const at::Tensor embedded = table.forward(batch.indices, batch.offsets);
        const at::Tensor loss = at::cross_entropy_loss(dense_->forward(embedded), batch.targets);
        const double value = checked_loss(loss, epoch, step + 1);
        ddp::ContextPass pass(context);
        dense_->attach(pass);
        autograd::backward(context, {loss});
        optimizer.step(context);
        log_.step(value, batch.targets.numel());
      }
      log_.end_epoch();
    }
    return log_.last_loss();
  }

  /// The last call: this trainer's share of the test examples. Trainer 0 also hands out the
  /// parameters.
  Evaluation evaluate() {
    const at::NoGradGuard no_grad;
    Evaluation evaluation;
    const int64_t examples = data_->info().test_examples;
    const int64_t first = examples * agent_.rank() / options_.trainers;
    const int64_t last = examples * (agent_.rank() + 1) / options_.trainers;
    for (int64_t i = first; i < last; i += kTestBatch) {
      const HybridBatch batch = data_->test_batch(i, std::min(i + kTestBatch, last));
      evaluation.add(dense_->module()->forward(table_.forward(batch.indices, batch.offsets)),
                     batch.targets);
    }
    if (agent_.rank() == 0 && options_.on_finished) {
      options_.on_finished({{"embedding.weight", table_.remote_parameters()[0].to_here()},
                            {"fc.weight", dense_->module()->weight},
                            {"fc.bias", dense_->module()->bias}});
    }
    dense_.reset();
    table_ = {};  // what others own is let go of before the shutdown
    return evaluation;
  }

  const TrainLog& log() const { return log_; }

 private:
  rpc::Agent& agent_;
  const HybridOptions options_;
  const double timeout_s_;
  TrainLog log_;
  std::optional<HybridData> data_;
  std::optional<Dense> dense_;
  RemoteTable table_;
};

// The functions that the master calls on the trainers.
HybridDataInfo load(rpc::CallContext& call) { return call.agent.local<Trainer>().load(); }
double train(rpc::CallContext& call, const RemoteTable& table) {
  return call.agent.local<Trainer>().train(table);
}
Evaluation evaluate(rpc::CallContext& call) { return call.agent.local<Trainer>().evaluate(); }

void check_same_data(const HybridDataInfo& own, const HybridDataInfo& first, int trainer) {
  if (own.hash == first.hash && own.rows == first.rows && own.classes == first.classes) return;
  throw base::Exception(
      base::Error{base::ErrorKind::kBadData,
                  "trainer " + std::to_string(trainer) +
                      " has read other data than trainer 0: the files must be the same",
                  trainer, "load"});
}

Outcome run_master(rpc::Agent& agent, const HybridOptions& options, EventSink& sink) {
  // Trainer 0 reads first, so that a bad file is reported once.
  const HybridDataInfo data = agent.rpc_sync<&load>(rpc::To(0).without_deadline());
  std::vector<base::Future<HybridDataInfo>> others;
  for (int t = 1; t < options.trainers; ++t) {
    others.push_back(agent.rpc_async<&load>(rpc::To(t).without_deadline()));
  }
  base::wait_all(others);
  for (size_t i = 0; i < others.size(); ++i) {
    check_same_data(others[i].wait(), data, static_cast<int>(i) + 1);
  }

  const RemoteTable table(agent, "ps", data.rows, options.embedding_dim, embedding_range(options),
                          options.seed);
  std::vector<base::Future<double>> training;
  for (int t = 0; t < options.trainers; ++t) {
    training.push_back(agent.rpc_async<&train>(rpc::To(t).without_deadline(), table));
  }
  base::wait_all(training);
  double loss_sum = 0;
  for (const auto& trained : training) loss_sum += trained.wait();

  std::vector<base::Future<Evaluation>> evaluating;
  for (int t = 0; t < options.trainers; ++t) {
    evaluating.push_back(agent.rpc_async<&evaluate>(rpc::To(t).without_deadline()));
  }
  base::wait_all(evaluating);
  Evaluation total;
  for (const auto& evaluation : evaluating) total.add(evaluation.wait());
  Outcome outcome;
  outcome.fields["loss"] = loss_sum / options.trainers;
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

Outcome run_hybrid(const HybridOptions& own, const Job& job,
                   const std::function<HybridOptions(const OptionMap&)>& adopt, EventSink& sink) {
  Session session(job, roles(own), sink);
  rpc::Agent& agent = session.agent();
  nn::expose_module<EmbeddingTable>(agent, "EmbeddingTable");
  agent.expose<&load>("hybrid.load");
  agent.expose<&train>("hybrid.train");
  agent.expose<&evaluate>("hybrid.evaluate");

  HybridOptions options = own;
  std::shared_ptr<Trainer> trainer;
  Outcome outcome;
  const auto prepare = [&] {
    if (job.rank != 0) options = adopt(agent.job_options());
    options.on_finished = own.on_finished;
    if (job.rank >= options.trainers) return;
    trainer = std::make_shared<Trainer>(agent, options, job.rpc_timeout_s, sink);
    agent.provide(trainer);
  };
  const auto work = [&] {
    if (agent.name() == "master") outcome = run_master(agent, options, sink);
  };
  session.run(prepare, work, outcome);
  if (trainer) {
    outcome.fields["steps"] = trainer->log().steps();
    outcome.fields["train_s"] = trainer->log().train_s();
  }
  if (agent.name() == "ps") outcome.fields["updates"] = session.updates();
  return outcome;
}

}  // namespace distrain::scenario
