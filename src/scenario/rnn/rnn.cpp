// distrain rnn: a word language model, embedding and decoder on a parameter server, LSTM on the
// trainers.
//
// After PyTorch's tutorial "Getting Started with Distributed RPC Framework" (its second part) and
// PyTorch's word language model.

#include "rnn.h"

#include <mutex>
#include <optional>

#include "data.h"
#include "distrain/autograd/context.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/models/language_model.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/placed.h"
#include "language_model.h"

namespace distrain::scenario {

namespace {

/// On the server: the two ends of the model, which the first trainer that asks for them has made.
struct Server {
  std::mutex mutex;
  std::shared_ptr<models::WordEmbedding> embedding;
  std::shared_ptr<models::Decoder> decoder;
};

/// What a trainer needs of them.
struct RemoteEnds {
  rpc::RRef<models::WordEmbedding> embedding;
  rpc::RRef<models::Decoder> decoder;
  std::vector<rpc::RRef<at::Tensor>> parameters;  ///< in the order of the optimizer
  static constexpr auto kFields =
      std::tuple(&RemoteEnds::embedding, &RemoteEnds::decoder, &RemoteEnds::parameters);
};

RemoteEnds ends_of_job(rpc::CallContext& call, int64_t words, int64_t emsize, int64_t nhid,
                       uint64_t seed) {
  rpc::Agent& agent = call.agent;
  auto& server = agent.local<Server>();
  std::lock_guard lock(server.mutex);
  if (!server.embedding) {
    server.embedding = std::make_shared<models::WordEmbedding>(words, emsize, seed, agent.device());
    server.decoder = std::make_shared<models::Decoder>(words, nhid, seed, agent.device());
  }
  RemoteEnds ends{agent.make_rref(server.embedding), agent.make_rref(server.decoder), {}};
  for (const auto& [name, parameter] : in_order(*server.embedding, *server.decoder)) {
    ends.parameters.push_back(agent.make_rref(parameter));
  }
  return ends;
}

LanguageModel::Ends over_rpc(rpc::Agent& agent, const RemoteEnds& remote) {
  const auto sent = [&agent, server = remote.decoder.owner()](const at::Tensor& t) {
    return rpc::for_rank(agent, server, t);
  };
  return {[&agent, embedding = remote.embedding](const at::Tensor& words) {
            return rpc::placed(embedding.rpc_sync<&models::WordEmbedding::forward>(words),
                               agent.device());
          },
          [sent, decoder = remote.decoder](const at::Tensor& hidden, const at::Tensor& targets) {
            return decoder.rpc_sync<&models::Decoder::loss>(sent(hidden), targets);
          },
          [sent, decoder = remote.decoder](const at::Tensor& hidden) {
            return decoder.rpc_sync<&models::Decoder::scores>(sent(hidden));
          },
          {}};
}

}  // namespace

void expose_rnn(rpc::Agent& agent) {
  using models::Decoder;
  using models::WordEmbedding;
  agent.provide(std::make_shared<Server>());
  agent.expose<&ends_of_job>("rnn.ends");
  agent.expose<&WordEmbedding::forward>("WordEmbedding.forward");
  agent.expose<&Decoder::loss>("Decoder.loss");
  agent.expose<&Decoder::scores>("Decoder.scores");
  job::expose_parameters<WordEmbedding>(agent, "WordEmbedding");
  job::expose_parameters<Decoder>(agent, "Decoder");
}

void train_rnn(job::Rank& rank, const RnnOptions& options) {
  rpc::Agent& agent = rank.agent();
  const RnnData data(options);
  const RemoteEnds remote =
      agent.rpc_sync<&ends_of_job>("ps", data.words(), options.emsize, options.nhid, options.seed);
  LanguageModel::Ends ends = over_rpc(agent, remote);
  models::Lstm lstm = make_lstm(options, rank.device());
  std::optional<ddp::DistributedDataParallel<models::Lstm>> parallel;
  if (rank.count() > 1) {
    parallel.emplace(lstm, rank.group("trainer"));
    ends.lstm = [&](const at::Tensor& embedded, models::LstmState& state, nn::Dropout& dropout) {
      return parallel->forward(embedded, state, dropout);
    };
  }
  LanguageModel model(options, lstm, ends);
  std::vector<at::Tensor> own;
  for (const auto& [name, parameter] : lstm->named()) own.push_back(parameter);
  optim::DistributedOptimizer optimizer(agent, remote.parameters, own, options.rule(),
                                        options.sharing(rank.index()));

  job::Training training(rank, data.plan());
  data.agree(training);
  training.keep("encoder", remote.embedding);
  training.keep("decoder", remote.decoder);
  training.keep("rnn", job::part_of(lstm->named()));
  training.keep(optimizer, parameter_names(lstm));
  training.keep("", part_of_states([&](int) -> LanguageModel& { return model; }));
  training.evaluate_epochs([&](const job::Share& share) { return model.evaluate(data, share); });
  training.run([&](const job::Step& step) {
    const WordBatch batch = data.batch(step.shard, step.number);
    autograd::Context context(agent);
    const at::Tensor loss = model.training_loss(batch, step);
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, batch.targets.numel()};
  });
  if (rank.index() == 0 && !training.stopped()) model.tell_sample(data, rank.sink());
}

}  // namespace distrain::scenario
