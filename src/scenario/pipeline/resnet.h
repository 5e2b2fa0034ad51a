#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/rpc/named_tensors.h"

namespace distrain::scenario {

/// Returns the names of the blocks between which a ResNet can be divided, in order: stem (conv1,
/// bn1, ReLU, max pool), layer1.0, …, layer4.2, head (average pool, fc). `model` is resnet18,
/// resnet50, or narrow_resnet18: an eighth of the channels of resnet18, so that tests of pipelines
/// cost little. Throws `invalid` for another model.
std::vector<std::string> resnet_blocks(const std::string& model);

/// Returns the estimated cost of each block's forward pass for one image on one CPU thread, in
/// multiply-adds, in the order of resnet_blocks().
std::vector<double> resnet_costs(const std::string& model, int64_t classes, int64_t image_size);

/// The blocks [first, last) of resnet_blocks().
struct BlockRange {
  size_t first = 0;
  size_t last = 0;
  bool operator==(const BlockRange&) const = default;
};

BlockRange whole_resnet(const std::string& model);

/// Divides the model into stages. `split` names the last block of each stage except the last one: a
/// block, a layer ("layer2" means its last block), or "conv1" for the stem. If `split` is empty,
/// two stages are those of PyTorch's tutorial (stem, layer1, layer2 | layer3, layer4, head);
/// otherwise the cost of the most expensive stage is minimized. Throws `invalid` if `split` has an
/// unknown block, the wrong order or number of blocks, or if there are more stages than blocks.
std::vector<BlockRange> cut_resnet(const std::string& model, int stages,
                                   const std::vector<std::string>& split, int64_t classes,
                                   int64_t image_size);

/// Throws `invalid` if batch norm cannot train on micro-batches of `smallest_micro_batch` images.
/// It needs two values per channel, but at the last layer an image of up to 32 x 32 pixels has one.
void check_resnet_input(int64_t image_size, int64_t smallest_micro_batch);

/// Returns the tensors that belong to `blocks`, out of the whole model's state_dict `weights`.
rpc::NamedTensors weights_of(const std::string& model, const BlockRange& blocks,
                             const rpc::NamedTensors& weights);

/// Throws `bad_data` unless `weights` have exactly the names, shapes and dtypes of the state_dict()
/// of torchvision's model, and finite values. `num_batches_tracked` may be missing.
void check_weights(const std::string& model, int64_t classes, const rpc::NamedTensors& weights);

/// A convolution without bias, followed by batch norm.
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

/// Two (resnet18) or three (resnet50) convolutions with a shortcut.
struct ResidualBlock {
  std::vector<ConvNorm> layers;
  std::optional<ConvNorm> downsample;  ///< in the shortcut, if the block changes the shape

  at::Tensor forward(const at::Tensor& x, bool training) const {
    at::Tensor y = x;
    for (size_t i = 0; i + 1 < layers.size(); ++i) y = layers[i].forward(y, training).relu_();
    y = layers.back().forward(y, training);
    return y.add_(downsample ? downsample->forward(x, training) : x).relu_();
  }
};

/// Consecutive blocks of a ResNet (He et al., CVPR 2016) as in torchvision (v1.5: the stride is in
/// the 3x3 convolution). The names, initial values and results do not depend on the division into
/// stages. Not thread-safe: training changes the running statistics.
///
/// Weights and activations are channels last in memory (NHWC), which is a third faster on a CPU
/// than NCHW; weights have torchvision's sizes. Activations are sent between stages as contiguous
/// [n, h, w, channels], so they need no copy.
class ResNetStage {
 public:
  /// Initializes as torchvision, from `seed` and tensor names. Tensors on kMeta have no values.
  ResNetStage(const std::string& model, int64_t classes, BlockRange blocks, uint64_t seed,
              c10::Device device = c10::kCPU);

  /// Maps images [n, 3, h, w] (first stage) or the previous stage's output to activations [n, h, w,
  /// channels] or, in the last stage, scores [n, classes], on the stage's device. Several passes
  /// may be in flight as long as no parameter changes. If `training`, batch norm uses the
  /// statistics of the batch, otherwise the running statistics.
  at::Tensor forward(const at::Tensor& x, bool training = true) const;

  /// Tensors with torchvision's names, in torchvision's order.
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  const Named& parameters() const { return parameters_; }
  /// Returns running_mean, running_var and num_batches_tracked of each batch norm.
  const Named& buffers() const { return buffers_; }
  /// Returns the parameters and buffers.
  rpc::NamedTensors state() const {
    rpc::NamedTensors all(parameters_.begin(), parameters_.end());
    all.insert(buffers_.begin(), buffers_.end());
    return all;
  }

  /// Copies the tensors of these blocks from a whole state_dict. Throws `bad_data`, without any
  /// change, if a name other than num_batches_tracked is missing or a shape or dtype is wrong.
  void load(const rpc::NamedTensors& weights);

 private:
  void add(ConvNorm& layer, uint64_t seed);

  const c10::Device device_;
  std::optional<ConvNorm> stem_;
  std::vector<ResidualBlock> blocks_;
  at::Tensor fc_weight_, fc_bias_;  // undefined if the stage has no head
  Named parameters_, buffers_;
};

}  // namespace distrain::scenario
