// distrain ps: a ConvNet on a parameter server, trained by the other ranks.
//
// After PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework".

#include "distrain/scenario/ps.h"

#include <ATen/Functions.h>

#include "data.h"
#include "distrain/autograd/context.h"
#include "distrain/base/trace.h"
#include "distrain/job/served_job.h"
#include "distrain/job/train_log.h"
#include "distrain/job/trainers.h"
#include "distrain/models/conv_net.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/placed.h"
#include "host.h"

namespace distrain::scenario {

namespace {

optim::Sharing sharing(const PsOptions& options, int participant) {
  return job::sharing_by_mode(options.mode, options.trainers, participant, options.staleness);
}

/// What the trainers' requests work on, on rank 0.
class Server {
 public:
  Server(rpc::Agent& agent, const PsOptions& options, const job::Job& job, job::EventSink& sink)
      : agent_(agent), options_(options), devices_(job.devices), host_(options, job, sink) {}

  /// The first request builds the model.
  rpc::RRef<models::ConvNet> attach(int trainer, const PsDataInfo& data) {
    std::lock_guard lock(mutex_);
    if (!host_.started()) build(data);
    if (!(host_.data() == data)) {
      job::refuse_other_data(trainer + 1, "the files, --mean and --std");
    }
    return agent_.make_rref(host_.model());
  }

  PsHost& host() { return host_; }

 private:
  void build(const PsDataInfo& data) {
    auto model = std::make_shared<models::ConvNet>(options_.seed, devices_);
    std::vector<rpc::RRef<at::Tensor>> parameters;
    for (const at::Tensor& p : model->parameters()) parameters.push_back(agent_.make_rref(p));
    const auto optimizer = std::make_shared<optim::DistributedOptimizer>(
        agent_, parameters, optimizer_options(options_),
        sharing(options_, optim::Sharing::kOnlooker));
    host_.start(std::move(model),
                {[optimizer] { return optimizer->state(); },
                 [optimizer](const auto& state) { optimizer->load_state(state); }},
                data);
  }

  rpc::Agent& agent_;
  const PsOptions options_;
  const std::vector<c10::Device> devices_;
  std::mutex mutex_;
  PsHost host_;
};

// What the trainers call on the server.
rpc::RRef<models::ConvNet> attach(rpc::CallContext& call, const PsDataInfo& data) {
  return call.agent.local<Server>().attach(call.caller.rank - 1, data);
}
int64_t resumed_at(rpc::CallContext& call) {
  return call.agent.local<Server>().host().resumed_at();
}
base::Future<job::Task> next(rpc::CallContext& call, bool stop) {
  return call.agent.local<Server>().host().next(call.caller.rank - 1, stop);
}
void report(rpc::CallContext& call, const PsReport& report) {
  call.agent.local<Server>().host().report(report);
}

class Trainer {
 public:
  Trainer(rpc::Agent& agent, const PsOptions& options, const job::Job& job, job::EventSink& sink)
      : agent_(agent),
        options_(options),
        stop_(*job.stop),
        log_(options.log_interval, sink),
        data_(options),
        model_(agent.rpc_sync<&attach>(job::kServer, data_.info())),
        optimizer_(agent, model_.rpc_sync<&models::ConvNet::parameter_rrefs>(),
                   optimizer_options(options), sharing(options, agent.rank() - 1)) {
    log_.resume_after(agent.rpc_sync<&resumed_at>(job::kServer));
  }

  /// Gives back whether the job was stopped before its time.
  bool run() {
    for (;;) {
      const job::Task task =
          agent_.rpc_sync<&next>(rpc::To(job::kServer).without_deadline(), stop_.requested());
      if (task.kind == job::Task::Kind::kTrain) train(task);
      if (task.kind == job::Task::Kind::kEvaluate) evaluate();
      if (task.kind != job::Task::Kind::kEnd) continue;
      log_.end_epoch();
      stop_.disarm(task.stopped);
      return stop_.requested();
    }
  }

