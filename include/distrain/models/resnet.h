#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/named_tensors.h"

namespace distrain::models {

/// The blocks that a ResNet can be cut between, in order: stem (conv1, bn1, ReLU, max pool),
/// layer1.0, …, layer4.2, head (average pool, fc). `model` is resnet18 or resnet50, else `invalid`.
std::vector<std::string> resnet_blocks(const std::string& model);

/// Estimated time of each block for one image, forward, on one thread of a CPU, in the order of
/// resnet_blocks(): multiply-adds, and as many as would take the time that its elements take to be
/// normalised, added and clipped. Only their proportions mean something.
std::vector<double> resnet_costs(const std::string& model, int64_t classes, int64_t image_size);

/// The blocks [first, last) of resnet_blocks().
struct BlockRange {
  size_t first = 0;
  size_t last = 0;
  bool operator==(const BlockRange&) const = default;
};

/// All of them: the uncut model.
BlockRange whole_resnet(const std::string& model);

/// Cuts the model into stages. `split` names the last block of each stage but the last: a block, a
/// layer ("layer2" is its last block), or "conv1" for the stem. Without names, two stages are cut
/// as PyTorch's tutorial cuts them (stem, layer1, layer2 | layer3, layer4, head), more so that the
/// most expensive one is as cheap as can be. Throws `invalid`: no such block, names out of order,
/// too few or too many of them, more stages than blocks.
std::vector<BlockRange> cut_resnet(const std::string& model, int stages,
                                   const std::vector<std::string>& split, int64_t classes,
                                   int64_t image_size);

/// Throws `invalid` if batch norm could not train on micro-batches as small as this: it needs more
/// than one value a channel, and an image of up to 32 pixels ends as one.
void check_resnet_input(int64_t image_size, int64_t smallest_micro_batch);

/// Those of a whole state_dict that belong to these blocks.
data::NamedTensors weights_of(const std::string& model, const BlockRange& blocks,
                              const data::NamedTensors& weights);

/// Throws `bad_data` unless `weights` are the state_dict() of torchvision's model: its names and no
/// others, shapes and dtypes. `num_batches_tracked` may be missing.
void check_weights(const std::string& model, int64_t classes, const data::NamedTensors& weights);

/// A convolution without bias and the batch norm behind it.
struct ConvNorm {
  std::string conv_name, norm_name;  ///< "layer1.0.conv1", "layer1.0.bn1"
  int64_t in = 0, out = 0, kernel = 1, stride = 1;
  at::Tensor weight;        ///< [out, in, kernel, kernel]
  at::Tensor scale, shift;  ///< batch norm's weight and bias, [out]
  at::Tensor running_mean, running_var;
  at::Tensor batches_tracked;  ///< int64 []

  at::Tensor convolve(const at::Tensor& x) const;
  at::Tensor forward(const at::Tensor& x, bool training) const;
};

/// Two (resnet18) or three (resnet50) convolutions with a way around them.
struct ResidualBlock {
  std::vector<ConvNorm> layers;
  std::optional<ConvNorm> downsample;  ///< on the way around, where the shape changes

  at::Tensor forward(const at::Tensor& x, bool training) const;
};

/// Some blocks in a row of a ResNet (He et al., CVPR 2016), as torchvision's v1.5, which has the
/// stride in the 3x3 convolution. Stages in a row are the whole model, whatever the cut: the same
/// names, initial values and results. Not thread-safe: training changes running statistics.
///
/// Weights and activations lie in memory channels last (NHWC), which takes a third less time on a
/// CPU than NCHW; the sizes of weights are torchvision's. Between stages activations travel as [n,
/// h, w, channels]: contiguous, so that nobody has to copy them.
class ResNetStage {
 public:
  /// Initialised as torchvision's, from `seed` and each name; on c10::kMeta only shapes and dtypes.
  ResNetStage(const std::string& model, int64_t classes, BlockRange blocks, uint64_t seed,
              c10::Device device = c10::kCPU);

  /// Images [n, 3, h, w] (the first stage) or what the stage before gave → what the next one takes,
  /// [n, h, w, channels], or scores [n, classes] (the last one), on its device. Several passes may
  /// be in flight before their backward passes, as long as no parameter changes. In training batch
  /// norm goes by the statistics of the batch, otherwise by the running ones.
  at::Tensor forward(const at::Tensor& x, bool training = true) const;

  /// By torchvision's names, in its order.
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  const Named& parameters() const { return parameters_; }
  /// running_mean, running_var and num_batches_tracked of each batch norm.
  const Named& buffers() const { return buffers_; }
  /// All of them.
  data::NamedTensors state() const;

  /// Copies what belongs to these blocks out of a whole state_dict. Throws `bad_data`, before it
  /// changes anything, for a missing name (but for num_batches_tracked) or a wrong tensor.
  void load(const data::NamedTensors& weights);

 private:
  void add(ConvNorm& layer, uint64_t seed);

  const c10::Device device_;
  std::optional<ConvNorm> stem_;
  std::vector<ResidualBlock> blocks_;
  at::Tensor fc_weight_, fc_bias_;  // with the head only
  Named parameters_, buffers_;
};

}  // namespace distrain::models
