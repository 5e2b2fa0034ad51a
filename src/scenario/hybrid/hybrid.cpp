// distrain hybrid: an EmbeddingBag on a parameter server, a Linear layer under DDP on the trainers.
//
// After PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework".

#include "hybrid.h"

#include <cmath>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include "distrain/autograd/parameter_versions.h"
#include "distrain/nn/random.h"
#include "distrain/nn/sized_by.h"
#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

namespace {

using RemoteTable = nn::RemoteModule<EmbeddingTable>;

/// State of the rank `master`. Keeps the table alive until the last trainer has requested it.
struct Master {
  std::mutex mutex;
  std::optional<RemoteTable> table;
  int given = 0;
};

RemoteTable table_of_job(rpc::CallContext& call, int64_t rows, int64_t dim, double range,
                         uint64_t seed, int trainers) {
  const auto master = call.agent.shared<Master>();
  std::lock_guard lock(master->mutex);
  if (!master->table) {
    const int server = call.agent.worker("ps").rank;
    master->table.emplace(call.agent, server, rows, dim, range, seed, call.agent.device_of(server));
  }
  if (++master->given < trainers) return *master->table;
  return *std::exchange(master->table, std::nullopt);
}

struct WholeModel {
  WholeModel(const HybridOptions& options, const HybridData& data, c10::Device device)
      : table(data.rows(), options.embedding_dim, options.embedding_range(), options.seed,
              device.str()),
        dense(options.embedding_dim, data.outputs(), options.seed + 1, device, options.dense) {}

  at::Tensor forward(const data::Batch& batch) const {
    return dense->forward(table.lookup(batch.indices, batch.offsets));
  }
  rpc::NamedTensors parameters() const {
    rpc::NamedTensors all = store::named_tensors("fc", *dense);
    all.merge(table.named_parameters());
    return all;
  }

  EmbeddingTable table;
  Dense dense;
};

}  // namespace

EmbeddingTable::EmbeddingTable(int64_t rows, int64_t dim, double range, uint64_t seed,
                               const std::string& device) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const c10::Device where(device);
  weight_ = nn::sized_by("--num-embeddings or --embedding-dim", [&] {
    return range > 0 ? nn::uniform({rows, dim}, range, generator, where)
                     : rpc::to_device(at::randn({rows, dim}, generator), where);
  });
  weight_.requires_grad_();
}

at::Tensor EmbeddingTable::forward(rpc::CallContext& call, at::Tensor indices, at::Tensor offsets) {
  const autograd::ParameterRead no_row_changes_meanwhile(call.agent);
  return rpc::for_rank(call.agent, call.caller.rank, lookup(indices, offsets));
}

at::Tensor EmbeddingTable::lookup(const at::Tensor& indices, const at::Tensor& offsets) const {
  const c10::Device device = weight_.device();
  rpc::check_rows(indices, weight_);
  return std::get<0>(at::embedding_bag(weight_, rpc::to_device(indices, device),
                                       rpc::to_device(offsets, device),
                                       /*scale_grad_by_freq=*/false,
                                       /*mode: sum*/ 0, /*sparse=*/true));
}

at::Tensor HybridOptions::loss(const at::Tensor& scores, const at::Tensor& targets) const {
  if (!is_binary()) return at::cross_entropy_loss(scores, targets);
  return at::binary_cross_entropy_with_logits(scores.flatten(), targets.to(scores.dtype()));
}

DenseImpl::DenseImpl(int64_t inputs, int64_t outputs, uint64_t seed, c10::Device device,
                     const std::vector<int64_t>& hidden) {
  for (const int64_t size : hidden) {
    const std::string number = std::to_string(hidden_.size());
    hidden_.push_back(register_module(
        "hidden" + number,
        std::make_shared<DenseImpl>(inputs, size, seed + 1 + hidden_.size(), device)));
    inputs = size;
  }
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const double bound = 1.0 / std::sqrt(static_cast<double>(inputs));
  weight = register_parameter("weight", nn::sized_by("--dense, --embedding-dim or --classes", [&] {
                                return nn::uniform({outputs, inputs}, bound, generator, device);
                              }));
  bias = register_parameter("bias", nn::uniform({outputs}, bound, generator, device));
}

at::Tensor DenseImpl::forward(at::Tensor x) const {
  for (const auto& layer : hidden_) x = at::relu(layer->forward(x));
  return at::linear(x, weight, bias);
}

std::vector<std::string> DenseImpl::names() const {
  std::vector<std::string> names;
  for (const auto& parameter : named_parameters()) names.push_back("fc." + parameter.key());
  return names;
}

