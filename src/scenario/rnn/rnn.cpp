// distrain rnn: a word language model, embedding and decoder on a parameter server, LSTM on the
// trainers.
//
// After PyTorch's tutorial "Getting Started with Distributed RPC Framework" (its second part) and
// PyTorch's word language model.

#include "distrain/scenario/rnn.h"

#include "data.h"
#include "distrain/autograd/context.h"
#include "distrain/base/trace.h"
#include "distrain/data/named_tensors.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/job/served_job.h"
#include "distrain/job/train_log.h"
#include "distrain/job/trainers.h"
#include "distrain/models/language_model.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/placed.h"
#include "host.h"
#include "language_model.h"

namespace distrain::scenario {

namespace {

using DataParallelLstm = ddp::DistributedDataParallel<models::Lstm>;

optim::Sharing sharing(const RnnOptions& options, int participant) {
  return job::sharing_by_mode(options.mode, options.trainers, participant);
}

/// What a trainer needs of the server.
struct RemoteEnds {
  rpc::RRef<models::WordEmbedding> embedding;
  rpc::RRef<models::Decoder> decoder;
  std::vector<rpc::RRef<at::Tensor>> parameters;  ///< in the order of RnnHost::parameter_names()
  std::optional<RnnTrainerState> resumed;
  static constexpr auto kFields = std::tuple(&RemoteEnds::embedding, &RemoteEnds::decoder,
                                             &RemoteEnds::parameters, &RemoteEnds::resumed);
};

/// What the trainers' requests work on, on rank 0.
class Server {
 public:
  Server(rpc::Agent& agent, const RnnOptions& options, const job::Job& job, job::EventSink& sink)
      : agent_(agent), options_(options), host_(options, job, sink) {}

  /// The first request builds the model.
  RemoteEnds attach(int trainer, const RnnDataInfo& data) {
    std::lock_guard lock(mutex_);
    if (!host_.started()) build(data);
    if (!(host_.data() == data)) job::refuse_other_data(trainer + 1, "the files");
    return {agent_.make_rref(host_.embedding()), agent_.make_rref(host_.decoder()), parameters(),
            host_.resumed(trainer)};
  }

  RnnHost& host() { return host_; }

 private:
  void build(const RnnDataInfo& data) {
    auto embedding = std::make_shared<models::WordEmbedding>(data.words, options_.emsize,
                                                             options_.seed, agent_.device());
    auto decoder = std::make_shared<models::Decoder>(data.words, options_.nhid, options_.seed,
                                                     agent_.device());
    host_.build(std::move(embedding), std::move(decoder), data);
    const auto optimizer = std::make_shared<optim::DistributedOptimizer>(
        agent_, parameters(), optimizer_options(options_),
        sharing(options_, optim::Sharing::kOnlooker));
    host_.start({[optimizer] { return optimizer->state(); },
                 [optimizer](const auto& state) { optimizer->load_state(state); }});
  }

  std::vector<rpc::RRef<at::Tensor>> parameters() {
    const data::NamedTensors named = host_.named_parameters();
    std::vector<rpc::RRef<at::Tensor>> parameters;
    for (const std::string& name : RnnHost::parameter_names()) {
      parameters.push_back(agent_.make_rref(named.at(name)));
    }
    return parameters;
  }

  rpc::Agent& agent_;
  const RnnOptions options_;
  std::mutex mutex_;
  RnnHost host_;
};

// What the trainers call on the server.
RemoteEnds attach(rpc::CallContext& call, const RnnDataInfo& data) {
  return call.agent.local<Server>().attach(call.caller.rank - 1, data);
}
base::Future<RnnTask> next(rpc::CallContext& call, bool stop) {
  return call.agent.local<Server>().host().next(call.caller.rank - 1, stop,
                                                call.agent.inline_executor());
}
void report(rpc::CallContext& call, const RnnReport& report) {
  call.agent.local<Server>().host().report(report);
}
void contribute(rpc::CallContext& call, const RnnTrainerState& state) {
  call.agent.local<Server>().host().contribute(call.caller.rank - 1, state);
}

class Trainer {
 public:
  Trainer(rpc::Agent& agent, const RnnOptions& options, const job::Job& job, job::EventSink& sink)
      : agent_(agent),
        options_(options),
        number_(agent.rank() - 1),
        stop_(*job.stop),
        sink_(sink),
        log_(options.log_interval, sink, job::TrainLog::Unit::kWords),
        data_(options),
        server_(agent.rpc_sync<&attach>(job::kServer, data_.info())),
        lstm_(make_lstm(options, agent.device())),
        model_(options, lstm_, ends()) {
    if (server_.resumed) take(*server_.resumed);
    if (options.trainers > 1) {
      group_ = job::trainers_group(agent, job::trainers_backend(agent, 1, options.trainers, job));
      job::tell(group_, sink_);
      data_parallel_.emplace(lstm_, group_.group);
    }
    std::vector<at::Tensor> own;
    for (const auto& [name, parameter] : lstm_->named()) {
      lstm_names_.push_back(name);
      own.push_back(parameter);
    }
    optimizer_.emplace(agent, server_.parameters, own,
                       optim::Rule{optimizer_options(options), {}, options.clip},
                       sharing(options, number_));
    if (server_.resumed) {
      job::naming_checkpoint(server_.resumed->path, [&] {
        optimizer_->load_local_state(job::unflatten(lstm_names_, server_.resumed->optimizer));
      });
    }
    server_.resumed.reset();
  }

