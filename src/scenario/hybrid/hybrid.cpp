// distrain hybrid: an EmbeddingBag on a parameter server, a Linear layer under DDP on the trainers.
//
// After PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework".

#include <mutex>
#include <optional>

#include <ATen/Functions.h>

#include "data.h"
#include "distrain/autograd/context.h"
#include "distrain/base/trace.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/nn/remote_module.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/to_device.h"
#include "embedding_table.h"

namespace distrain::scenario {

namespace {

using RemoteTable = nn::RemoteModule<EmbeddingTable>;

/// State of the master. `table` is set from the first trainer's request to the last trainer's.
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

}  // namespace

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
      Dense(options.embedding_dim, data.classes(), options.seed + 1, device),
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
  training.keep(optimizer, {"embedding.weight", "fc.weight", "fc.bias"});
  data.evaluate_in(
      training, [&](const data::Batch& batch) { return dense.module()->forward(look_up(batch)); });
  training.run([&](const job::Step& step) {
    const data::Batch batch = data.batch(step);
    const at::Tensor targets = rpc::to_device(batch.targets, device);
    autograd::Context context(rank.agent());
    const at::Tensor embedded = look_up(batch);
    const at::Tensor scores = base::traced("forward", [&] { return dense.forward(embedded); });
    const at::Tensor loss =
        base::traced("loss", [&] { return at::cross_entropy_loss(scores, targets); });
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, batch.size()};
  });
}

}  // namespace distrain::scenario
