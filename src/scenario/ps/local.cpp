// distrain ps --local: the same model, batches and updates in one process, without RPC.

#include <ATen/Functions.h>

#include "data.h"
#include "distrain/base/trace.h"
#include "distrain/models/conv_net.h"
#include "distrain/rpc/placed.h"
#include "ps.h"

namespace distrain::scenario {

void train_ps_local(job::Local& local, const PsOptions& options) {
  PsData data(options);
  const models::ConvNet net(options.seed, local.job().devices);
  job::LocalUpdates updates(options.rule(), options.mode,
                            optim::named(models::ConvNet::names(), net.parameters()));

  job::LocalTraining training(local, data.plan(), options.trainers);
  data.agree(training);
  training.keep("", job::part_of(net.named_parameters()));
  training.keep(updates);
  training.note_max("staleness", 0);
  training.evaluate_epochs([&](const job::Share& share) {
    return data.evaluate(share, [&](const at::Tensor& images) {
      return models::ConvNet::forward(net.parameters(), images, nn::Dropout());
    });
  });
  training.run(updates, [&](const job::Step& step) {
    const int64_t version = updates.updates();
    const ImageBatch batch = data.batch(step);
    const auto key = dropout_key(options, step);
    const at::Tensor scores = models::ConvNet::forward(net.parameters(), batch.images,
                                                       key ? nn::Dropout({*key}) : nn::Dropout());
    const at::Tensor targets = rpc::placed(batch.targets, scores.device());
    const at::Tensor loss = base::traced("loss", [&] { return at::nll_loss(scores, targets); });
    return job::Result{
        loss, batch.targets.numel(), {{"staleness", 0}, {"version", version}, {"delay", 0}}};
  });
}

}  // namespace distrain::scenario
