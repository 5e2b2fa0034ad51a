// distrain predict, of a checkpoint of ps: the digits, or whatever the ten classes are.

#include "data.h"
#include "distrain/models/conv_net.h"
#include "ps.h"

namespace distrain::scenario {

void predict_ps(job::Predictions& predictions, const PsOptions& options) {
  const std::vector<std::string> digits = {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"};
  const data::ImageSet images = data::read_images(predictions.input());
  check_images(predictions.input(), images);
  const models::ConvNet net(options.seed, {predictions.device()});
  predictions.load(net.named_parameters());
  // In the trainers' shares, one after the other: the same batches that they evaluated.
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    each_batch(options, images, {trainer, options.trainers}, [&](const ImageBatch& batch) {
      predictions.tell_labels(
          models::ConvNet::forward(net.parameters(), batch.images, nn::Dropout()), batch.targets,
          digits);
    });
  }
}

}  // namespace distrain::scenario
