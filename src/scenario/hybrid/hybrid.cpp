// distrain hybrid: an EmbeddingBag on a parameter server, a Linear layer under DDP on the trainers.
//
// After PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework".

#include "hybrid.h"

#include <cmath>
#include <deque>
#include <numeric>

#include <ATen/CPUGeneratorImpl.h>

#include "distrain/nn/random.h"
#include "distrain/nn/sized_by.h"
#include "distrain/table/sharded_embedding.h"

/// Sends the vocabulary of all trainers; null if the data are not streams.
template <>
struct distrain::rpc::Serializer<distrain::scenario::HybridData::Words> {
  static void encode(Encoder& encoder, const scenario::HybridData::Words& words) {
    rpc::encode<bool>(encoder, words != nullptr);
    if (!words) return;
    rpc::encode(encoder, words->words.all());
    rpc::encode(encoder, words->labels);
    rpc::encode(encoder, words->hash_bits);
  }
  static scenario::HybridData::Words decode(Decoder& decoder) {
    if (!rpc::decode<bool>(decoder)) return nullptr;
    data::TextVocabulary all{data::Vocabulary(rpc::decode<std::vector<std::string>>(decoder))};
    all.labels = rpc::decode<std::vector<std::string>>(decoder);
    all.hash_bits = rpc::decode<int>(decoder);
    return std::make_shared<const data::TextVocabulary>(std::move(all));
  }
};

namespace distrain::scenario {

namespace {

using RemoteTable = nn::RemoteModule<EmbeddingTable>;

/// State of the rank `master`. Keeps the table alive until the last trainer has requested it.
struct Master {
  std::mutex mutex;
  std::optional<RemoteTable> table;
  int given = 0;
  std::optional<int64_t> rows;  // of the data of the first trainer, for a sharded table
};

using CommonPromise = base::Promise<HybridData::Common>;

base::Future<HybridData::Common> common_data(rpc::CallContext& call) {
  return call.agent.shared<CommonPromise>()->future();
}

data::HandedOut take_batches(rpc::CallContext& call, int trainer, const data::StreamPosition& from,
                             int64_t first, int64_t count) {
  return call.agent.local<data::StreamServer>().take(trainer, from, first, count);
}

rpc::To trainer_0() { return rpc::To("trainer0").without_deadline(); }

/// Returns what `make` returns on trainer 0, where the other trainers wait for it.
HybridData::Common share_data(job::Rank& rank, const std::function<HybridData::Common()>& make) {
  rpc::Agent& agent = rank.agent();
  if (rank.index() > 0) return agent.rpc_sync<&common_data>(trainer_0());
  HybridData::Common made = make();
  if (made.server) agent.provide(made.server);
  agent.shared<CommonPromise>()->set(made);
  return made;
}

HybridData data_of(job::Rank& rank, const HybridOptions& options) {
  return HybridData(
      options, {rank.index()},
      {std::bind_front(share_data, std::ref(rank)), [&rank](int trainer) {
         return [&agent = rank.agent(), trainer](const auto& from, int64_t first, int64_t count) {
           const rpc::ContextScope outside(0);  // batches outlive the step
           return agent.rpc_async<&take_batches>(trainer_0(), trainer, from, first, count);
         };
       }});
}

/// Returns the number of rows that the first caller has given. So trainers with other data open the
/// same tables, and TrainingPlan::agree() reports the difference.
int64_t rows_of_job(rpc::CallContext& call, int64_t rows) {
  const auto master = call.agent.shared<Master>();
  std::lock_guard lock(master->mutex);
  if (!master->rows) master->rows = rows;
  return *master->rows;
}

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

/// Returns the options of the only table.
std::vector<table::TableOptions> table_options(const HybridOptions& options, int64_t rows) {
  constexpr int64_t kDrawnByTorch = int64_t{1} << 24;  // numbers, of which each server has a copy
  table::TableOptions table{.name = "embedding", .dim = options.embedding_dim};
  if (!options.hashes_words()) table.num_rows = rows;
  table.seed = options.seed;
  table.range = options.embedding_range();
  table.drawn_by_torch = table.num_rows > 0 && table.num_rows <= kDrawnByTorch / table.dim;
  table.max_rows = options.max_rows;
  table.optimizer = optim::to_fields(options.rule().options);
  table.optimizer.name = options.optimizer;
  return {table};
}

std::vector<int> servers_of(const job::Rank& rank) {
  const job::Roles::Role& role = rank.roles().named("ps");
  std::vector<int> ranks(static_cast<size_t>(role.count));
  std::iota(ranks.begin(), ranks.end(), role.first);
  return ranks;
}

at::ScalarType wire_dtype(const std::string& name) {
  return name == "bf16" ? at::kBFloat16 : name == "fp16" ? at::kHalf : at::kFloat;
}

/// A batch of a training step and the sum of the rows of each bag, float [bags, dim].
struct EmbeddedBatch {
  data::Batch batch;
  at::Tensor rows;
  double weight = 1;  ///< share of the batch in the step's examples