  void add_to(job::Outcome& outcome) const {
    outcome.fields["steps"] = log_.steps();
    outcome.fields["train_s"] = log_.train_s();
  }

 private:
  void train(const job::Task& task) {
    const base::TraceScope scope("step", "step", log_.steps());
    if (log_.epoch() != task.epoch) log_.begin_epoch(task.epoch);
    const ImageBatch batch = data_.batch(task);
    const at::Tensor targets = rpc::placed(batch.targets, agent_.device());
    autograd::Context context(agent_);
    const models::PsForward forward = model_.rpc_sync<&models::ConvNet::forward_training>(
        batch.images, dropout_key(options_, task));
    const at::Tensor scores = rpc::placed(forward.scores, agent_.device());
    const at::Tensor loss = base::traced("loss", [&] { return at::nll_loss(scores, targets); });
    const double value = job::checked_loss(loss, task.epoch, task.step + 1);
    autograd::backward(context, {loss});
    if (options_.verify_grads) verify(context.id());
    const uint64_t updates = optimizer_.step(context);
    // In sync mode one update is that of all; otherwise those between the pass and its update are
    // others'.
    const uint64_t delay = updates - forward.version - 1;
    staleness_ = std::max(staleness_, forward.staleness);
    log_.step(value, batch.targets.numel(),
              {{"staleness", forward.staleness}, {"version", forward.version}, {"delay", delay}});
  }

  /// The tutorial's check: the gradients of this step are on the server.
  void verify(uint64_t context) {
    const auto gradients = model_.rpc_sync<&models::ConvNet::gradients>(context);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) {
        if (gradients[i].isfinite().all().item<bool>()) continue;
        throw base::Exception(base::ErrorKind::kNotFinite,
                              "the gradient of " + models::ConvNet::names()[i] +
                                  " is not finite: try a smaller --lr");
      }
      throw base::Exception(base::Error{
          base::ErrorKind::kInternal,
          "no gradient of " + models::ConvNet::names()[i] + " arrived on the parameter server",
          agent_.rank(), "verify-grads"});
    }
  }

  void evaluate() {
    PsReport mine;
    mine.steps = log_.epoch_steps();
    log_.end_epoch();
    mine.loss = log_.last_loss();
    mine.staleness = staleness_;
    mine.evaluation = evaluate_share(
        data_, agent_.rank() - 1, options_.trainers, [this](const at::Tensor& images) {
          return rpc::placed(model_.rpc_sync<&models::ConvNet::forward_evaluating>(images),
                             agent_.device());
        });
    agent_.rpc_sync<&report>(job::kServer, mine);
  }

  rpc::Agent& agent_;
  const PsOptions options_;
  job::StopSignal& stop_;
  job::TrainLog log_;
  PsData data_;
  rpc::RRef<models::ConvNet> model_;
  optim::DistributedOptimizer optimizer_;
  int64_t staleness_ = 0;
};

}  // namespace

int ps_world_size(const PsOptions& options) { return options.trainers + 1; }

std::string ps_role(int rank) {
  return rank == job::kServer ? "parameter_server" : "trainer" + std::to_string(rank);
}

job::Outcome run_ps(const PsOptions& own, const job::Job& job,
                    const std::function<PsOptions(const job::OptionMap&)>& adopt,
                    job::EventSink& sink) {
  std::vector<std::string> names;
  for (int rank = 0; rank < ps_world_size(own); ++rank) names.push_back(ps_role(rank));
  const auto expose = [](rpc::Agent& agent) {
    models::ConvNet::expose(agent);
    agent.expose<&attach>("ps.attach");
    agent.expose<&resumed_at>("ps.resumed_at");
    agent.expose<&next>("ps.next");
    agent.expose<&report>("ps.report");
  };
  return job::run_served_job<Server, Trainer>(own, job, adopt, sink, std::move(names), expose);
}

}  // namespace distrain::scenario