void expose_hybrid(rpc::Agent& agent) {
  agent.expose<&table_of_job>("hybrid.table");
  job::expose_parameters<EmbeddingTable>(agent, "EmbeddingTable");
}

void train_hybrid(job::Rank& rank, const HybridOptions& options) {
  const c10::Device device = rank.device();
  HybridData data(options);
  if (data.evaluates_text()) rank.fields()["unknown_words"] = data.unknown_words();
  const auto table = rank.agent().rpc_sync<&table_of_job>(
      rpc::To("master").without_deadline(), data.rows(), options.embedding_dim,
      options.embedding_range(), options.seed, options.trainers);
  ddp::DistributedDataParallel dense(
      Dense(options.embedding_dim, data.outputs(), options.seed + 1, device, options.dense),
      rank.group("trainer"));
  optim::DistributedOptimizer optimizer(rank.agent(), table.remote_parameters(), dense.parameters(),
                                        options.rule(), options.sharing(rank.index()));
  const auto look_up = [&](const data::Batch& batch) {
    return rpc::to_device(table.forward(batch.indices, batch.offsets), device);
  };

  job::Training training(rank, options, data.steps_per_epoch());
  data.agree(training);
  training.keep("embedding", table.rref());
  training.keep("fc", dense);
  std::vector<std::string> names = dense.module()->names();
  names.insert(names.begin(), "embedding.weight");
  training.keep(optimizer, names);
  data.evaluate_in(
      training, [&](const data::Batch& batch) { return dense.module()->forward(look_up(batch)); });
  training.run([&](const job::Step& step) {
    const data::Batch batch = data.batch(step);
    const at::Tensor targets = rpc::to_device(batch.targets, device);
    autograd::Context context(rank.agent());
    const at::Tensor embedded = look_up(batch);
    const at::Tensor scores = base::traced("forward", [&] { return dense.forward(embedded); });
    const at::Tensor loss = base::traced("loss", [&] { return options.loss(scores, targets); });
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, batch.size()};
  });
}

void train_hybrid_local(job::SingleProcess& local, const HybridOptions& options) {
  HybridData data(options);
  if (data.evaluates_text()) local.fields()["unknown_words"] = data.unknown_words();
  const WholeModel model(options, data, local.device());
  const rpc::NamedTensors rows = model.table.named_parameters();
  std::vector<std::pair<std::string, at::Tensor>> layers;
  for (const auto& parameter : model.dense->named_parameters()) {
    layers.emplace_back("fc." + parameter.key(), parameter.value());
  }
  job::SingleProcessOptimizer optimizer(options.rule(), options.mode, {rows.begin(), rows.end()},
                                        layers);

  job::SingleProcessTraining training(local, options, data.steps_per_epoch());
  data.agree(training);
  training.keep("", job::part_of(model.parameters()));
  training.keep(optimizer);
  data.evaluate_in(training, [&](const data::Batch& batch) { return model.forward(batch); });
  training.run(optimizer, [&](const job::Step& step) {
    const data::Batch batch = data.batch(step);
    const at::Tensor targets = rpc::to_device(batch.targets, local.device());
    const at::Tensor scores = base::traced("forward", [&] { return model.forward(batch); });
    const at::Tensor loss = base::traced("loss", [&] { return options.loss(scores, targets); });
    return job::Result{loss, batch.size()};
  });
}

void predict_hybrid(job::Predictions& predictions, const HybridOptions& options) {
  const HybridData data(options, predictions.snapshot(), predictions.input());
  const WholeModel model(options, data, predictions.device());
  predictions.load(model.parameters());
  predictions.add("unknown_words", data.unknown_words());
  job::Evaluation evaluation;
  // Predicts the trainers' shares in turn, so that the batches equal those of the evaluation.
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    data.each_batch(data.test(), {trainer, options.trainers}, [&](const data::Batch& batch) {
      at::Tensor scores = model.forward(batch);
      if (options.is_binary()) {
        const at::Tensor known = batch.targets >= 0;
        if (known.any().item<bool>()) {
          evaluation.add(job::Evaluation::of_binary(
              scores.flatten().masked_select(rpc::to_device(known, scores.device())),
              batch.targets.masked_select(known)));
        }
        // The softmax of these two scores is the sigmoid of the logit.
        scores = at::cat({at::zeros_like(scores), scores}, 1);
      }
      predictions.tell_labels(scores, batch.targets, data.labels());
    });
  }
  if (options.is_binary()) predictions.evaluated(evaluation, job::Unit::kSamples);
}

}  // namespace distrain::scenario