  /// Returns a part of a step's batch, without rows.
  static EmbeddedBatch part_of(const data::Batch& step, const job::Share& part) {
    if (part.count == 1) return {step, {}};
    const data::Batch batch = step.part(part.first(step.size()), part.end(step.size()));
    return {batch, {}, step.size() > 0 ? static_cast<double>(batch.size()) / step.size() : 1};
  }

  /// Returns the batch's part of the step's mean loss. `forward` maps rows to scores.
  at::Tensor loss(const HybridOptions& options, c10::Device device, const auto& forward) const {
    const at::Tensor targets = rpc::to_device(batch.targets, device),
                     here = rpc::to_device(rows, device);
    const at::Tensor scores = base::traced("forward", [&] { return forward(here); });
    const at::Tensor mean = base::traced("loss", [&] { return options.loss(scores, targets); });
    return weight == 1 ? mean : mean * weight;
  }
};

/// The embedding as a trainer uses it: the rows of a module, or of tables of the layer `table`
/// (`--table`), which are on servers or in this process.
class Embedding {
 public:
  /// Returns the sums of a module's rows.
  using Lookup = std::function<at::Tensor(const at::Tensor& indices, const at::Tensor& offsets)>;
  Embedding(HybridData& data, Lookup lookup) : data_(data), lookup_(std::move(lookup)) {}
  /// Uses a table on servers. `rows` is equal on all trainers, also if their data differ.
  Embedding(job::Rank& rank, const HybridOptions& options, HybridData& data, int64_t rows)
      : data_(data),
        tables_(std::make_shared<table::ShardedEmbedding>(
            rank.agent(), servers_of(rank), table_options(options, rows),
            options.sharing(rank.index()),
            table::LookupSettings{.wire_dtype = wire_dtype(options.wire_dtype)})),
        prefetch_(options.prefetch) {}
  /// Keeps all rows of a table in this process.
  Embedding(const HybridOptions& options, HybridData& data)
      : data_(data),
        tables_(std::make_shared<table::ShardedEmbedding>(std::make_shared<table::TableServer>(),
                                                          table_options(options, data.rows()))) {}

  /// Returns a part of a training step. Call it once for each part, in the part's context.
  EmbeddedBatch embed(const job::Step& step, const job::Share& part) {
    const int64_t most = part.index == 0 ? std::min(prefetch_, step.left) : -1;
    for (int64_t ahead = std::ssize(started_) / part.count; ahead <= most; ++ahead) {
      job::Step next = step;
      next.number += ahead;
      const data::Batch whole = data_.batch(next);
      for (job::Share its{0, part.count}; its.index < its.count; ++its.index) {
        Started& now = started_.emplace_back(Started{EmbeddedBatch::part_of(whole, its)});
        if (!tables_) continue;
        now.lookup = tables_->start({{.ids = now.part.batch.indices,
                                      .offsets = now.part.batch.offsets,
                                      .pooling = table::Pooling::kSum}});
      }
    }
    Started now = std::move(started_.front());
    started_.pop_front();
    now.part.rows = tables_ ? tables_->finish(now.lookup)[0] : embed(now.part.batch);
    return now.part;
  }
  /// Returns the sums of the rows of a batch.
  at::Tensor embed(const data::Batch& batch) const {
    return tables_ ? tables_->bags(batch.indices, batch.offsets)
                   : lookup_(batch.indices, batch.offsets);
  }
  /// Returns the tables; null for a module.
  const std::shared_ptr<table::ShardedEmbedding>& tables() const { return tables_; }

