// distrain rnn: a word language model, its embedding and decoder on a server, LSTM on trainers.
//
// After PyTorch's "Getting Started with Distributed RPC Framework" and its word language model.

#include "data.h"
#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/to_device.h"
#include "language_model.h"

namespace distrain::scenario {

namespace {

/// References to the ends of the model on the server.
struct RemoteEnds {
  rpc::RRef<WordEmbedding> embedding;
  rpc::RRef<Decoder> decoder;
  std::vector<rpc::RRef<at::Tensor>> parameters;  ///< in the order of the optimizer
  static constexpr auto kFields =
      std::tuple(&RemoteEnds::embedding, &RemoteEnds::decoder, &RemoteEnds::parameters);
};

/// On the server: returns the embedding and the decoder. The first call creates them.
RemoteEnds ends_of_job(rpc::CallContext& call, int64_t words, int64_t emsize, int64_t nhid,
                       uint64_t seed) {
  rpc::Agent& agent = call.agent;
  const auto embedding = agent.shared<WordEmbedding>(words, emsize, seed, agent.device());
  const auto decoder = agent.shared<Decoder>(words, nhid, seed, agent.device());
  RemoteEnds ends{agent.make_rref(embedding), agent.make_rref(decoder), {}};
  for (const auto& [name, parameter] : in_order(*embedding, *decoder)) {
    ends.parameters.push_back(agent.make_rref(parameter));
  }
  return ends;
}

LanguageModel::Ends over_rpc(rpc::Agent& agent, const RemoteEnds& remote) {
  const auto sent = [&agent, server = remote.decoder.owner()](const at::Tensor& t) {
    return rpc::for_rank(agent, server, t);
  };
  return {[&agent, embedding = remote.embedding](const at::Tensor& words) {
            return rpc::to_device(embedding.rpc_sync<&WordEmbedding::forward>(words),
                                  agent.device());
          },
          [sent, decoder = remote.decoder](const at::Tensor& hidden, const at::Tensor& targets) {
            return decoder.rpc_sync<&Decoder::loss>(sent(hidden), targets);
          },
          [sent, decoder = remote.decoder](const at::Tensor& hidden) {
            return decoder.rpc_sync<&Decoder::scores>(sent(hidden));
          }};
}

}  // namespace

void expose_rnn(rpc::Agent& agent) {
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
  LanguageModel model(options, rank.device(), over_rpc(agent, remote),
                      rank.count() > 1 ? &rank.group("trainer") : nullptr);
  LstmState state = model.lstm().zero_state(options.batch_size);
  std::vector<std::string> names = {"encoder.weight", "decoder.weight", "decoder.bias"};
  std::vector<at::Tensor> own;
  for (const auto& [name, parameter] : model.lstm_parameters()) {
    names.push_back(name);
    own.push_back(parameter);
  }
  optim::DistributedOptimizer optimizer(agent, remote.parameters, own, options.rule(),
                                        options.sharing(rank.index()));

  job::Training training(rank, data.plan());
  data.agree(training);
  training.keep("encoder", remote.embedding);
  training.keep("decoder", remote.decoder);
  training.keep("rnn", job::part_of(model.lstm_parameters()));
  training.keep(optimizer, names);
  training.keep("", job::part_of_each([&](int) { return named(state); }));
  model.evaluate_in(training, data);
  training.run([&](const job::Step& step) {
    const WordBatch batch = data.batch(step);
    autograd::Context context(agent);
    const at::Tensor loss = model.training_loss(batch, step, state);
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, batch.targets.numel()};
  });
  if (rank.index() == 0 && !training.stopped()) model.tell_sample(data, rank.sink());
}

}  // namespace distrain::scenario