  /// Gives back whether the job was stopped before its time.
  bool run() {
    for (;;) {
      const auto [task, lr] =
          agent_.rpc_sync<&next>(rpc::To(job::kServer).without_deadline(), stop_.requested());
      if (task.kind == job::Task::Kind::kTrain) {
        train(task, lr);
        continue;
      }
      if (data_parallel_) job::check_averages(group_, agent_.device());
      if (task.kind == job::Task::Kind::kEvaluate) evaluate();
      if (task.kind == job::Task::Kind::kSave) save();
      if (task.kind != job::Task::Kind::kEnd) continue;
      log_.end_epoch();
      stop_.disarm(task.stopped);
      const bool stopped = stop_.requested();
      if (!stopped) generate();
      return stopped;
    }
  }

  void add_to(job::Outcome& outcome) const {
    outcome.fields["steps"] = log_.steps();
    outcome.fields["train_s"] = log_.train_s();
    if (!group_.how.empty()) outcome.fields["ddp"] = group_.how;
    // All trainers go at one pace: the first speaks for them.
    if (number_ == 0 && log_.train_s() > 0) {
      outcome.fields["words_per_s"] =
          static_cast<double>(words_ * options_.trainers) / log_.train_s();
    }
  }

 private:
  LanguageModel::Ends ends() {
    const auto sent = [this](const at::Tensor& t) {
      return rpc::for_rank(agent_, job::kServer, t);
    };
    return {[this](const at::Tensor& words) {
              return rpc::placed(server_.embedding.rpc_sync<&models::WordEmbedding::forward>(words),
                                 agent_.device());
            },
            [this, sent](const at::Tensor& hidden, const at::Tensor& targets) {
              return server_.decoder.rpc_sync<&models::Decoder::loss>(sent(hidden), targets);
            },
            [this, sent](const at::Tensor& hidden) {
              return server_.decoder.rpc_sync<&models::Decoder::scores>(sent(hidden));
            },
            [this](const at::Tensor& embedded, models::LstmState& state, models::Dropout& dropout) {
              return data_parallel_ ? data_parallel_->forward(embedded, state, dropout)
                                    : lstm_->forward(embedded, state, dropout);
            }};
  }

  void train(const job::Task& task, double lr) {
    const base::TraceScope scope("step", "step", log_.steps());
    if (log_.epoch() != task.epoch) log_.begin_epoch(task.epoch);
    optimizer_->set_lr_factor(lr_factor(options_, lr));
    const WordBatch batch = data_.batch(number_, task.step);
    autograd::Context context(agent_);
    const at::Tensor loss = model_.training_loss(batch, task);
    const double value = job::checked_loss(loss, task.epoch, task.step + 1);
    autograd::backward(context, {loss});
    optimizer_->step(context);
    words_ += batch.targets.numel();
    log_.step(value, batch.targets.numel());
  }

  void evaluate() {
    RnnReport mine;
    mine.training.words = log_.epoch_samples();
    log_.end_epoch();
    mine.training.loss_sum = log_.last_loss() * static_cast<double>(mine.training.words);
    mine.validation = model_.evaluate(data_, number_);
    agent_.rpc_sync<&report>(job::kServer, mine);
  }

  void save() {
    RnnTrainerState mine;
    mine.state = model_.state().on(c10::kCPU);
    if (number_ == 0) {
      mine.lstm = data::on_host(lstm_->named());
      mine.optimizer = job::flatten(lstm_names_, optimizer_->local_state());
    }
    agent_.rpc_sync<&contribute>(job::kServer, mine);
  }

  void take(const RnnTrainerState& resumed) {
    log_.resume_after(resumed.steps);
    model_.state() = resumed.state.on(agent_.device());
    job::Snapshot snapshot;
    snapshot.path = resumed.path;
    snapshot.files["model"] = resumed.lstm;
    snapshot.copy_into("model", lstm_->named());
  }

  void generate() {
    if (number_ != 0 || options_.generate == 0 || options_.data.empty()) return;
    sink_.emit("text", {{"text", model_.generate(data_.vocabulary())}});
  }

  rpc::Agent& agent_;
  const RnnOptions options_;
  const int number_;  // of this trainer, from 0
  job::StopSignal& stop_;
  job::EventSink& sink_;
  job::TrainLog log_;
  RnnData data_;
  RemoteEnds server_;
  models::Lstm lstm_;
  std::vector<std::string> lstm_names_;
  LanguageModel model_;
  std::optional<DataParallelLstm> data_parallel_;
  job::TrainersGroup group_;
  std::optional<optim::DistributedOptimizer> optimizer_;
  int64_t words_ = 0;
};

}  // namespace

int rnn_world_size(const RnnOptions& options) { return options.trainers + 1; }

std::string rnn_role(int rank) {
  return rank == job::kServer ? "ps" : "trainer" + std::to_string(rank);
}

job::Outcome run_rnn(const RnnOptions& own, const job::Job& job,
                     const std::function<RnnOptions(const job::OptionMap&)>& adopt,
                     job::EventSink& sink) {
  std::vector<std::string> names;
  for (int rank = 0; rank < rnn_world_size(own); ++rank) names.push_back(rnn_role(rank));
  const auto expose = [](rpc::Agent& agent) {
    agent.expose<&models::WordEmbedding::forward>("WordEmbedding.forward");
    agent.expose<&models::Decoder::loss>("Decoder.loss");
    agent.expose<&models::Decoder::scores>("Decoder.scores");
    agent.expose<&attach>("rnn.attach");
    agent.expose<&next>("rnn.next");
    agent.expose<&report>("rnn.report");
    agent.expose<&contribute>("rnn.contribute");
  };
  return job::run_served_job<Server, Trainer>(own, job, adopt, sink, std::move(names), expose);
}

}  // namespace distrain::scenario