 private:
  struct Started {
    EmbeddedBatch part;
    table::ShardedEmbedding::Pending lookup{};  // in tables
  };
  HybridData& data_;
  const Lookup lookup_;  // null if there are tables
  const std::shared_ptr<table::ShardedEmbedding> tables_;
  const int64_t prefetch_ = 0;
  std::deque<Started> started_;  // this step's other parts and the parts of the next steps
};

/// The whole model in one process.
struct WholeModel {
  WholeModel(const HybridOptions& options, HybridData& data, c10::Device device)
      : dense(options.embedding_dim, data.outputs(), options.seed + 1, device, options.dense) {
    if (options.is_sharded()) {
      embedding.emplace(options, data);
      return;
    }
    const auto table = std::make_shared<EmbeddingTable>(
        data.rows(), options.embedding_dim, options.embedding_range(), options.seed, device.str());
    rows = table->named_parameters();
    embedding.emplace(data, [table](const auto&... ids) { return table->lookup(ids...); });
  }

  at::Tensor forward(const data::Batch& batch) const {
    return dense->forward(rpc::to_device(embedding->embed(batch), dense->bias.device()));
  }
  rpc::NamedTensors parameters() const {
    rpc::NamedTensors all = store::named_tensors("fc", *dense);
    all.insert(rows.begin(), rows.end());
    return all;
  }

