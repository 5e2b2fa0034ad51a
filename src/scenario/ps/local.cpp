// distrain ps in one process without RPC (--local, with the same batches and updates), and predict.

#include <ATen/Functions.h>

#include "conv_net.h"
#include "data.h"
#include "distrain/base/trace.h"
#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

void train_ps_local(job::SingleProcess& local, const PsOptions& options) {
  PsData data(options);
  const ConvNet net(options.seed, local.job().devices);
  job::SingleProcessOptimizer optimizer(options.rule(), options.mode,
                                        optim::named(ConvNet::names(), net.parameters()));

  job::SingleProcessTraining training(local, data.plan(), options.trainers);
  data.agree(training);
  training.keep("", job::part_of(net.named_parameters()));
  training.keep(optimizer);
  training.note_max("staleness", 0);
  data.evaluate_in(training, [&](const at::Tensor& images) {
    return ConvNet::forward(net.parameters(), images, nn::Dropout());
  });
  training.run(optimizer, [&](const job::Step& step) {
    const int64_t version = optimizer.updates();
    const data::ImageBatch batch = data.batch(step);
    const auto key = dropout_key(options, step);
    const at::Tensor scores = ConvNet::forward(
        net.parameters(), batch.images, key ? nn::Dropout({*key}) : nn::Dropout(), options.dropout);
    const at::Tensor targets = rpc::to_device(batch.labels, scores.device());
    const at::Tensor loss = base::traced("loss", [&] { return at::nll_loss(scores, targets); });
    return job::Result{
        loss, batch.labels.numel(), {{"staleness", 0}, {"version", version}, {"delay", 0}}};
  });
}

void predict_ps(job::Predictions& predictions, const PsOptions& options) {
  const PsData data(options, predictions.input());
  const ConvNet net(options.seed, {predictions.device()});
  predictions.load(net.named_parameters());
  // Uses the shares of the trainers in turn, so that the batches are those of the evaluation.
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    data.each_batch(data.test(), {trainer, options.trainers}, [&](const data::ImageBatch& batch) {
      const auto& parameters = net.parameters();
      predictions.tell_labels(ConvNet::forward(parameters, batch.images, nn::Dropout()),
                              batch.labels);
    });
  }
}

}  // namespace distrain::scenario
