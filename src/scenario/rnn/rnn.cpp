// distrain rnn: a word language model, its embedding and decoder on a server, LSTM on trainers.
//
// After PyTorch's "Getting Started with Distributed RPC Framework" and its word language model.

#include "rnn.h"

#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

namespace {

/// Returns the server's parameters in the order in which the optimizer receives them.
optim::NamedParameters in_order(const WordEmbedding& embedding, const Decoder& decoder) {
  return {{"encoder.weight", embedding.named_parameters().at("encoder.weight")},
          {"decoder.weight", decoder.parameters()[0]},
          {"decoder.bias", decoder.parameters()[1]}};
}

rpc::NamedTensors named(const LstmState& state) {
  return {{"hidden", state.hidden}, {"cell", state.cell}};
}

/// References to the embedding and the decoder on the server.
struct RemoteEnds {
  rpc::RRef<WordEmbedding> embedding;
  rpc::RRef<Decoder> decoder;
  std::vector<rpc::RRef<at::Tensor>> parameters;  ///< in the order of the optimizer
  static constexpr auto kFields =
      std::tuple(&RemoteEnds::embedding, &RemoteEnds::decoder, &RemoteEnds::parameters);
};

/// Returns the server's embedding and decoder. The first call creates them.
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

/// Returns the result of trainer 0's scan_files() once it is known.
base::Future<RnnScan> scan_of_job(rpc::CallContext& call) {
  return call.agent.shared<base::Promise<RnnScan>>()->future();
}

/// Calls scan_files() on trainer 0, for all trainers.
RnnScan scan_once(job::Rank& rank, const RnnOptions& options) {
  if (rank.index() > 0 && !options.data.empty()) {
    return rank.agent().rpc_sync<&scan_of_job>(
        rpc::To(rank.roles().named(rank.role()).first).without_deadline());
  }
  RnnScan scan = scan_files(options);
  rank.agent().shared<base::Promise<RnnScan>>()->set(scan);
  return scan;
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

constexpr int64_t kLikeliest = 5;

struct WholeModel {
  WholeModel(const RnnOptions& options, int64_t words, c10::Device device)
      : embedding(words, options.emsize, options.seed, device),
        decoder(words, options.nhid, options.seed, device),
        middle(options, device,
               {[this](const at::Tensor& each) { return embedding.lookup(each); },
                [this](const at::Tensor& hidden, const at::Tensor& targets) {
                  return Decoder::loss_of(decoder.parameters(), hidden, targets);
                },
                [this](const at::Tensor& hidden) {
                  return Decoder::scores_of(decoder.parameters(), hidden);
                }}) {}
  WholeModel(const WholeModel&) = delete;

  rpc::NamedTensors parameters() const {
    rpc::NamedTensors all = middle.lstm_parameters();
    all.merge(embedding.named_parameters());
    all.merge(decoder.named_parameters());
    return all;
  }

  WordEmbedding embedding;
  Decoder decoder;
  LanguageModel middle;
};

job::Json likeliest(const at::Tensor& chances, const data::Vocabulary& vocabulary) {
  const auto [scores, words] = chances.topk(std::min(kLikeliest, chances.size(0)));
  job::Json fields{{"words", job::Json::array()}, {"scores", job::Json::array()}};
  for (int64_t i = 0; i < words.size(0); ++i) {
    fields["words"].push_back(std::string(vocabulary.word(words[i].item<int64_t>())));
    fields["scores"].push_back(scores[i].item<double>());
  }
  return fields;
}

}  // namespace

void expose_rnn(rpc::Agent& agent) {
  agent.expose<&ends_of_job>("rnn.ends");
  agent.expose<&scan_of_job>("rnn.scan");
  agent.expose<&WordEmbedding::forward>("WordEmbedding.forward");
  agent.expose<&Decoder::loss>("Decoder.loss");
  agent.expose<&Decoder::scores>("Decoder.scores");
  job::expose_parameters<WordEmbedding>(agent, "WordEmbedding");
  job::expose_parameters<Decoder>(agent, "Decoder");
}

void train_rnn(job::Rank& rank, const RnnOptions& options) {
  rpc::Agent& agent = rank.agent();
  const RnnData data(options, scan_once(rank, options));
  const job::Plan plan = data.plan();  // throws if there are too many columns for the text
  const RemoteEnds remote =
      agent.rpc_sync<&ends_of_job>("ps", data.words(), options.emsize, options.nhid, options.seed);
  LanguageModel model(options, rank.device(), over_rpc(agent, remote),
                      rank.count() > 1 ? &rank.group("trainer") : nullptr);
  LstmState state = model.lstm().zero_state(options.step_size());
  std::vector<std::string> names = {"encoder.weight", "decoder.weight", "decoder.bias"};
  std::vector<at::Tensor> own;
  for (const auto& [name, parameter] : model.lstm_parameters()) {
    names.push_back(name);
    own.push_back(parameter);
  }
  optim::DistributedOptimizer optimizer(agent, remote.parameters, own, options.rule(),
                                        options.sharing(rank.index()));

  job::Training training(rank, plan);
  data.agree(training);
  training.keep("encoder", remote.embedding);
  training.keep("decoder", remote.decoder);
  training.keep("rnn", job::part_of(model.lstm_parameters()));
  training.keep(optimizer, names);
  training.keep("", job::part_of_each([&](int) { return named(state); }));
  model.evaluate_in(training, data);
  training.run([&](const job::Step& step) {
    job::StepPasses passes(agent);
    job::Result result;
    for (job::Share part{0, options.accumulate}; part.index < part.count; ++part.index) {
      const WordBatch batch = data.batch(step, part);
      const auto adds_up = model.no_sync(!part.is_last());
      passes.begin();
      const at::Tensor loss = model.training_loss(batch, step, part, state);
      passes.backward(loss);
      result.add(loss, batch.targets.numel());
    }
    optimizer.step(passes.contexts());
    return result;
  });
  if (rank.index() == 0 && !training.stopped()) model.tell_sample(data, rank.sink());
}

void train_rnn_local(job::SingleProcess& local, const RnnOptions& options) {
  const RnnData data(options, scan_files(options));
  const job::Plan plan = data.plan();
  WholeModel whole(options, data.words(), local.device());
  LanguageModel& model = whole.middle;
  const rpc::NamedTensors lstm = model.lstm_parameters();
  job::SingleProcessOptimizer optimizer(options.rule(), options.mode,
                                        in_order(whole.embedding, whole.decoder),
                                        {lstm.begin(), lstm.end()});
  std::map<int, LstmState> states;  // by trainer
  for (int t = 0; t < options.trainers; ++t) {
    states[t] = model.lstm().zero_state(options.step_size());
  }

  job::SingleProcessTraining training(local, plan);
  data.agree(training);
  training.keep("encoder", job::part_of(whole.embedding.named_parameters()));
  training.keep("decoder", job::part_of(whole.decoder.named_parameters()));
  training.keep("rnn", job::part_of(lstm));
  training.keep(optimizer);
  training.keep("", job::part_of_each([&](int trainer) { return named(states.at(trainer)); }));
  model.evaluate_in(training, data);
  training.run(optimizer, [&](const job::Step& step) {
    job::Result result{.has_gradients = true};
    for (job::Share part{0, options.accumulate}; part.index < part.count; ++part.index) {
      const WordBatch batch = data.batch(step, part);
      const at::Tensor loss = model.training_loss(batch, step, part, states.at(step.shard));
      base::traced("backward", [&] { loss.backward(); });
      result.add(loss, batch.targets.numel());
    }
    return result;
  });
  if (!training.stopped()) model.tell_sample(data, local.sink());
}

void predict_rnn(job::Predictions& predictions, const RnnOptions& options) {
  const RnnData data(options, predictions.snapshot(), predictions.input());
  const WholeModel whole(options, data.words(), predictions.device());
  const LanguageModel& model = whole.middle;
  predictions.load(whole.parameters());
  const auto predict = [&](const std::vector<int64_t>& line) {
    LstmState state = model.lstm().zero_state(1);
    predictions.tell(options.generate > 0
                         ? job::Json{{"text", model.continued("", line, data.vocabulary())}}
                         : likeliest(model.next(line, state), data.vocabulary()));
  };
  // A `.bin` file has no lines, and numbers in lines are not the tokens of a whole text.
  if (!is_bin(predictions.input())) {
    data::for_each_line(data.test(), data.vocabulary(), predict);
    if (!data::has_reserved_words(data.vocabulary())) return;
  }
  // Evaluates the trainers' shares one by one, as the job did, because sums depend on the shares.
  job::Evaluation evaluation;
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    evaluation.add(model.evaluate(data.test(), {trainer, options.trainers}));
  }
  predictions.evaluated(evaluation, job::Unit::kWords);
}

}  // namespace distrain::scenario