  Dense dense;
  std::optional<Embedding> embedding;
  rpc::NamedTensors rows;  // of the module; empty if the table is sharded
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

at::Tensor EmbeddingTable::lookup(const at::Tensor& indices, const at::Tensor& offsets) const {
  const c10::Device device = weight_.device();
  rpc::check_rows(indices, weight_);
  return std::get<0>(at::embedding_bag(weight_, rpc::to_device(indices, device),
                                       rpc::to_device(offsets, device),
                                       /*scale_grad_by_freq=*/false,
                                       /*mode: sum*/ 0, /*sparse=*/true));
}

std::string HybridOptions::sharded_option() const {
  if (servers > 1) return "--servers " + std::to_string(servers);
  if (hashes_words()) return "--hash-bits " + std::to_string(hash_bits);
  if (max_rows > 0) return "--max-rows " + std::to_string(max_rows);
  if (prefetch > 0) return "--prefetch " + std::to_string(prefetch);
  if (wire_dtype != "fp32") return "--wire-dtype " + wire_dtype;
  return optimizer == optim::kRowwiseAdagrad ? "--optimizer " + optimizer : "";
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

void expose_hybrid(rpc::Agent& agent) {
  agent.expose<&table_of_job>("hybrid.table");
  agent.expose<&rows_of_job>("hybrid.rows");
  agent.expose<&common_data>("hybrid.common_data");
  agent.expose<&take_batches>("hybrid.take_batches");
  job::expose_parameters<EmbeddingTable>(agent, "EmbeddingTable");
}

void train_hybrid(job::Rank& rank, const HybridOptions& options) {
  const c10::Device device = rank.device();
  HybridData data = data_of(rank, options);
  if (data.evaluates_text()) rank.fields()["unknown_words"] = data.unknown_words();
  std::optional<RemoteTable> module;
  std::optional<Embedding> embedding;
  if (options.is_sharded()) {
    embedding.emplace(rank, options, data,
                      rank.agent().rpc_sync<&rows_of_job>("master", data.rows()));
  } else {
    module = rank.agent().rpc_sync<&table_of_job>(rpc::To("master").without_deadline(), data.rows(),
                                                  options.embedding_dim, options.embedding_range(),
                                                  options.seed, options.trainers);
    embedding.emplace(data, [&module](const auto&... ids) { return module->forward(ids...); });
  }
  ddp::DistributedDataParallel dense(
      Dense(options.embedding_dim, data.outputs(), options.seed + 1, device, options.dense),
      rank.group("trainer"), options.replicas());
  optim::DistributedOptimizer optimizer(
      rank.agent(), module ? module->remote_parameters() : std::vector<rpc::RRef<at::Tensor>>(),
      dense.parameters(), options.rule(), options.sharing(rank.index()));

  job::Training training(rank, data.plan());
  data.read_in(training);
  data.agree(training);
  std::vector<std::string> names = dense.module()->names();
  if (module) {
    training.keep("embedding", module->rref());
    names.insert(names.begin(), "embedding.weight");
  } else {
    optimizer.add(embedding->tables());
    training.keep("embedding", *embedding->tables());
  }
  training.keep("fc", dense);
  training.keep(optimizer, names);
  data.evaluate_in(training, [&](const data::Batch& batch) {
    return dense.module()->forward(rpc::to_device(embedding->embed(batch), device));
  });
  training.run([&](const job::Step& step) {
    job::StepPasses passes(rank.agent());
    job::Result result;
    for (job::Share part{0, options.accumulate}; part.index < part.count; ++part.index) {
      const auto adds_up = dense.no_sync(!part.is_last());
      passes.begin();
      const EmbeddedBatch batch = embedding->embed(step, part);
      const at::Tensor loss =
          batch.loss(options, device, [&](const at::Tensor& rows) { return dense.forward(rows); });
      passes.backward(loss);
      result.add(loss, batch.batch.size());
    }
    optimizer.step(passes.contexts());
    if (options.prefetch > 0) result.more["staleness"] = embedding->tables()->staleness();
    return result;
  });
}

void train_hybrid_local(job::SingleProcess& local, const HybridOptions& options) {
  std::vector<int> trainers(static_cast<size_t>(options.trainers));
  std::iota(trainers.begin(), trainers.end(), 0);
  HybridData data(options, trainers);
  if (data.evaluates_text()) local.fields()["unknown_words"] = data.unknown_words();
  WholeModel model(options, data, local.device());
  const auto& tables = model.embedding->tables();
  job::SingleProcessOptimizer optimizer(
      options.rule(), options.mode, {model.rows.begin(), model.rows.end()},
      optim::named(model.dense->names(), model.dense->parameters()));
  if (tables) optimizer.add(tables);

  job::SingleProcessTraining training(local, data.plan());
  data.read_in(training);
  data.agree(training);
  training.keep("", job::part_of(model.parameters()));
  if (tables) training.keep("embedding", *tables);
  training.keep(optimizer);
  data.evaluate_in(training, [&](const data::Batch& batch) { return model.forward(batch); });
  training.run(optimizer, [&](const job::Step& step) {
    job::Result result{.has_gradients = true};
    for (job::Share part{0, options.accumulate}; part.index < part.count; ++part.index) {
      const EmbeddedBatch batch = model.embedding->embed(step, part);
      const at::Tensor loss = batch.loss(options, local.device(), [&](const at::Tensor& rows) {
        return model.dense->forward(rows);
      });
      base::traced("backward", [&] { loss.backward(); });
      result.add(loss, batch.batch.size());
    }
    return result;
  });
}

void predict_hybrid(job::Predictions& predictions, const HybridOptions& options) {
  HybridData data(options, predictions.snapshot(), predictions.input());
  const WholeModel model(options, data, predictions.device());
  predictions.load(model.parameters());
  if (const auto& tables = model.embedding->tables()) predictions.load(*tables);
  if (options.hash_bits == 0) predictions.add("unknown_words", data.unknown_words());
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
