// distrain ps --local: the same model, batches and updates in one process, without RPC.

#include <ATen/Functions.h>

#include "data.h"
#include "distrain/base/trace.h"
#include "distrain/models/conv_net.h"
#include "distrain/rpc/placed.h"
#include "ps.h"

namespace distrain::scenario {

void train_ps_local(job::Local& local, const PsOptions& options) {
  const bool sync = options.mode == "sync";
  PsData data(options);
  const models::ConvNet net(options.seed, local.job().devices);
  const data::NamedTensors named = net.named_parameters();
  job::LocalUpdates::Named in_order;
  for (const std::string& name : models::ConvNet::names()) in_order.emplace_back(*named.find(name));
  job::LocalUpdates updates(options.rule(), options.mode, in_order);

  job::LocalTraining training(local, data.plan(), options.trainers);
  data.agree(training);
  training.keep("", job::part_of(named));
  training.keep(updates);
  training.note_max("staleness", 0);
  training.evaluate_epochs([&](const job::Share& share) {
    return data.evaluate(share, [&](const at::Tensor& images) {
      return models::ConvNet::forward(net.parameters(), images, models::Dropout());
    });
  });
  // sync: one update by the mean; otherwise one trainer after the other.
  training.run([&](const std::vector<job::Step>& steps) {
    const int64_t version = updates.updates();
    double loss_sum = 0;
    int64_t samples = 0;
    for (const job::Step& step : steps) {
      const ImageBatch batch = data.batch(step);
      const auto key = dropout_key(options, step);
      const at::Tensor scores = models::ConvNet::forward(
          net.parameters(), batch.images, key ? models::Dropout({*key}) : models::Dropout());
      const at::Tensor targets = rpc::placed(batch.targets, scores.device());
      const at::Tensor loss = base::traced("loss", [&] { return at::nll_loss(scores, targets); });
      loss_sum += loss.item<double>();
      samples += batch.targets.numel();
      base::traced("backward", [&] { loss.backward(); });
      updates.gather();
      if (!sync) updates.step();
    }
    if (sync) updates.step();
    job::Result result{at::scalar_tensor(loss_sum / static_cast<double>(steps.size()), at::kDouble),
                       samples};
    result.more = {{"staleness", 0}, {"version", version}, {"delay", 0}};
    return result;
  });
}

}  // namespace distrain::scenario
